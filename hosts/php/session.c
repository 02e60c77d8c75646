/*
 * The lock of a session as a resource. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * PHP's "files" save handler locks the session's file when it reads it and keeps it until the session is closed,
 * usually at the end of the request: all requests of one visitor wait for the slowest of them. The handler's table of
 * functions is constant, so a copy of it takes its place where a handler is chosen: at the begin of each request and by
 * ini_set().
 *
 * Without sessions in PHP (the symbols are weak), or with another save handler, nothing is traced.
 */
#include "php_atropos.h"

#if __has_include("ext/session/php_session.h")

#include "ext/session/php_session.h"

#ifdef ZTS
# define SESSION_GLOBALS ps_globals_id
#else
# define SESSION_GLOBALS ps_globals
#endif
#pragma weak _php_find_ps_module
#pragma weak php_session_start
#ifdef ZTS
# pragma weak ps_globals_id
#else
# pragma weak ps_globals
#endif

static atropos_resource_t session_lock;
static const ps_module *files;		/* PHP's own; NULL: no sessions here */
static ps_module traced_files;
static zend_module_entry *sessions;
static zend_result (*own_request_startup)(INIT_FUNC_ARGS);
static zend_ini_entry *handler_setting;
static ZEND_INI_MH((*own_on_modify));

static uint64_t instance_of(const zend_string *key)
{
	/* FNV-1a. The same in all processes, which PHP's own hash need not be. */
	uint64_t hash = UINT64_C(0xcbf29ce484222325);

	for (const char *c = PS(save_path) != NULL ? PS(save_path) : ""; *c != '\0'; c++) {
		hash = (hash ^ (unsigned char) *c) * UINT64_C(0x100000001b3);
	}
	for (size_t i = 0; i < ZSTR_LEN(key); i++) {
		hash = (hash ^ (unsigned char) ZSTR_VAL(key)[i]) * UINT64_C(0x100000001b3);
	}
	return hash != 0 ? hash : 1;
}

static void released(zend_atropos_globals *self)
{
	if (self->session_held) {
		self->session_held = false;
		atp_httpd->released(self->task, session_lock, self->session_instance, 1);
	}
}

static bool begin_wait(zend_atropos_globals *self, const zend_string *key)
{
	uint64_t instance;

	atp_enter();	/* session.auto_start comes before our own beginning of the request */
	if (self->task == 0 || session_lock == 0) {
		return false;
	}
	instance = instance_of(key);
	if (self->session_held) {
		if (self->session_instance == instance) {
			return false;	/* it has the file open */
		}
		released(self);		/* one handler, one file: the other is closed before this is opened */
	}
	self->session_instance = instance;
	atp_httpd->wait(self->task, session_lock, instance, 1);
	return true;
}

static void end_wait(zend_atropos_globals *self, zend_result result)
{
	if (result == SUCCESS) {
		self->session_held = true;
		atp_httpd->acquired(self->task, session_lock, self->session_instance, 1);
	} else {
		atp_httpd->abandoned(self->task, session_lock);
	}
}

static PS_READ_FUNC(traced)
{
	zend_atropos_globals *self = ZEND_MODULE_GLOBALS_BULK(atropos);
	bool waits = begin_wait(self, key);
	zend_result result = files->s_read(mod_data, key, val, maxlifetime);

	if (waits) {
		end_wait(self, result);
	}
	return result;
}

/* Opens, and locks, the file of a new id. */
static PS_WRITE_FUNC(traced)
{
	zend_atropos_globals *self = ZEND_MODULE_GLOBALS_BULK(atropos);
	bool waits = begin_wait(self, key);
	zend_result result = files->s_write(mod_data, key, val, maxlifetime);

	if (waits) {
		end_wait(self, result);
	}
	return result;
}

static PS_CLOSE_FUNC(traced)
{
	/* Before: another request may have it by the time the call returns. */
	released(ZEND_MODULE_GLOBALS_BULK(atropos));
	return files->s_close(mod_data);
}

static PS_DESTROY_FUNC(traced)
{
	released(ZEND_MODULE_GLOBALS_BULK(atropos));
	return files->s_destroy(mod_data, key);
}

static void take_place(void)
{
	if (PS(mod) == files) {
		PS(mod) = &traced_files;
	}
	if (PS(default_mod) == files) {
		PS(default_mod) = &traced_files;
	}
}

static ZEND_INI_MH(on_modify)
{
	zend_result result = own_on_modify(entry, new_value, mh_arg1, mh_arg2, mh_arg3, stage);

	take_place();
	return result;
}

/* A session that starts by itself (session.auto_start) does so right after the choice; here it comes after ours. */
static zend_result on_request_startup(INIT_FUNC_ARGS)
{
	bool auto_start = PS(auto_start);
	zend_result result;

	PS(auto_start) = false;
	result = own_request_startup(INIT_FUNC_ARGS_PASSTHRU);
	PS(auto_start) = auto_start;
	take_place();
	if (result == SUCCESS && auto_start && PS(session_status) != php_session_disabled) {
		php_session_start();
	}
	return result;
}

void atp_session_install(void)
{
	files = NULL;
	session_lock = 0;
	sessions = zend_hash_str_find_ptr(&module_registry, ZEND_STRL("session"));
	if (sessions == NULL || _php_find_ps_module == NULL || php_session_start == NULL || &SESSION_GLOBALS == NULL) {
		return;
	}
	handler_setting = zend_hash_str_find_ptr(EG(ini_directives), ZEND_STRL("session.save_handler"));
	if (handler_setting == NULL || handler_setting->on_modify == NULL || sessions->request_startup_func == NULL) {
		return;
	}
	files = _php_find_ps_module("files");
	if (files == NULL) {
		return;
	}
	traced_files = *files;
	traced_files.s_read = ps_read_traced;
	traced_files.s_write = ps_write_traced;
	traced_files.s_close = ps_close_traced;
	traced_files.s_destroy = ps_delete_traced;
	own_on_modify = handler_setting->on_modify;
	handler_setting->on_modify = on_modify;
	own_request_startup = sessions->request_startup_func;
	sessions->request_startup_func = on_request_startup;
}

void atp_session_remove(void)
{
	if (files == NULL) {
		return;
	}
	sessions->request_startup_func = own_request_startup;
	handler_setting->on_modify = own_on_modify;
	files = NULL;
}

void atp_session_register(void)
{
	if (files != NULL) {
		session_lock = atp_httpd->resource_register("php session", ATROPOS_LOCK);
	}
}

#else /* this PHP has no sessions */

void atp_session_install(void)
{
}

void atp_session_remove(void)
{
}

void atp_session_register(void)
{
}

#endif
