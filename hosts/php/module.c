/*
 * Start and end of the extension, and of one request. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * mod_atropos and this extension do not link each other: it offers a table of functions under a name, which APR keeps
 * and which is asked for here when PHP starts (for apache2handler that is in post_config, after all modules have
 * registered). Under any other server API, or without mod_atropos, nothing of PHP is touched.
 */
#ifdef HAVE_CONFIG_H
# include "config.h"
#endif

#include "php_atropos.h"

#include <dlfcn.h>
#include <inttypes.h>

#include "ext/standard/info.h"

/* What mod_php keeps in SG(server_context) begins so, in every release of PHP 8. */
struct server_context {
	int state;
	request_rec *r;
};

ZEND_DECLARE_MODULE_GLOBALS(atropos)

const atropos_httpd_api *atp_httpd;

PHP_INI_BEGIN()
	STD_PHP_INI_BOOLEAN("atropos.enable", "1", PHP_INI_SYSTEM, OnUpdateBool, enable, zend_atropos_globals,
		atropos_globals)
	STD_PHP_INI_ENTRY("atropos.shutdown_grace_ms", "500", PHP_INI_SYSTEM, OnUpdateLongGEZero, shutdown_grace_ms,
		zend_atropos_globals, atropos_globals)
PHP_INI_END()

static const atropos_httpd_api *find_mod_atropos(void)
{
	typedef const atropos_httpd_api *(*get_fn)(void);
	get_fn (*retrieve)(const char *);
	get_fn get;
	const atropos_httpd_api *api;

	if (strcmp(sapi_module.name, "apache2handler") != 0) {
		return NULL;
	}
	*(void **) &retrieve = dlsym(RTLD_DEFAULT, "apr_dynamic_fn_retrieve");
	get = retrieve != NULL ? retrieve("atropos_httpd") : NULL;
	api = get != NULL ? get() : NULL;
	if (api != NULL && (api->version != ATROPOS_HTTPD_API_VERSION || api->size < sizeof(*api))) {
		zend_error(E_CORE_WARNING, "atropos: mod_atropos speaks version %d of their common interface (%zu bytes), "
			"this extension version %d (%zu bytes): scripts run unprotected. Build both from the same sources",
			api->version, api->size, ATROPOS_HTTPD_API_VERSION, sizeof(*api));
		return NULL;
	}
	return api;
}

/*
 * Streams kept for later requests refer to this code, and are closed when the process ends, after PHP has unloaded its
 * extensions. So it stays in a process that ran a script. Not in the parent, whose PHP is loaded anew at each restart.
 */
static void stay_loaded(void)
{
	Dl_info self;

	if (dladdr((void *) stay_loaded, &self) != 0) {
		dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NODELETE | RTLD_LAZY);
	}
}

static void begin_process(void)
{
	stay_loaded();
	atp_stop_prepare();
	atp_calls_prepare();
	atp_session_register();
}

/* Follows the request that this thread runs. Also called before RINIT: a session may start by itself earlier. */
void atp_enter(void)
{
	static pthread_once_t process = PTHREAD_ONCE_INIT;
	zend_atropos_globals *self = ZEND_MODULE_GLOBALS_BULK(atropos);
	struct server_context *context = SG(server_context);

	if (self->entered) {
		return;
	}
	self->entered = true;
	if (atp_httpd == NULL || !self->enable || context == NULL || context->r == NULL) {
		return;
	}
	self->r = context->r;
	self->request = atp_httpd->find(self->r);
	if (self->request == NULL) {
		return;
	}
	pthread_once(&process, begin_process);
	self->task = atp_httpd->task(self->request);
	atp_stop_begin(self);
}

static PHP_GINIT_FUNCTION(atropos)
{
#if defined(COMPILE_DL_ATROPOS) && defined(ZTS)
	ZEND_TSRMLS_CACHE_UPDATE();
#endif
	memset(atropos_globals, 0, sizeof(*atropos_globals));
	atropos_globals->socket_fd = -1;
	pthread_mutex_init(&atropos_globals->io_lock, NULL);
}

static PHP_GSHUTDOWN_FUNCTION(atropos)
{
	pthread_mutex_destroy(&atropos_globals->io_lock);
}

static PHP_MINIT_FUNCTION(atropos)
{
	REGISTER_INI_ENTRIES();
	atp_httpd = ATROPOS_G(enable) ? find_mod_atropos() : NULL;
	if (atp_httpd != NULL) {
		atp_stop_install();
		atp_calls_install();
		atp_io_install();
		atp_session_install();
	}
	return SUCCESS;
}

static PHP_MSHUTDOWN_FUNCTION(atropos)
{
	if (atp_httpd != NULL) {
		atp_session_remove();
		atp_io_remove();
		atp_calls_remove();
		atp_stop_remove();
		atp_httpd = NULL;
	}
	UNREGISTER_INI_ENTRIES();
	return SUCCESS;
}

static PHP_RINIT_FUNCTION(atropos)
{
#if defined(COMPILE_DL_ATROPOS) && defined(ZTS)
	ZEND_TSRMLS_CACHE_UPDATE();
#endif
	atp_enter();
	return SUCCESS;
}

/* The script, its shutdown functions, destructors and output handlers are over; save handlers may still run. */
static PHP_RSHUTDOWN_FUNCTION(atropos)
{
	zend_atropos_globals *self = ZEND_MODULE_GLOBALS_BULK(atropos);

	/* Not earlier: a cancel that is acknowledged is not repeated, and a shutdown function that hangs needs a second. */
	if (self->token != 0 && self->told_ns != 0) {
		atp_httpd->acknowledge(self->request, self->token);
	}
	return SUCCESS;
}

/* The last thing PHP does in a request, after everything that could run a line of the script. */
static ZEND_MODULE_POST_ZEND_DEACTIVATE_D(atropos)
{
	zend_atropos_globals *self = ZEND_MODULE_GLOBALS_BULK(atropos);

	if (self->token != 0) {
		atp_stop_end(self);
	}
	self->entered = false;
	self->request = NULL;
	self->r = NULL;
	self->task = 0;
	self->session_held = false;
	return SUCCESS;
}

static PHP_MINFO_FUNCTION(atropos)
{
	zend_atropos_globals *self = ZEND_MODULE_GLOBALS_BULK(atropos);
	char text[64];

	php_info_print_table_start();
	php_info_print_table_row(2, "Atropos", PHP_ATROPOS_VERSION);
	php_info_print_table_row(2, "mod_atropos", atp_httpd != NULL ? "found" : "not found (scripts run unprotected)");
	if (self->token != 0) {
		snprintf(text, sizeof(text), "followed, token %" PRIu64, self->token);
		php_info_print_table_row(2, "This request", text);
	} else {
		php_info_print_table_row(2, "This request",
			self->request != NULL ? "traced, cannot be stopped" : "not followed");
	}
	php_info_print_table_end();
	DISPLAY_INI_ENTRIES();
}

/* Ours comes after those whose functions it wraps; none of them is needed. */
static const zend_module_dep dependencies[] = {
	ZEND_MOD_OPTIONAL("standard")
	ZEND_MOD_OPTIONAL("session")
	ZEND_MOD_OPTIONAL("openssl")
	ZEND_MOD_OPTIONAL("curl")
	ZEND_MOD_OPTIONAL("ftp")
	ZEND_MOD_OPTIONAL("imap")
	ZEND_MOD_OPTIONAL("ldap")
	ZEND_MOD_OPTIONAL("memcached")
	ZEND_MOD_OPTIONAL("mysqli")
	ZEND_MOD_OPTIONAL("odbc")
	ZEND_MOD_OPTIONAL("pdo")
	ZEND_MOD_OPTIONAL("pdo_mysql")
	ZEND_MOD_OPTIONAL("pdo_pgsql")
	ZEND_MOD_OPTIONAL("pdo_sqlite")
	ZEND_MOD_OPTIONAL("pgsql")
	ZEND_MOD_OPTIONAL("redis")
	ZEND_MOD_OPTIONAL("soap")
	ZEND_MOD_OPTIONAL("sockets")
	ZEND_MOD_OPTIONAL("spl")
	ZEND_MOD_OPTIONAL("sqlite3")
	ZEND_MOD_END
};

zend_module_entry atropos_module_entry = {
	STANDARD_MODULE_HEADER_EX,
	NULL,
	dependencies,
	"atropos",
	NULL,
	PHP_MINIT(atropos),
	PHP_MSHUTDOWN(atropos),
	PHP_RINIT(atropos),
	PHP_RSHUTDOWN(atropos),
	PHP_MINFO(atropos),
	PHP_ATROPOS_VERSION,
	PHP_MODULE_GLOBALS(atropos),
	PHP_GINIT(atropos),
	PHP_GSHUTDOWN(atropos),
	ZEND_MODULE_POST_ZEND_DEACTIVATE_N(atropos),
	STANDARD_MODULE_PROPERTIES_EX
};

#ifdef COMPILE_DL_ATROPOS
# ifdef ZTS
ZEND_TSRMLS_CACHE_DEFINE()
# endif
ZEND_GET_MODULE(atropos)
#endif
