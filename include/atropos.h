/* libatropos: find the request that monopolises a shared resource and cancel it.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * DRAFT CONTRACT: to be replaced by the header cbindgen generates; names and meanings stay.
 */
#ifndef ATROPOS_H
#define ATROPOS_H
#include <stddef.h>
#include <stdint.h>

/* A task: a unit of work that can be cancelled. Index + generation; 0 = "not tracked". Every call accepts 0
 * and stale handles and then does nothing. */
typedef uint64_t atropos_task_t;
/* A worker (one thread or process working for a task), returned by atropos_task_attach. */
typedef uint64_t atropos_worker_t;
/* A registered resource; 0 = unknown, harmless. */
typedef uint32_t atropos_resource_t;

/* Errors: never reused. */
#define ATROPOS_OK 0
#define ATROPOS_E_INVALID   (-1) /* bad argument (NULL, size, range) */
#define ATROPOS_E_NOT_INIT  (-2) /* before atropos_init or after atropos_shutdown */
#define ATROPOS_E_ALREADY   (-3) /* second atropos_init in this process, controller already started ... */
#define ATROPOS_E_CONFIG    (-4) /* unknown key / bad value; text in atropos_last_error */
#define ATROPOS_E_IO        (-5)
#define ATROPOS_E_REGION    (-6) /* region file refused: wrong magic, layout, size, owner or mode */
#define ATROPOS_E_FULL      (-7) /* a table is full */
#define ATROPOS_E_STALE     (-8) /* stale or foreign handle */
#define ATROPOS_E_NOT_LEADER (-9) /* tick: another process holds the controller lease (not a failure) */
#define ATROPOS_E_FORKED    (-10) /* call in a forked child that must re-register first */
#define ATROPOS_E_PANIC     (-11) /* a bug in the library, caught at the boundary */
#define ATROPOS_E_UNSUPPORTED (-12)

/* enum atropos_resource_type */
#define ATROPOS_LOCK   1
#define ATROPOS_MEMORY 2
#define ATROPOS_QUEUE  3

/* mode; 0 in a config struct = default (observe) */
#define ATROPOS_MODE_OFF     1
#define ATROPOS_MODE_OBSERVE 2
#define ATROPOS_MODE_ENFORCE 3

/* All numeric fields: 0 = default. `size` must be sizeof(atropos_config). Precedence: defaults < file < text < fields. */
typedef struct atropos_config {
  size_t size;
  const char *region_path;   /* NULL: anonymous shared mapping (still inherited over fork). Else a file, created 0600. */
  const char *file;          /* NULL or path of a "key = value" file, # comments */
  const char *text;          /* NULL or "key = value\n..." text */
  const char *decision_log;  /* NULL or path; one JSON object per line is appended by the controller's process */
  uint32_t mode;             /* ATROPOS_MODE_*; text key `mode = off|observe|enforce` */
  uint32_t max_tasks;        /* 1024 (16..65536) */
  uint32_t max_workers;      /* 256: extra workers that attach (16..65536) */
  uint32_t window_ms;        /* 100 (20..10000) */
  uint32_t trigger_windows;  /* 3 (1..100) */
  uint32_t verify_ms;        /* 200 (10..60000) */
  double slo_ms;             /* absolute objective for p99; 0 = relative to the learned baseline */
  double slo_tolerance;      /* 0.20 (0.01..10) */
  double contention_threshold; /* 0.30 (0..1) */
  double min_relief;         /* 0.20 (0..1): share of execution time that a cancel must give back */
  double cancel_rate_per_s;  /* 2 (token bucket) */
  uint32_t cancel_burst;     /* 4 */
  double cancel_share;       /* 0.01: at most this share of completions may be cancelled (burst excepted) */
} atropos_config;
/* text keys are the field names: mode, max_tasks, max_workers, window_ms, trigger_windows, verify_ms, slo_ms, slo_tolerance,
 * contention_threshold, min_relief, cancel_rate_per_s, cancel_burst, cancel_share, region_path, decision_log */

int atropos_init(const atropos_config *cfg); /* NULL = all defaults */
int atropos_shutdown(void);
/* Any process of the region may call it; sizes and region_path cannot change. Tracing gates of all processes follow. */
int atropos_reload(const atropos_config *cfg);
/* In a forked child: adopts the inherited region for this process (new owner identity, no inherited task or thread state). */
int atropos_after_fork(void);
/* Copies the last error text of this thread (NUL terminated, truncated to size); returns its full length. */
size_t atropos_last_error(char *buf, size_t size);
const char *atropos_strerror(int code);
uint32_t atropos_version(void); /* ATROPOS_VERSION_NUMBER at run time: major<<16|minor<<8|patch */

/* Log callback: level 1 error, 2 warning, 3 notice, 4 debug. Called only by threads inside init/reload/tick/controller/agent, never by hot calls. */
typedef void (*atropos_log_fn)(int level, const char *message, void *arg);
int atropos_set_log(atropos_log_fn fn, void *arg);

/* Registers (or finds by name) a resource; returns 0 on failure (text in atropos_last_error). Same name in all processes = same id. */
atropos_resource_t atropos_resource_register(const char *name, uint32_t type);

/* ---- tasks ---- */
atropos_task_t atropos_create_cancel(uint64_t key); /* begin a task, bind it to this thread; 0 if untracked */
void atropos_free_cancel(atropos_task_t task);
atropos_task_t atropos_task_create(uint64_t key);   /* the same, bound to no thread */
atropos_task_t atropos_current_task(void);
int  atropos_task_bind(atropos_task_t task);        /* this thread's bound calls act on it from now on; 0 unbinds */
/* A second worker (thread or process) joins the task and is bound to it; detach undoes it. */
atropos_worker_t atropos_task_attach(atropos_task_t task);
void atropos_task_detach(atropos_worker_t worker);
int  atropos_task_child(atropos_task_t parent, atropos_task_t child); /* cancelling parent cancels child */

#define ATROPOS_TASK_CLASS 1       /* 0..15 */
#define ATROPOS_TASK_PRIORITY 2    /* -100..100, higher = more important */
#define ATROPOS_TASK_BACKGROUND 3  /* 0/1: latency does not count */
#define ATROPOS_TASK_PROTECTED 4   /* 0/1: never cancelled */
#define ATROPOS_TASK_RETRIED 5     /* 0/1 */
#define ATROPOS_TASK_CANCELLABLE 6 /* 0/1, default 1: 0 while cancelling is not possible (commit in progress) */
#define ATROPOS_TASK_LABEL 7       /* value = (uintptr_t) of a NUL-terminated string, 47 bytes kept */
#define ATROPOS_TASK_WORK_START 8  /* value 1: the unit of work that a cancel would lose (a transaction) begins now; 0: it ended */
int atropos_task_set(atropos_task_t task, uint32_t what, int64_t value);

/* ---- requests: the latency and throughput signal. createCancel..freeCancel counts as one request when unused. ---- */
void atropos_request_begin(uint32_t class_);             /* bound task */
void atropos_request_end(int32_t status);                /* 0 ok, else failed */
void atropos_task_request_begin(atropos_task_t t, uint32_t class_);
void atropos_task_request_end(atropos_task_t t, int32_t status);
uint64_t atropos_task_scope(atropos_task_t t);           /* the scope sequence; changes at each begin (0 for stale handles) */
/* Bracket time the host spends waiting for its own client inside a request: not execution time. */
void atropos_task_client_wait(atropos_task_t t, int32_t on);

/* ---- hot calls on the bound task; instance 0 = not told apart ---- */
void atropos_get_resource(atropos_resource_t r, uint64_t amount);      /* acquired (ends a wait on r) */
void atropos_free_resource(atropos_resource_t r, uint64_t amount);
void atropos_slow_by_resource(atropos_resource_t r, uint64_t amount);  /* wait begins */
void atropos_get_resource_on(atropos_resource_t r, uint64_t instance, uint64_t amount);
void atropos_free_resource_on(atropos_resource_t r, uint64_t instance, uint64_t amount);
void atropos_slow_by_resource_on(atropos_resource_t r, uint64_t instance, uint64_t amount);
void atropos_wait_abandoned(atropos_resource_t r);                     /* the wait ended without the resource */
void atropos_evicted(atropos_resource_t r, uint64_t amount);           /* MEMORY: this task's acquisition evicted others' units */
void atropos_progress(uint64_t done, uint64_t total);
int  atropos_cancel_requested(void);                                   /* cheap poll; != 0: stop this scope */
/* ---- the same on an explicit task (one thread at a time per task) ---- */
void atropos_task_get_resource(atropos_task_t t, atropos_resource_t r, uint64_t instance, uint64_t amount);
void atropos_task_free_resource(atropos_task_t t, atropos_resource_t r, uint64_t instance, uint64_t amount);
void atropos_task_slow_by_resource(atropos_task_t t, atropos_resource_t r, uint64_t instance, uint64_t amount);
void atropos_task_wait_abandoned(atropos_task_t t, atropos_resource_t r);
void atropos_task_progress(atropos_task_t t, uint64_t done, uint64_t total);
int  atropos_task_cancel_requested(atropos_task_t t);
void atropos_task_release_all(atropos_task_t t);  /* drops all holdings (transaction end) */

/* ---- who blocks whom ---- */
#define ATROPOS_EDGE_HOLDS  1 /* blocker holds what waiter wants */
#define ATROPOS_EDGE_QUEUED 2 /* blocker only stands before waiter in the queue and its request bars it */
typedef struct atropos_edge { atropos_task_t waiter; atropos_task_t blocker; /* 0: somebody untracked */ atropos_resource_t resource; uint32_t kind; uint64_t instance; } atropos_edge;
void atropos_blocked_by(atropos_resource_t r, atropos_task_t blocker); /* the bound task's running wait is for blocker (until the wait ends) */
/* Called by the controller only while an overload is suspected. Must fill at most `max` edges and return how many there are. */
typedef size_t (*atropos_edge_fn)(atropos_edge *edges, size_t max, void *arg);
int atropos_edge_source(atropos_edge_fn fn, void *arg);
void atropos_queue_observed(atropos_resource_t r, uint64_t waiting, uint64_t oldest_wait_ns);

/* ---- cancelling ---- */
typedef struct atropos_cancel_request {
  size_t size;
  atropos_task_t task;
  uint64_t key;
  uint64_t scope;             /* scope sequence the decision was made for */
  uint32_t owner_pid;
  uint32_t rung;              /* 1 = cancel action, 2 = terminate action */
  uint64_t decision_id;
  atropos_resource_t resource;
  uint64_t instance;
  const char *reason;         /* one line in words */
} atropos_cancel_request;
/* 0: told to stop; != 0: could not. May be called again for the same scope (retry of a lost cancel). */
typedef int (*atropos_cancel_fn)(const atropos_cancel_request *req, void *arg);
int atropos_set_cancel_action(atropos_cancel_fn fn, void *arg);
#define ATROPOS_ACTION_ANYWHERE 1u  /* the controller may run it in its own process, for tasks of any process */
int atropos_set_cancel_action_ex(atropos_cancel_fn fn, void *arg, uint32_t flags);
int atropos_set_terminate_action(atropos_cancel_fn fn, void *arg, uint32_t flags);
/* Runs pending cancel actions for tasks of this process (for processes without the controller that must not have threads); returns how many. */
int atropos_agent_poll(void);
int atropos_agent_start(void); /* own thread instead, all signals blocked */
/* The mailbox of a task, read in its own process. Returns 1 when a cancel stands for the present scope, else 0. */
typedef struct atropos_cancel_info {
  size_t size;
  uint64_t scope; uint64_t decision_id; atropos_resource_t resource; uint32_t rung; uint64_t instance;
  uint64_t held_ns;      /* how long the task had held (or barred) the resource */
  uint32_t victims;      /* tasks that waited for it */
  char resource_name[32];
  char reason[160];
} atropos_cancel_info;
int atropos_task_cancel_info(atropos_task_t t, atropos_cancel_info *info);
/* The host acted on the cancel of `scope` (acknowledges; the controller stops repeating). */
void atropos_task_cancel_acknowledge(atropos_task_t t, uint64_t scope);

/* ---- controller ---- */
int atropos_controller_start(void); /* own thread */
int atropos_controller_stop(void);
/* One step of the controller: call every 5..25 ms. ATROPOS_OK when leading, ATROPOS_E_NOT_LEADER when another process leads. */
int atropos_controller_tick(void);

/* ---- reports ---- */
/* JSON text of counters, state, resources and tasks; returns full length (call with NULL,0 to learn it). */
size_t atropos_stats(char *buf, size_t size);
typedef void (*atropos_decision_fn)(const char *json, void *arg);
int atropos_decisions(atropos_decision_fn fn, void *arg); /* the recorded decisions of the region, oldest first */

#ifndef ATROPOS_NO_PAPER_NAMES
atropos_task_t createCancel(uint64_t key);
void freeCancel(atropos_task_t task);
int  setCancelAction(atropos_cancel_fn fn, void *arg);
void getResource(atropos_resource_t r, uint64_t amount);
void freeResource(atropos_resource_t r, uint64_t amount);
void slowByResource(atropos_resource_t r, uint64_t amount);
#endif
#endif
