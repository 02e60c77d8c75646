/*
 * What a task is. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A request begins in post_read_request and ends with its pool: under event the answer may be written, and the pool be
 * destroyed, by another thread than the one that ran the handler. The worker slot ends earlier, when the thread lets go
 * of the connection. So nothing here is bound to a thread; everything hangs on the request's and the connection's own
 * structures, which httpd hands from thread to thread.
 *
 * Internal redirects and subrequests belong to the request they came from.
 */
#include "atropos_httpd.h"

#include "apr_portable.h"
#include "scoreboard.h"

/* Records by number, in blocks that are never freed. */
#define BLOCK 256
#define BLOCKS 256
static struct atropos_request *blocks[BLOCKS];
static uint32_t records;
static struct atropos_request *free_records;
static pthread_mutex_t records_lock = PTHREAD_MUTEX_INITIALIZER;

/* token = sequence of the record << 16 | its number: no counter that threads share, and no token comes twice. */
#define INDEX_BITS 16

static struct atropos_request *take_record(ath_conn *conn)
{
    struct atropos_request *rec = conn->spare;

    if (rec != NULL) {
        conn->spare = NULL;
        return rec;
    }
    pthread_mutex_lock(&records_lock);
    rec = free_records;
    if (rec != NULL) {
        free_records = rec->next_free;
    }
    else if (records < BLOCK * BLOCKS) {
        uint32_t index = records;

        if (index % BLOCK == 0)
            __atomic_store_n(&blocks[index / BLOCK], calloc(BLOCK, sizeof(*rec)), __ATOMIC_RELEASE);
        if (blocks[index / BLOCK] != NULL) {
            rec = &blocks[index / BLOCK][index % BLOCK];
            pthread_mutex_init(&rec->lock, NULL);
            rec->index = index;
            __atomic_store_n(&records, index + 1, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&records_lock);
    return rec;
}

static void give_back(struct atropos_request *rec)
{
    pthread_mutex_lock(&records_lock);
    rec->next_free = free_records;
    free_records = rec;
    pthread_mutex_unlock(&records_lock);
}

/* The record a token names, or once named. */
struct atropos_request *ath_record(uint64_t token)
{
    uint32_t index = token & ((1u << INDEX_BITS) - 1);

    if (index >= __atomic_load_n(&records, __ATOMIC_ACQUIRE))
        return NULL;
    return &__atomic_load_n(&blocks[index / BLOCK], __ATOMIC_ACQUIRE)[index % BLOCK];
}

/* ---- connections ---- */

static ath_conn *conn_of(conn_rec *c)
{
    return ap_get_module_config(c->conn_config, &atropos_module);
}

static apr_status_t connection_gone(void *conn_)
{
    ath_conn *conn = conn_;

    ath_queue_remove(conn);
    if (conn->spare != NULL)
        give_back(conn->spare);
    return APR_SUCCESS;
}

static ath_conn *make_conn(conn_rec *c)
{
    ath_conn *conn = apr_pcalloc(c->pool, sizeof(*conn));

    conn->c = c;
    conn->fd = -1;
    ap_set_module_config(c->conn_config, &atropos_module, conn);
    return conn;
}

int ath_pre_connection(conn_rec *c, void *csd)
{
    ath_conn *conn;
    apr_os_sock_t fd;

    /* Connections to a backend are no client's; HTTP/2's streams have no socket (see ath_post_read_request). */
    if (ath_my_row == NULL || !atropos_trace_is_on() || c->outgoing || c->master != NULL || csd == NULL ||
        apr_os_sock_get(&fd, csd) != APR_SUCCESS)
        return DECLINED;
    conn = make_conn(c);
    conn->fd = fd;
    conn->first = true;
    conn->backlog_ns = ath_backlog_wait_ns(fd);
    ATH_ADD(ath_my_row->accepted, 1);
    ath_queue_add(conn);
    apr_pool_cleanup_register(c->pool, conn, connection_gone, apr_pool_cleanup_null);
    return DECLINED;
}

/* The thread lets go of the connection; the request may live on until its answer is written. */
static void end_slot(ath_conn *conn)
{
    struct atropos_request *rec = conn->current;

    if (rec == NULL)
        return;
    /* From here on the socket may be closed at any moment by whoever has the connection. */
    pthread_mutex_lock(&rec->lock);
    rec->fd = -1;
    pthread_mutex_unlock(&rec->lock);
    if (rec->slot_held) {
        rec->slot_held = false;
        atropos_task_free_resource(rec->task, ath_slots, 0, 1);
        /* What is left is the client's to read, or a module's to resume. */
        atropos_task_client_wait(rec->task, 1);
    }
}

int ath_pre_close_connection(conn_rec *c)
{
    ath_conn *conn = conn_of(c);

    if (conn != NULL)
        end_slot(conn);
    return DECLINED;
}

ATH_HOT void ath_suspend_connection(conn_rec *c, request_rec *r)
{
    ath_conn *conn = conn_of(c);

    if (conn == NULL)
        return;
    end_slot(conn);
    __atomic_store_n(&conn->parked, 1, __ATOMIC_RELEASE);
}

ATH_HOT void ath_resume_connection(conn_rec *c, request_rec *r)
{
    ath_conn *conn = conn_of(c);
    struct atropos_request *rec;

    if (conn == NULL)
        return;
    __atomic_store_n(&conn->parked, 0, __ATOMIC_RELEASE);
    rec = conn->current;
    /* Without a scoreboard handle it is resumed only to be cleaned up, and its socket is closed already. */
    if (rec == NULL || c->sbh == NULL)
        return;
    pthread_mutex_lock(&rec->lock);
    rec->fd = conn->fd;
    pthread_mutex_unlock(&rec->lock);
    if (!rec->slot_held) {
        rec->slot_held = true;
        atropos_task_client_wait(rec->task, 0);
        atropos_task_get_resource(rec->task, ath_slots, 0, 1);
    }
}

/* ---- requests ---- */

ATH_HOT static apr_status_t request_gone(void *rec_)
{
    struct atropos_request *rec = rec_;
    ath_conn *conn = rec->conn;
    atropos_task_t task = rec->task;

    /* After this no canceller finds the request any more, and none is inside. */
    pthread_mutex_lock(&rec->lock);
    rec->token = 0;
    rec->fd = -1;
    rec->stop = NULL;
    pthread_mutex_unlock(&rec->lock);
    if (rec->r->status >= HTTP_INTERNAL_SERVER_ERROR)
        atropos_task_request_end(task, 1);
    atropos_free_cancel(task); /* gives the slot back as well */
    if (conn->current == rec)
        ATH_STORE(conn->current, NULL);
    if (conn->spare == NULL)
        conn->spare = rec;
    else
        give_back(rec);
    return APR_SUCCESS;
}

ATH_HOT int ath_post_read_request(request_rec *r)
{
    conn_rec *c = r->connection;
    ath_conn *conn;
    struct atropos_request *rec;
    atropos_task_t task;

    if (ath_my_row == NULL || !atropos_trace_is_on() || r->prev != NULL || r->main != NULL)
        return DECLINED;
    conn = conn_of(c);
    if (conn == NULL) {
        /* A stream of HTTP/2 runs on a thread of mod_http2's, with a connection of its own that has no socket: it holds
         * no worker slot. (Any other connection without a record began while Atropos was off.) */
        if (c->master == NULL)
            return DECLINED;
        conn = make_conn(c);
        apr_pool_cleanup_register(c->pool, conn, connection_gone, apr_pool_cleanup_null);
    }
    rec = take_record(conn);
    if (rec == NULL)
        return DECLINED;
    rec->sequence++;
    task = atropos_task_create(rec->sequence << INDEX_BITS | rec->index);
    if (task == 0) {
        /* The table is full: counted and said by the library. */
        give_back(rec);
        return DECLINED;
    }
    if (conn->current != NULL)
        end_slot(conn); /* pipelined: the answer before is still being written */
    rec->conn = conn;
    rec->r = r;
    rec->filtered = rec->scripted = rec->started = rec->answered = rec->labelled = false;
    rec->slot_held = conn->fd >= 0;
    ATH_STORE(rec->phase, ATH_PHASE_RUNNING);
    /* No lock: until the token is there, a canceller under the lock finds none and looks at nothing else. */
    rec->c = c;
    rec->task = task;
    rec->fd = conn->fd;
    rec->stop = NULL;
    ATH_STORE(rec->rung, 0);
    __atomic_store_n(&rec->token, rec->sequence << INDEX_BITS | rec->index, __ATOMIC_RELEASE);
    ATH_STORE(conn->current, rec);
    ap_set_module_config(r->request_config, &atropos_module, rec);
    /* Registered first, so it runs last: after the request was logged and everybody else has cleaned up. */
    apr_pool_cleanup_register(r->pool, rec, request_gone, apr_pool_cleanup_null);

    if (conn->first) {
        conn->first = false;
        if (conn->backlog_ns > 0)
            atropos_task_waited(task, ath_slots, conn->backlog_ns);
    }
    if (rec->slot_held)
        atropos_task_get_resource(task, ath_slots, 0, 1);
    return DECLINED;
}

/* The request that r belongs to. */
struct atropos_request *ath_find(request_rec *r)
{
    while (r->main != NULL || r->prev != NULL)
        r = r->main != NULL ? r->main : r->prev;
    return ap_get_module_config(r->request_config, &atropos_module);
}

/* "GET /path", as much of it as a label takes; no query, which may hold secrets. */
void ath_label(struct atropos_request *rec)
{
    const request_rec *r = rec->r;
    char text[48];
    size_t method = strnlen(r->method, 16), uri = strnlen(r->uri, sizeof(text) - 2 - method);

    if (rec->labelled)
        return;
    rec->labelled = true;
    memcpy(text, r->method, method);
    text[method] = ' ';
    memcpy(text + method + 1, r->uri, uri);
    text[method + 1 + uri] = '\0';
    atropos_task_set(rec->task, ATROPOS_TASK_LABEL, (int64_t)(intptr_t)text);
}

/* A file that fits into a socket's buffer is sent faster than anybody could cancel it. */
#define SMALL_FILE_BYTES 65536

ATH_HOT bool ath_is_small_file(const request_rec *r)
{
    return r->finfo.filetype == APR_REG && r->finfo.size <= SMALL_FILE_BYTES && r->method_number == M_GET &&
           (r->handler == NULL || !strcmp(r->handler, AP_DEFAULT_HANDLER_NAME));
}

/* The first hook that knows the location and the directory. After an internal redirect the new place counts. */
ATH_HOT int ath_header_parser(request_rec *r)
{
    const ath_dir_config *cfg;
    struct atropos_request *rec;
    bool told;

    if (ath_my_row == NULL || r->main != NULL)
        return DECLINED;
    cfg = ap_get_module_config(r->per_dir_config, &atropos_module);
    told = cfg->class_set || cfg->priority_set || cfg->protect_set || cfg->background_set;
    /* The handler is not known yet: what looks like a small file and is a script gets its label when it is. */
    if ((r->prev == NULL && !told && ath_is_small_file(r)) || (rec = ath_find(r)) == NULL)
        return DECLINED;
    ath_label(rec);
    if (r->prev == NULL && !told)
        return DECLINED;
    atropos_task_set(rec->task, ATROPOS_TASK_CLASS, cfg->request_class);
    atropos_task_set(rec->task, ATROPOS_TASK_PRIORITY, cfg->priority);
    atropos_task_set(rec->task, ATROPOS_TASK_PROTECTED, cfg->protect);
    atropos_task_set(rec->task, ATROPOS_TASK_BACKGROUND, cfg->background);
    return DECLINED;
}
