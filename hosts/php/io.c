/*
 * What a script may be waiting in: sockets it opened, its own client. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * PHP's socket streams wait again when a signal ends their poll. So a stream tells which socket it reads or writes
 * just now; the canceller shuts that down, and only while the call lasts. The server's connection to the client waits
 * again, too, but is mod_atropos's to act on: there it is only told which way the script waits.
 */
#include "php_atropos.h"

#include "php_network.h"
#include "php_streams.h"

/* ---- sockets ---- */

/* The operations of one kind of stream, and ours in front of them. */
typedef struct traced_ops {
	php_stream_ops ops;		/* first: a stream points to it */
	const php_stream_ops *own;
} traced_ops;

typedef struct transport {
	char name[32];
	php_stream_transport_factory own;
} transport;

static traced_ops kinds[16];
static int kinds_used;
static pthread_mutex_t kinds_lock = PTHREAD_MUTEX_INITIALIZER;
static transport transports[16];
static int transports_used;

static const php_stream_ops *own_ops(const php_stream *stream)
{
	return ((const traced_ops *) stream->ops)->own;
}

static void set_socket(zend_atropos_globals *self, int fd)
{
	pthread_mutex_lock(&self->io_lock);
	self->socket_fd = fd;
	pthread_mutex_unlock(&self->io_lock);
}

static int socket_of(const php_stream *stream)
{
	const php_netstream_data_t *data = stream->abstract;

	return data != NULL ? data->socket : -1;
}

static ssize_t traced_read(php_stream *stream, char *buf, size_t count)
{
	zend_atropos_globals *self = ZEND_MODULE_GLOBALS_BULK(atropos);
	ssize_t n;

	set_socket(self, socket_of(stream));
	n = own_ops(stream)->read(stream, buf, count);
	set_socket(self, -1);
	return n;
}

static ssize_t traced_write(php_stream *stream, const char *buf, size_t count)
{
	zend_atropos_globals *self = ZEND_MODULE_GLOBALS_BULK(atropos);
	ssize_t n;

	set_socket(self, socket_of(stream));
	n = own_ops(stream)->write(stream, buf, count);
	set_socket(self, -1);
	return n;
}

static int traced_close(php_stream *stream, int close_handle)
{
	/* A fatal error in a notification callback leaves read without a return; its number must not outlive the socket. */
	set_socket(ZEND_MODULE_GLOBALS_BULK(atropos), -1);
	return own_ops(stream)->close(stream, close_handle);
}

static void trace_stream(php_stream *stream);

/* Connect, accept and the like: they end with EINTR. Some compare stream->ops with their own. */
static int traced_set_option(php_stream *stream, int option, int value, void *param)
{
	const php_stream_ops *ours = stream->ops;
	int result;

	stream->ops = own_ops(stream);
	result = stream->ops->set_option(stream, option, value, param);
	stream->ops = ours;
	if (option == PHP_STREAM_OPTION_XPORT_API) {
		php_stream_xport_param *call = param;

		if (call->op == STREAM_XPORT_OP_ACCEPT && call->outputs.client != NULL) {
			trace_stream(call->outputs.client);
		}
	}
	return result;
}

static void trace_stream(php_stream *stream)
{
	traced_ops *kind = NULL;

	if (stream->ops == NULL || stream->ops->set_option == traced_set_option) {
		return;
	}
	pthread_mutex_lock(&kinds_lock);
	for (int i = 0; i < kinds_used && kind == NULL; i++) {
		kind = kinds[i].own == stream->ops ? &kinds[i] : NULL;
	}
	if (kind == NULL && kinds_used < (int) (sizeof(kinds) / sizeof(*kinds)) && stream->ops->set_option != NULL) {
		kind = &kinds[kinds_used++];
		kind->own = stream->ops;
		kind->ops = *stream->ops;
		kind->ops.read = traced_read;
		kind->ops.write = traced_write;
		kind->ops.close = traced_close;
		kind->ops.set_option = traced_set_option;
	}
	pthread_mutex_unlock(&kinds_lock);
	if (kind != NULL) {
		stream->ops = &kind->ops;
	}
}

static php_stream *traced_factory(const char *proto, size_t protolen, const char *resourcename, size_t resourcenamelen,
	const char *persistent_id, int options, int flags, struct timeval *timeout, php_stream_context *context
	STREAMS_DC)
{
	php_stream *stream = NULL;

	for (int i = 0; i < transports_used; i++) {
		if (strlen(transports[i].name) == protolen && memcmp(transports[i].name, proto, protolen) == 0) {
			stream = transports[i].own(proto, protolen, resourcename, resourcenamelen, persistent_id, options, flags,
				timeout, context STREAMS_REL_CC);
			break;
		}
	}
	if (stream != NULL) {
		trace_stream(stream);
	}
	return stream;
}

/* Those over sockets; others (a plugin's own) keep something else in stream->abstract. */
static const char *const socket_transports[] = {
	"tcp", "udp", "unix", "udg", "ssl", "tls", "tlsv1.0", "tlsv1.1", "tlsv1.2", "tlsv1.3", NULL
};

static void transports_install(void)
{
	transports_used = 0;
	kinds_used = 0;
	for (const char *const *name = socket_transports; *name != NULL; name++) {
		php_stream_transport_factory own = zend_hash_str_find_ptr(php_stream_xport_get_hash(), *name, strlen(*name));
		transport *entry = &transports[transports_used];

		if (own != NULL) {
			strncpy(entry->name, *name, sizeof(entry->name) - 1);
			entry->own = own;
			transports_used++;
			php_stream_xport_register(*name, traced_factory);
		}
	}
}

static void transports_remove(void)
{
	for (int i = 0; i < transports_used; i++) {
		php_stream_xport_register(transports[i].name, transports[i].own);
	}
	transports_used = 0;
}

/* ---- the client ---- */

static size_t (*own_ub_write)(const char *str, size_t str_length);
static void (*own_flush)(void *server_context);
static size_t (*own_read_post)(char *buffer, size_t count_bytes);

/* Not undone when the call bails out (the client is gone): whoever then reads it late cuts what is cut already. */
static void set_client_io(int what)
{
	zend_atropos_globals *self = ZEND_MODULE_GLOBALS_BULK(atropos);

	pthread_mutex_lock(&self->io_lock);
	self->client_io = what;
	pthread_mutex_unlock(&self->io_lock);
}

static size_t traced_ub_write(const char *str, size_t str_length)
{
	size_t n;

	set_client_io(ATROPOS_STOP_CLIENT_WRITE);
	n = own_ub_write(str, str_length);
	set_client_io(0);
	return n;
}

static void traced_flush(void *server_context)
{
	set_client_io(ATROPOS_STOP_CLIENT_WRITE);
	own_flush(server_context);
	set_client_io(0);
}

static size_t traced_read_post(char *buffer, size_t count_bytes)
{
	size_t n;

	set_client_io(ATROPOS_STOP_CLIENT_READ);
	n = own_read_post(buffer, count_bytes);
	set_client_io(0);
	return n;
}

void atp_io_install(void)
{
	transports_install();
	own_ub_write = sapi_module.ub_write;
	own_flush = sapi_module.flush;
	own_read_post = sapi_module.read_post;
	sapi_module.ub_write = traced_ub_write;
	sapi_module.flush = traced_flush;
	sapi_module.read_post = traced_read_post;
}

void atp_io_remove(void)
{
	sapi_module.ub_write = own_ub_write;
	sapi_module.flush = own_flush;
	sapi_module.read_post = own_read_post;
	transports_remove();
}
