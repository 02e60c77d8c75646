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

#include "ap_mpm.h"
#include "apr_portable.h"
#include "scoreboard.h"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

/* glibc from 2.35 on. */
#if defined(__GLIBC__) && defined(__has_include) && defined(__has_builtin)
#if __has_include(<sys/rseq.h>) && __has_builtin(__builtin_thread_pointer)
#include <sys/rseq.h>
#define ATH_HAVE_RSEQ
#endif
#endif

/* Records by number, in blocks that are never freed. A task's key is its record's number, from 1. */
#define BLOCK 256
#define BLOCKS 256
#define BLOCK_BYTES (BLOCK * sizeof(struct atropos_request))
static struct atropos_request *blocks[BLOCKS];
static uint32_t records;
static struct atropos_request *free_records;
static pthread_mutex_t records_lock = PTHREAD_MUTEX_INITIALIZER;

/* token = the record's turn << 16 | its number: no counter that threads share, and no token comes twice. */
#define INDEX_BITS 16
#define A_TURN (UINT64_C(1) << INDEX_BITS)

/*
 * Records that requests have left, each with its task, by the processor on which they ended: the next request there finds
 * both in its caches, and only has to say that it begins. Under event a worker is on another processor time and again,
 * so what it used last itself would be in the other one's caches.
 */
#define KEPT 8
struct kept_place
{
    struct atropos_request *kept[KEPT]; /* NULL = free; exchanged by anybody */
} __attribute__((aligned(64)));
typedef struct kept_place kept_place;

static void *make_zeroed(size_t bytes)
{
    const size_t page = 4096, whole = (bytes + page - 1) / page * page;
    void *made = aligned_alloc(page, whole);

    return made != NULL ? memset(made, 0, whole) : NULL;
}

void ath_requests_child_init(void)
{
    long processors = sysconf(_SC_NPROCESSORS_CONF);
    int threads = 0;
    uint32_t count;

    ath_child.cleanup_register = apr_pool_cleanup_register;
    ath_child.cleanup_null = apr_pool_cleanup_null;
#ifdef ATH_HAVE_RSEQ
    ath_child.rseq_offset = (int32_t)__rseq_offset;
#endif
    ap_mpm_query(AP_MPMQ_MAX_THREADS, &threads);
    if (threads < 1)
        threads = 1;
    /* No more are kept than there are workers: the table of tasks has room for twice as many. */
    count = processors < 1 ? 1 : (uint32_t)(processors < threads ? processors : threads);
    ath_child.kept_in_place = (uint8_t)((uint32_t)threads / count < KEPT ? (uint32_t)threads / count : KEPT);
    /* And the first records behind them: what most requests touch is one page. */
    ath_child.places = make_zeroed(count * sizeof(kept_place) + BLOCK_BYTES);
    ath_child.place_count = ath_child.places != NULL ? count : 0;
    blocks[0] = ath_child.places != NULL ? (struct atropos_request *)(ath_child.places + count) : NULL;
}

/* A guess, for the thread may be moved at any moment: it decides what is fast, not what is right. */
static inline uint32_t this_processor(void)
{
#ifdef ATH_HAVE_RSEQ
    /* What the kernel keeps there for each thread. It is always a processor's number; 0 where it keeps nothing. */
    const struct rseq *area = (const void *)((const char *)__builtin_thread_pointer() + ath_child.rseq_offset);

    return __atomic_load_n(&area->cpu_id_start, __ATOMIC_RELAXED);
#else
    int cpu = sched_getcpu();

    return cpu > 0 ? (uint32_t)cpu : 0;
#endif
}

static inline kept_place *place_here(void)
{
    uint32_t processor = this_processor();

    return &ath_child.places[processor < ath_child.place_count ? processor : processor % ath_child.place_count];
}

/* The one that was left last, or nearly; NULL = none. */
ATH_HOT static struct atropos_request *take_kept(void)
{
    kept_place *place;

    if (ath_child.place_count == 0)
        return NULL;
    place = place_here();
    for (uint32_t i = 0; i < ath_child.kept_in_place; i++) {
        struct atropos_request *rec;

        if (ATH_LOAD(place->kept[i]) != NULL &&
            (rec = __atomic_exchange_n(&place->kept[i], NULL, __ATOMIC_ACQUIRE)) != NULL)
            return rec;
    }
    return NULL;
}

/* Leaves it here; what then has no room any more, or NULL. */
ATH_HOT static struct atropos_request *keep(struct atropos_request *rec)
{
    kept_place *place;

    if (ath_child.place_count == 0)
        return rec;
    place = place_here();
    for (uint32_t i = 0; i < ath_child.kept_in_place && rec != NULL; i++)
        if (ATH_LOAD(place->kept[i]) == NULL)
            rec = __atomic_exchange_n(&place->kept[i], rec, __ATOMIC_ACQ_REL);
    return rec;
}

static struct atropos_request *take_free_record(void)
{
    struct atropos_request *rec;

    pthread_mutex_lock(&records_lock);
    rec = free_records;
    if (rec != NULL) {
        free_records = rec->next_free;
    }
    else if (records < BLOCK * BLOCKS) {
        uint32_t index = records;

        if (blocks[index / BLOCK] == NULL)
            __atomic_store_n(&blocks[index / BLOCK], make_zeroed(BLOCK_BYTES), __ATOMIC_RELEASE);
        if (blocks[index / BLOCK] != NULL) {
            rec = &blocks[index / BLOCK][index % BLOCK];
            pthread_mutex_init(&rec->lock, NULL);
            rec->turn = index;
            __atomic_store_n(&records, index + 1, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&records_lock);
    return rec;
}

ATH_SELDOM static void give_back(struct atropos_request *rec)
{
    atropos_free_cancel(rec->task);
    rec->task = 0;
    pthread_mutex_lock(&records_lock);
    rec->next_free = free_records;
    free_records = rec;
    pthread_mutex_unlock(&records_lock);
}

/* The record that a task's key names. */
struct atropos_request *ath_record(uint64_t key)
{
    uint32_t index = (uint32_t)key - 1;

    if (key == 0 || key > __atomic_load_n(&records, __ATOMIC_ACQUIRE))
        return NULL;
    return &__atomic_load_n(&blocks[index / BLOCK], __ATOMIC_ACQUIRE)[index % BLOCK];
}

/* ---- connections ---- */

static ath_conn *conn_of(conn_rec *c)
{
    return ath_config(c->conn_config);
}

static apr_status_t connection_gone(void *conn_)
{
    ath_conn *conn = conn_;

    ath_queue_remove(conn);
    return APR_SUCCESS;
}

static ath_conn *make_conn(conn_rec *c)
{
    ath_conn *conn = apr_pcalloc(c->pool, sizeof(*conn));

    conn->c = c;
    conn->fd = -1;
    ath_set_config(c->conn_config, conn);
    return conn;
}

int ath_pre_connection(conn_rec *c, void *csd)
{
    ath_conn *conn;
    apr_os_sock_t fd;

    /* Connections to a backend are no client's; HTTP/2's streams have no socket (see ath_post_read_request). */
    if (ath_child.row == NULL || !atropos_trace_is_on() || c->outgoing || c->master != NULL || csd == NULL ||
        apr_os_sock_get(&fd, csd) != APR_SUCCESS)
        return DECLINED;
    conn = make_conn(c);
    conn->fd = fd;
    conn->first = true;
    conn->backlog_ns = ath_backlog_wait_ns(fd);
    ATH_ADD(ath_child.row->accepted, 1);
    ath_queue_add(conn);
    apr_pool_cleanup_register(c->pool, conn, connection_gone, apr_pool_cleanup_null);
    return DECLINED;
}

/* The thread lets go of the connection; the request may live on until its answer is written. */
ATH_SELDOM static void end_slot(ath_conn *conn)
{
    struct atropos_request *rec = conn->current;

    if (rec == NULL)
        return;
    /* From here on the socket may be closed at any moment by whoever has the connection. */
    pthread_mutex_lock(&rec->lock);
    rec->fd = -1;
    pthread_mutex_unlock(&rec->lock);
    if (rec->marks.slot_held) {
        rec->marks.slot_held = false;
        atropos_task_free_resource(rec->task, ath_child.slots, 0, 1);
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
    if (conn->current != NULL)
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
    if (!rec->marks.slot_held) {
        rec->marks.slot_held = true;
        atropos_task_client_wait(rec->task, 0);
        atropos_task_get_resource(rec->task, ath_child.slots, 0, 1);
    }
}

/* ---- requests ---- */

ATH_SELDOM static void await_canceller(struct atropos_request *rec)
{
    pthread_mutex_lock(&rec->lock);
    pthread_mutex_unlock(&rec->lock);
}

/* What was said of this request must not stand for the next one. */
ATH_SELDOM static void free_task(struct atropos_request *rec)
{
    rec->stop = NULL;
    atropos_free_cancel(rec->task);
    rec->task = 0;
}

ATH_HOT static apr_status_t request_gone(void *rec_)
{
    struct atropos_request *rec = rec_;
    ath_conn *conn = rec->conn;
    int failed = rec->r->status >= HTTP_INTERNAL_SERVER_ERROR;

    /*
     * After this no canceller finds the request any more, and none is inside: a canceller first says that it is there and
     * then looks at the token, we take the token away and then look for cancellers, and both in this order for everybody.
     */
    __atomic_store_n(&rec->token, 0, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&rec->cancelling, __ATOMIC_SEQ_CST) != 0)
        await_canceller(rec);
    if (conn->current == rec)
        ATH_STORE(conn->current, NULL);
    /* Gives the slot back as well, and whatever a module has said that it holds. */
    atropos_task_leave(rec->task, failed);
    if (rec->marks.labelled || rec->marks.scripted)
        free_task(rec);
    if ((rec = keep(rec)) != NULL)
        give_back(rec);
    return APR_SUCCESS;
}

/* A stream of HTTP/2 runs on a thread of mod_http2's, with a connection of its own that has no socket: it holds no worker
 * slot. NULL: any other connection without a record began while Atropos was off. */
ATH_SELDOM static ath_conn *stream_conn(conn_rec *c)
{
    ath_conn *conn;

    if (c->master == NULL)
        return NULL;
    conn = make_conn(c);
    apr_pool_cleanup_register(c->pool, conn, connection_gone, apr_pool_cleanup_null);
    return conn;
}

/* Gives the record a new task; NULL stands for a free record. NULL: neither can be had. */
ATH_SELDOM static struct atropos_request *new_task(struct atropos_request *rec)
{
    if (rec == NULL && (rec = take_free_record()) == NULL)
        return NULL;
    /* Where there is none, because Atropos is off or the table is full, atropos_task_enter says so. */
    rec->task = atropos_trace_task_create((uint32_t)(rec->turn % A_TURN) + 1);
    return rec;
}

ATH_HOT int ath_post_read_request(request_rec *r)
{
    conn_rec *c = r->connection;
    ath_conn *conn;
    struct atropos_request *rec;

    /* Whether the gate is open is seen by atropos_task_enter, which has it on the line that it reads anyway. */
    if (ath_child.row == NULL || r->prev != NULL || r->main != NULL)
        return DECLINED;
    conn = conn_of(c);
    if (conn == NULL && (conn = stream_conn(c)) == NULL)
        return DECLINED;
    if (conn->current != NULL)
        end_slot(conn); /* pipelined: the answer before is still being written */
    rec = take_kept();
    if ((rec == NULL || rec->task == 0) && (rec = new_task(rec)) == NULL)
        return DECLINED;
    /* A worker has it, but for a stream. */
    rec->scope = atropos_task_enter(rec->task, 0, conn->fd >= 0 ? ath_child.slots : 0);
    if (rec->scope == 0) {
        /* Atropos is off, or the table is full, which the library has counted and said. */
        give_back(rec);
        return DECLINED;
    }
    rec->turn += A_TURN;
    rec->conn = conn;
    rec->r = r;
    rec->marks = (ath_marks){.slot_held = conn->fd >= 0};
    rec->fd = conn->fd;
    /* No lock: until the token is there, a canceller under the lock finds none and looks at nothing else. */
    __atomic_store_n(&rec->token, rec->turn, __ATOMIC_RELEASE);
    ATH_STORE(conn->current, rec);
    ath_set_config(r->request_config, rec);
    /* Registered first, so it runs last: after the request was logged and everybody else has cleaned up. */
    ath_child.cleanup_register(r->pool, rec, request_gone, ath_child.cleanup_null);

    if (conn->first) {
        conn->first = false;
        if (conn->backlog_ns > 0)
            atropos_task_waited(rec->task, ath_child.slots, conn->backlog_ns);
    }
    return DECLINED;
}

/* The request that r belongs to. */
struct atropos_request *ath_find(request_rec *r)
{
    while (r->main != NULL || r->prev != NULL)
        r = r->main != NULL ? r->main : r->prev;
    return ath_config(r->request_config);
}

/* "GET /path", as much of it as a label takes; no query, which may hold secrets. */
void ath_label(struct atropos_request *rec)
{
    const request_rec *r = rec->r;
    char text[48];
    size_t method = strnlen(r->method, 16), uri = strnlen(r->uri, sizeof(text) - 2 - method);

    if (rec->marks.labelled)
        return;
    rec->marks.labelled = true;
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

ATH_SELDOM static int describe(request_rec *r)
{
    const ath_dir_config *cfg = ath_config(r->per_dir_config);
    bool told = cfg->class_set || cfg->priority_set || cfg->protect_set || cfg->background_set;
    struct atropos_request *rec;

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

/* The first hook that knows the location and the directory. After an internal redirect the new place counts. */
ATH_HOT int ath_header_parser(request_rec *r)
{
    /* The handler is not known yet: what looks like a small file and is a script gets its label when it is. */
    if (ath_child.row == NULL || r->main != NULL ||
        (r->prev == NULL && !ath_child.sections_tell && ath_is_small_file(r)))
        return DECLINED;
    return describe(r);
}
