/*
 * Atropos in httpd: what the parts of the module share.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 *   mod_atropos.c  the module's record and its hooks
 *   config.c       directives
 *   region.c       the region and the rows: made by the parent for each generation, joined by the children
 *   request.c      what a task is: a request on a worker, from post_read_request to the end of its pool
 *   queue.c        who waits for a worker: the listen backlog, kept-alive connections that nobody serves
 *   backlog.c      the pure part of it: how long the oldest has waited; /proc/net/tcp
 *   cancel.c       the ladder: how a request is stopped, and what other modules may ask of us (mod_atropos.h)
 *   controller.c   one thread in each child; the one that holds the lease drives the library
 *   status.c       the page /atropos-status, and cancels by hand
 *   json.c         the library's JSON, as far as the page needs to read it
 *
 * Threads: a request belongs to the thread that serves it. Others touch only what atropos_request says so, under its
 * lock. Pools, tables, filters and request_recs are never touched by another thread.
 */
#ifndef ATROPOS_HTTPD_H
#define ATROPOS_HTTPD_H

#include "httpd.h"
#include "http_config.h"
#include "http_core.h"
#include "http_log.h"
#include "http_main.h"
#include "http_protocol.h"
#include "http_request.h"

#include "atropos_trace.h"
#include "mod_atropos.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

extern module AP_MODULE_DECLARE_DATA atropos_module;
APLOG_USE_MODULE(atropos);

/* Runs for every request: the linker puts these side by side, so that a request meets few cold pages of code. */
#define ATH_HOT __attribute__((hot))
/* What such a function does for few requests only: kept out of it, so that the others save no registers for it. */
#define ATH_SELDOM __attribute__((noinline, cold))

#define ATH_LOAD(x) __atomic_load_n(&(x), __ATOMIC_RELAXED)
#define ATH_STORE(x, value) __atomic_store_n(&(x), (value), __ATOMIC_RELAXED)
#define ATH_ADD(x, value) __atomic_fetch_add(&(x), (value), __ATOMIC_RELAXED)

/* ---- mod_atropos.c ---- */

bool ath_server_is_patched(void);

/* ---- config.c ---- */

typedef struct ath_server_config
{
    atropos_config library; /* numbers: 0 = the library's default; slo_ms included */
    const char *region_path;
    const char *decision_log;
    bool mode_set; /* without the directive: observe */
} ath_server_config;

/* Each setting with a flag of its own, so that a section which does not name it changes nothing. */
typedef struct ath_dir_config
{
    int request_class, priority, retry_after_s;
    bool protect, background;
    bool class_set, priority_set, retry_after_set, protect_set, background_set;
} ath_dir_config;

#define ATH_RETRY_AFTER_S 5

extern const command_rec ath_commands[];
void *ath_create_server_config(apr_pool_t *p, server_rec *s);
void *ath_create_dir_config(apr_pool_t *p, char *dir);
void *ath_merge_dir_config(apr_pool_t *p, void *base, void *add);
int ath_retry_after_s(request_rec *r);
bool ath_sections_tell(void);

/* ---- region.c ---- */

/* The row of one child, in memory that all processes of a generation share. Only its child writes it. */
typedef struct ath_row
{
    uint32_t pid;          /* 0 = free; claimed by compare-and-swap */
    uint32_t stopping;     /* the child accepts no more */
    uint64_t accepted;     /* connections, never reset: the sum over all rows only grows */
    uint64_t dropped;      /* kept-alive connections closed for want of a worker */
    uint64_t shortages;    /* times the child had no idle worker for somebody who waited */
    uint64_t shortage_ns;  /* monotonic time since when it has none; 0 = it has */
    uint64_t short_ns;     /* time without, of shortages that have ended */
    uint64_t parked;       /* kept-alive connections whose next request waits for a worker */
    uint64_t parked_ns;    /* for how long the oldest of them */
    uint64_t scripts_told, /* cancels, by the step of the ladder that did it */
        reads_cut,
        connections_cut,
        refused; /* requests that were answered 503 before anything was sent */
    uint64_t not_stopped; /* cancels for which there is no safe step yet */
} __attribute__((aligned(128))) ath_row;

typedef struct ath_shared
{
    uint32_t rows;
    uint32_t generation;
    struct ath_fifo *fifo; /* the leader's, in the same memory, at the same address in all children */
    /* What the leader saw last of the listening sockets. */
    uint64_t backlog, backlog_ns, backlog_limit;
    uint32_t starved; /* all workers are taken, and there can be no more */
    ath_row row[];
} ath_shared;

extern ath_shared *ath_shared_memory; /* NULL: there is no region, and every hook returns at once */

/*
 * What a child has; what requests read of it is one line of the cache. Between two of a request's hooks the kernel and
 * the rest of httpd run: each page and line that only we touch is cold by then. So the functions of APR that each request
 * calls stand here, too, and not in two linkage tables.
 */
typedef struct ath_child_state
{
    ath_row *row; /* NULL: it has not joined */
    struct kept_place *places; /* one for each processor */
    void (*cleanup_register)(apr_pool_t *, const void *, apr_status_t (*)(void *), apr_status_t (*)(void *));
    apr_status_t (*cleanup_null)(void *);
    int32_t rseq_offset; /* from the thread pointer to what the kernel tells each thread */
    uint32_t place_count;
    uint8_t kept_in_place;
    bool sections_tell;       /* some section of the configuration says something of its requests */
    int module_index;         /* as in the module's record */
    atropos_resource_t slots; /* the QUEUE resource: worker slots; the parent registers it */
} __attribute__((aligned(64))) ath_child_state;

_Static_assert(sizeof(ath_child_state) == 64, "one line of the cache");

extern ath_child_state ath_child;

/* As ap_get_module_config and ap_set_module_config, for requests. */
static inline void *ath_config(const ap_conf_vector_t *vector)
{
    return ((void **)vector)[ath_child.module_index];
}

static inline void ath_set_config(ap_conf_vector_t *vector, void *value)
{
    ((void **)vector)[ath_child.module_index] = value;
}

int ath_post_config(apr_pool_t *pconf, apr_pool_t *plog, apr_pool_t *ptemp, server_rec *s);
void ath_child_init(apr_pool_t *pchild, server_rec *s);
void ath_child_stopping(apr_pool_t *pchild, int graceful);
uint64_t ath_now_ns(void);
const char *ath_last_error(void);

/* ---- request.c ---- */

/* What the request's thread is at, for the canceller: which step of the ladder gets it out. */
typedef enum ath_phase
{
    ATH_PHASE_RUNNING, /* in a handler */
    ATH_PHASE_READING, /* in a read of the request's body */
    ATH_PHASE_WRITING  /* in a write to the client */
} ath_phase;

struct ath_conn;

/* What is so of one request; all 0 when it begins. A byte each: some are written by the canceller. */
typedef struct ath_marks
{
    uint8_t rung;     /* of the ladder, the highest so far; written under the lock, read anywhere */
    uint8_t phase;    /* ath_phase; written by the request's thread, read anywhere: a late reader cuts a cancelled request */
    /* the request's thread only, but `filtered` and `answered`, which are read anywhere */
    uint8_t filtered; /* looks at the cancel flag in its filters */
    uint8_t slot_held;
    uint8_t scripted; /* an interpreter has entered: it answers for itself */
    uint8_t started;  /* something of the response has been passed on */
    uint8_t answered; /* the 503 is on its way */
    uint8_t labelled; /* the library was told more of it than that it runs */
} ath_marks;

/*
 * A request. Records are reused and never freed, so a canceller that comes late finds a record with another token.
 * What each request writes is one line of the cache.
 */
struct atropos_request
{
    uint64_t token; /* 0 = no request; stored last when it begins; see request_gone for how it ends */
    atropos_task_t task;  /* 0 = none; kept for the next request where nothing but that it runs was told of this one */
    uint64_t scope;       /* of the task, in this request */
    uint64_t turn;        /* its number, and in the higher bits how many requests it has been: the next token */
    struct ath_conn *conn;
    request_rec *r;       /* the request's thread only */
    int fd; /* under the lock; the client's socket while a worker has the connection, else -1: nobody may touch it */
    uint32_t cancelling;  /* 1 while a canceller acts, or is about to look whether it may */
    ath_marks marks;

    pthread_mutex_t lock; /* held by the canceller while it acts */
    atropos_stop_fn stop; /* under the lock, as baton */
    void *baton;
    struct atropos_request *next_free;
} __attribute__((aligned(64)));

/* A connection of a client. */
typedef struct ath_conn
{
    conn_rec *c;
    int fd;
    uint64_t backlog_ns;               /* what the first request has waited in the backlog */
    bool first;                        /* that request is still to come */
    struct atropos_request *current;   /* the newest request, until its pool is gone */
    uint32_t parked;                   /* no thread has it: it is kept alive, or waits for the client to read */
    struct ath_conn *next, **previous; /* the child's list, for queue.c */
} ath_conn;

int ath_pre_connection(conn_rec *c, void *csd);
int ath_pre_close_connection(conn_rec *c);
void ath_suspend_connection(conn_rec *c, request_rec *r);
void ath_resume_connection(conn_rec *c, request_rec *r);
int ath_post_read_request(request_rec *r);
int ath_header_parser(request_rec *r);
struct atropos_request *ath_find(request_rec *r);
void ath_label(struct atropos_request *rec);
bool ath_is_small_file(const request_rec *r);
struct atropos_request *ath_record(uint64_t key);
void ath_requests_child_init(void);

/* ---- queue.c ---- */

void ath_queue_child_init(void);
uint64_t ath_backlog_wait_ns(int fd);
void ath_queue_add(ath_conn *conn);
void ath_queue_remove(ath_conn *conn);
void ath_worker_shortage(int event, apr_uint32_t count);
uint64_t ath_queue_shortages(void);
bool ath_queue_watch(void); /* true while this child has requests that no worker serves */
void ath_queue_sample(void);

/* ---- cancel.c ---- */

int ath_cancel(const atropos_cancel_request *request, void *arg);
void ath_insert_filter(request_rec *r);
void ath_register_filters(void);
const atropos_httpd_api *atropos_httpd(void);

/* ---- controller.c ---- */

void ath_controller_start(apr_pool_t *pchild, server_rec *s);
void ath_controller_wake(void);
void ath_controller_shortage(void);
void ath_controller_abandon(void);
bool ath_controller_leads(void);
void ath_library_log(int level, const char *message, void *arg);

/* ---- status.c ---- */

int ath_status_handler(request_rec *r);
int ath_status_hook(request_rec *r, int flags);

#endif /* ATROPOS_HTTPD_H */
