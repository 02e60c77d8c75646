/*
 * Atropos in PHP: what the parts of the extension share.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 *   module.c    start and end: settings, the meeting with mod_atropos, one request
 *   stop.c      how a script is told to stop, and what its client gets
 *   calls.c     where a script looks up: after functions that can wait, before files
 *   io.c        what it may be waiting in: sockets it opened, its own client
 *   session.c   the lock of a session as a resource
 *
 * Two threads meet here: the one that runs a script, and the canceller (a thread of mod_atropos in the same process),
 * which only ever calls stop(), under the request's lock. All else belongs to the script's thread.
 */
#ifndef PHP_ATROPOS_H
#define PHP_ATROPOS_H

#include "php.h"
#include "php_ini.h"
#include "SAPI.h"
#include "zend_exceptions.h"

#include <pthread.h>
#include <stdint.h>

#include "mod_atropos.h"

#define PHP_ATROPOS_VERSION ATROPOS_VERSION_STRING

#if PHP_VERSION_ID < 80200
# error "the atropos extension needs PHP 8.2 or newer"
#endif

extern zend_module_entry atropos_module_entry;
#define phpext_atropos_ptr &atropos_module_entry

/* One per thread. */
ZEND_BEGIN_MODULE_GLOBALS(atropos)
	/* settings */
	bool enable;
	zend_long shutdown_grace_ms;

	/* the request that runs; the canceller reads while the token is registered */
	bool entered;			/* whether it is followed was decided */
	atropos_request *request;	/* NULL: not followed */
	request_rec *r;			/* what PHP answers: the main request, or a subrequest */
	uint64_t token;			/* 0: nobody can stop us */
	atropos_task_t task;
	pthread_t thread;
	zend_atomic_bool *vm_interrupt;
	bool signal_was_blocked;
	bool woken;			/* a signal was sent (canceller writes, under the request's lock) */
	int64_t told_ns;		/* when the script was told to stop, 0 = not; atomic */

	/* what the thread waits in; io_lock, since the canceller acts on it */
	pthread_mutex_t io_lock;
	int socket_fd;			/* a socket of the script's own, -1 = none */
	int client_io;			/* ATROPOS_STOP_CLIENT_* or 0 */

	/* the session it holds */
	bool session_held;
	uint64_t session_instance;
ZEND_END_MODULE_GLOBALS(atropos)

ZEND_EXTERN_MODULE_GLOBALS(atropos)
#define ATROPOS_G(v) ZEND_MODULE_GLOBALS_ACCESSOR(atropos, v)
#if defined(ZTS) && defined(COMPILE_DL_ATROPOS)
ZEND_TSRMLS_CACHE_EXTERN()
#endif

/* module.c */
extern const atropos_httpd_api *atp_httpd;	/* NULL: no mod_atropos in this process */
extern void atp_enter(void);

/* stop.c */
extern void atp_stop_install(void);
extern void atp_stop_remove(void);
extern void atp_stop_prepare(void);		/* once per process */
extern void atp_stop_begin(zend_atropos_globals *self);
extern void atp_stop_end(zend_atropos_globals *self);
/* The flag was seen where an exception may be raised. May bail out. */
extern void atp_interrupted(void);

/* calls.c */
extern void atp_calls_install(void);
extern void atp_calls_remove(void);
extern void atp_calls_prepare(void);		/* once per process */

/* io.c */
extern void atp_io_install(void);
extern void atp_io_remove(void);

/* session.c */
extern void atp_session_install(void);
extern void atp_session_remove(void);
extern void atp_session_register(void);		/* once per process */

#endif
