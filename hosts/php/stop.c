/*
 * How a script is told to stop, and what its client gets. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Nothing can be done to a script from outside but to make it look up: its interrupt flag is set, which the engine
 * reads at function entries and jumps, and whatever blocks it is woken: a signal where the system call ends with EINTR,
 * a shutdown of the socket where PHP would retry. The script's own thread then asks whether the cancel is meant for its
 * present request, answers, and unwinds as exit() does.
 *
 *   running --1st cancel--> told: answer, unwind; shutdown functions and destructors run
 *   told --2nd rung, grace over--> what runs is ended (bailout), and again whatever comes next
 *
 * Every other cancel does nothing: while told, repeats would only disturb the shutdown functions.
 */
#include "php_atropos.h"

#include <errno.h>
#include <signal.h>
#include <sys/socket.h>
#include <syslog.h>
#include <time.h>

/* PHP, its timers and the MPMs use the signals below 32 and SIGRTMIN itself. */
#define WAKE_SIGNAL (SIGRTMIN + 5)

static void (*previous_interrupt)(zend_execute_data *execute_data);

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static bool grace_is_over(const zend_atropos_globals *self, int64_t told_ns)
{
	return now_ns() - told_ns >= self->shutdown_grace_ms * INT64_C(1000000);
}

/* ---- the canceller's thread, which holds the request's lock ---- */

static int stop(void *baton, uint64_t token, int rung)
{
	zend_atropos_globals *self = baton;
	int64_t told_ns = __atomic_load_n(&self->told_ns, __ATOMIC_ACQUIRE);
	int client_io = 0;

	if (told_ns != 0 && (rung < 2 || !grace_is_over(self, told_ns))) {
		return 0;
	}
	zend_atomic_bool_store_ex(self->vm_interrupt, true);
	if (self->woken) {
		/* Asked before, some milliseconds ago: so it hangs in there, and does not just pass by. */
		pthread_mutex_lock(&self->io_lock);
		if (self->socket_fd >= 0) {
			shutdown(self->socket_fd, SHUT_RDWR);
		}
		client_io = self->client_io;
		pthread_mutex_unlock(&self->io_lock);
	}
	/* It may come just before the call that blocks, and is lost then; the cancel is repeated. */
	self->woken = true;
	pthread_kill(self->thread, WAKE_SIGNAL);
	return client_io;
}

/* ---- the script's thread ---- */

static void on_wake(int signal_number)
{
	/* All it is for has happened: the system call ended. */
}

/* In a process that runs scripts, not in its parent. Without SA_RESTART, which is the point. */
void atp_stop_prepare(void)
{
	struct sigaction action = {.sa_handler = on_wake};

	sigemptyset(&action.sa_mask);
	sigaction(WAKE_SIGNAL, &action, NULL);
}

void atp_stop_begin(zend_atropos_globals *self)
{
	sigset_t wake, old;

	self->thread = pthread_self();
	self->vm_interrupt = &EG(vm_interrupt);
	self->woken = false;
	self->socket_fd = -1;
	self->client_io = 0;
	__atomic_store_n(&self->told_ns, 0, __ATOMIC_RELAXED);
	sigemptyset(&wake);
	sigaddset(&wake, WAKE_SIGNAL);
	/* The MPMs block all signals in their workers. */
	pthread_sigmask(SIG_UNBLOCK, &wake, &old);
	self->signal_was_blocked = sigismember(&old, WAKE_SIGNAL) == 1;
	self->token = atp_httpd->enter(self->request, stop, self);
	if (self->token == 0 && self->signal_was_blocked) {
		pthread_sigmask(SIG_BLOCK, &wake, NULL);
	}
}

void atp_stop_end(zend_atropos_globals *self)
{
	const struct timespec at_once = {0};
	sigset_t wake;

	atp_httpd->leave(self->request, self->token);
	self->token = 0;
	if (!self->signal_was_blocked) {
		return;
	}
	sigemptyset(&wake);
	sigaddset(&wake, WAKE_SIGNAL);
	pthread_sigmask(SIG_BLOCK, &wake, NULL);
	/* A signal on its way would wake the thread's next request, which nobody meant. */
	while (self->woken && (sigtimedwait(&wake, NULL, &at_once) == WAKE_SIGNAL || errno == EINTR)) {
	}
}

static void add_header(const char *line)
{
	sapi_header_line header = {.line = line, .line_len = strlen(line)};

	sapi_header_op(SAPI_HEADER_REPLACE, &header);
}

/*
 * The client's answer. It goes out now, past PHP's output buffers and before the shutdown functions, so that they can
 * neither delay it nor make it look like a page; buffers and handlers end as always, into nothing.
 */
static void answer_client(zend_atropos_globals *self)
{
	static const char page[] =
		"<!DOCTYPE html>\n<html><head><title>503 Service Unavailable</title></head>\n"
		"<body><h1>Service Unavailable</h1>\n"
		"<p>The server stopped this request because it kept others from being served. Please try again later.</p>\n"
		"</body></html>\n";

	if (!SG(headers_sent) && !SG(request_info).no_headers) {
		/* What the script has set so far described another answer. */
		sapi_header_op(SAPI_HEADER_DELETE_ALL, NULL);
		if (atp_httpd->refuse(self->r)) {
			char length[64];

			zval_ptr_dtor(&SG(callback_func));	/* header_register_callback(): the script's, too */
			ZVAL_UNDEF(&SG(callback_func));
			add_header("Content-Type: text/html; charset=utf-8");
			add_header("Cache-Control: no-store");
			snprintf(length, sizeof(length), "Content-Length: %zu", sizeof(page) - 1);
			add_header(length);
			sapi_header_op(SAPI_HEADER_SET_STATUS, (void *) (zend_intptr_t) 503);
			sapi_send_headers();
			php_output_set_status(PHP_OUTPUT_DISABLED);
			sapi_module.ub_write(page, sizeof(page) - 1);
			sapi_flush();
			return;
		}
	}
	/* Part of a page is out already: it must not end like a whole one. */
	SG(headers_sent) = 1;
	php_output_set_status(PHP_OUTPUT_DISABLED);
	PG(connection_status) = PHP_CONNECTION_ABORTED;
	atp_httpd->abort_response(self->r);
}

static void unwind(void)
{
	zend_object *pending = EG(exception);

	if (pending == NULL) {
		if (EG(current_execute_data) == NULL) {
			/* A function of PHP's own as a shutdown function: no frame to unwind to. exit() does the same. */
			zend_bailout();
		}
		zend_throw_unwind_exit();
	} else if (!zend_is_unwind_exit(pending)) {
		/* The error of a call that was cut short must not be caught and handled as if it were one. */
		EG(exception) = zend_create_unwind_exit();
		OBJ_RELEASE(pending);
	}
}

void atp_interrupted(void)
{
	zend_atropos_globals *self = ZEND_MODULE_GLOBALS_BULK(atropos);
	atropos_cancel_info why = {.size = sizeof(why)};
	int64_t told_ns = self->told_ns;
	char line[256];
	int rung;

	/* The flag has many causes: timeouts, signals, other extensions. */
	if (self->token == 0 || (rung = atp_httpd->cancelled(self->request, self->token, &why)) == 0) {
		return;
	}
	if (told_ns != 0) {
		if (rung >= 2 && grace_is_over(self, told_ns)) {
			zend_bailout();
		}
		return;
	}
	__atomic_store_n(&self->told_ns, now_ns(), __ATOMIC_RELEASE);
	if ((PG(connection_status) & PHP_CONNECTION_ABORTED) && (EG(flags) & EG_FLAGS_IN_SHUTDOWN)) {
		/* Its connection was cut, so it has ended already, and this is a shutdown function. */
		return;
	}
	snprintf(line, sizeof(line), "Atropos stops this script: %s", why.reason);
	sapi_module.log_message(line, LOG_NOTICE);
	answer_client(self);
	unwind();
}

static void on_interrupt(zend_execute_data *execute_data)
{
	if (previous_interrupt != NULL) {
		previous_interrupt(execute_data);
	}
	atp_interrupted();
}

void atp_stop_install(void)
{
	previous_interrupt = zend_interrupt_function;
	zend_interrupt_function = on_interrupt;
}

void atp_stop_remove(void)
{
	zend_interrupt_function = previous_interrupt;
}
