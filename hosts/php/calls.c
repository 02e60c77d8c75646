/*
 * Where a script looks up beside the engine's own places. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The engine looks at its interrupt flag at function entries and jumps, not after a call of a built-in function. A
 * script of a few calls in a row, each cut short by the wake-up, would run to its end on answers that nobody gave. So
 * built-in functions that may wait get a wrapper that looks when they return.
 *
 * Which: all of every extension that is not known to only compute, and of PHP's standard functions those that wait.
 * Functions that only compute are left alone: they need no wrapper, since nothing cuts them short.
 *
 * Files, too: a script that was cancelled while PHP still read the request's body does not begin.
 */
#include "php_atropos.h"

#include "zend_extensions.h"

/* Where the function's own handler is kept: a slot in each function, which PHP hands out to extensions. */
static int slot = -1;

/* These only compute. "standard" is searched by name. */
static const char *const computing[] = {
	"Core", "atropos", "bcmath", "calendar", "ctype", "date", "filter", "gmp", "hash", "iconv", "json", "mbstring",
	"pcre", "random", "Reflection", "standard", "tokenizer", NULL
};

/* Of "standard". A * at the end matches the rest. */
static const char *const waiting[] = {
	"copy", "dns_*", "checkdnsrr", "exec", "f*", "gethost*", "get_headers", "getmxrr", "mail", "passthru", "pclose",
	"pfsockopen", "popen", "proc_*", "readfile", "shell_exec", "sleep", "stream_*", "system", "time_nanosleep",
	"time_sleep_until", "usleep", NULL
};

static bool is_one_of(const char *name, const char *const *list)
{
	for (; *list != NULL; list++) {
		const char *star = strchr(*list, '*');

		if (star != NULL ? strncmp(name, *list, star - *list) == 0 : strcmp(name, *list) == 0) {
			return true;
		}
	}
	return false;
}

static inline void look(void)
{
	if (UNEXPECTED(zend_atomic_bool_load_ex(&EG(vm_interrupt)))) {
		atp_interrupted();
	}
}

static void ZEND_FASTCALL call_and_look(INTERNAL_FUNCTION_PARAMETERS)
{
	zif_handler own = (zif_handler) EX(func)->internal_function.reserved[slot];

	own(INTERNAL_FUNCTION_PARAM_PASSTHRU);
	look();
}

static void wrap(zend_internal_function *function)
{
	const char *module = function->module != NULL ? function->module->name : "";

	if (function->type != ZEND_INTERNAL_FUNCTION || function->handler == NULL || function->handler == call_and_look) {
		return;
	}
	if (is_one_of(module, computing) &&
		(strcmp(module, "standard") != 0 || !is_one_of(ZSTR_VAL(function->function_name), waiting))) {
		return;
	}
	function->reserved[slot] = (void *) function->handler;
	function->handler = call_and_look;
}

static void unwrap(zend_internal_function *function)
{
	if (function->type == ZEND_INTERNAL_FUNCTION && function->handler == call_and_look) {
		function->handler = (zif_handler) function->reserved[slot];
	}
}

static void for_all(void (*act)(zend_internal_function *))
{
	zend_function *function;
	zend_class_entry *class;

	ZEND_HASH_FOREACH_PTR(CG(function_table), function) {
		act(&function->internal_function);
	} ZEND_HASH_FOREACH_END();
	ZEND_HASH_FOREACH_PTR(CG(class_table), class) {
		if (class->type == ZEND_INTERNAL_CLASS) {
			ZEND_HASH_FOREACH_PTR(&class->function_table, function) {
				act(&function->internal_function);
			} ZEND_HASH_FOREACH_END();
		}
	} ZEND_HASH_FOREACH_END();
}

static zend_op_array *(*own_compile_file)(zend_file_handle *file, int type);

/* After, too: a file may come from afar. Who included it finds the exception and drops what was compiled. */
static zend_op_array *compile_and_look(zend_file_handle *file, int type)
{
	zend_op_array *code;

	look();
	if (EG(exception) != NULL) {
		return NULL;
	}
	code = own_compile_file(file, type);
	look();
	return code;
}

/* Once per process, after all extensions have started: a cache of compiled files stands in front of earlier ones. */
void atp_calls_prepare(void)
{
	own_compile_file = zend_compile_file;
	zend_compile_file = compile_and_look;
}

/* In MINIT: threads copy the tables later. */
void atp_calls_install(void)
{
	slot = zend_get_resource_handle("atropos");
	if (slot < 0) {
		zend_error(E_CORE_WARNING, "atropos: other extensions took all slots of functions: a script that was woken "
			"from a call stops later, at its next jump or function entry");
		return;
	}
	for_all(wrap);
}

void atp_calls_remove(void)
{
	if (slot >= 0) {
		for_all(unwrap);
	}
}
