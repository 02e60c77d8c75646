/* libatropos: find the request that monopolises a shared resource and cancel it.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Generated from src/capi by cbindgen; do not edit. Rewrite it with
 *     cargo run -p atropos-ffi-tests --bin header
 */

#ifndef ATROPOS_H
#define ATROPOS_H

#include <stddef.h>
#include <stdint.h>

/** Version of this header; compare with atropos_version(), the version of the library that runs. */
#define ATROPOS_VERSION_MAJOR 0
#define ATROPOS_VERSION_MINOR 1
#define ATROPOS_VERSION_PATCH 0
#define ATROPOS_VERSION_NUMBER \
  ((ATROPOS_VERSION_MAJOR << 16) | (ATROPOS_VERSION_MINOR << 8) | ATROPOS_VERSION_PATCH)
#define ATROPOS_VERSION_STRING "0.1.0"

/** Done. */
#define ATROPOS_OK 0

/** A bad argument (NULL, size, range). */
#define ATROPOS_E_INVALID -1

/** Before atropos_init or after atropos_shutdown. */
#define ATROPOS_E_NOT_INIT -2

/** A second atropos_init in this process, or the thread runs already. */
#define ATROPOS_E_ALREADY -3

/** Unknown key or bad value; atropos_last_error names line, key and what is allowed. */
#define ATROPOS_E_CONFIG -4

/** A system call failed. */
#define ATROPOS_E_IO -5

/** The region file was refused: wrong magic, layout, size, owner or mode. */
#define ATROPOS_E_REGION -6

/** A table of the region is full. */
#define ATROPOS_E_FULL -7

/** The handle is stale or was never given out. */
#define ATROPOS_E_STALE -8

/** Another process leads the controller (not a failure: keep ticking, this one stands by). */
#define ATROPOS_E_NOT_LEADER -9

/** A call in a forked child that must call atropos_after_fork first. */
#define ATROPOS_E_FORKED -10

/** A bug in the library, caught at the boundary. */
#define ATROPOS_E_PANIC -11

/** Not supported on this system. */
#define ATROPOS_E_UNSUPPORTED -12

/** Resource type: something that is held by one or few at a time. */
#define ATROPOS_LOCK 1

/** Resource type: units of a pool; taking one may evict another's. */
#define ATROPOS_MEMORY 2

/** Resource type: a queue with servers (worker slots, tickets); a task holds it while it occupies a server. */
#define ATROPOS_QUEUE 3

/** In a cancel's `resource`: the task uses up the CPU. Nobody registers it, the library samples it (`system_cpu`). */
#define ATROPOS_RESOURCE_CPU 4294967294

/** In a cancel's `resource`: the task uses up the disk (`system_io`). */
#define ATROPOS_RESOURCE_BLOCK_IO 4294967295

/** Nothing is traced. */
#define ATROPOS_MODE_OFF 1

/** Decide and record, cancel nobody (the default). */
#define ATROPOS_MODE_OBSERVE 2

/** Decide, record and cancel. */
#define ATROPOS_MODE_ENFORCE 3

/** Request class of the task, 0..15: each class has its own baseline. */
#define ATROPOS_TASK_CLASS 1

/** -100..100, higher = more important; of near-equal culprits the lower goes first. */
#define ATROPOS_TASK_PRIORITY 2

/** 0/1: background work, whose latency does not count. */
#define ATROPOS_TASK_BACKGROUND 3

/** 0/1: never cancelled. */
#define ATROPOS_TASK_PROTECTED 4

/**
 * 0/1: the request in flight was cancelled once and runs again (atropos_retry_wait): it is not cancelled a second time. The
 * mark goes with the request.
 */
#define ATROPOS_TASK_RETRIED 5

/** 0/1, default 1: 0 while cancelling is not possible (a commit in progress). */
#define ATROPOS_TASK_CANCELLABLE 6

/** The value is the address of a NUL-terminated string; 47 bytes are kept. */
#define ATROPOS_TASK_LABEL 7

/** 1: the unit of work that a cancel would lose (a transaction) begins now; 0: it ended. */
#define ATROPOS_TASK_WORK_START 8

/** Edge kind: not known; the library looks whether the blocker itself waits for the same thing. */
#define ATROPOS_EDGE_UNKNOWN 0

/** Edge kind: the blocker holds what the waiter wants. */
#define ATROPOS_EDGE_HOLDS 1

/** Edge kind: the blocker only stands before the waiter in the queue, with a request that bars it. */
#define ATROPOS_EDGE_QUEUED 2

/** Action flag: the controller may run it in its own process, for tasks of any process. */
#define ATROPOS_ACTION_ANYWHERE 1

/** Answer of atropos_retry_wait and _poll: do not run it again, tell the client; atropos_last_error says why. */
#define ATROPOS_DROP 0

/** Run the cancelled request again, now. */
#define ATROPOS_RETRY 1

/** Answer of atropos_retry_poll only: not yet. */
#define ATROPOS_RETRY_LATER 2

/**
 * Settings. `size` must be sizeof(atropos_config). Numbers: 0 = default. Precedence: defaults < file < text < fields.
 * A program may be built with an older or a newer header than the library's: the struct only grows at its end, and fields
 * that the library does not know must be 0.
 * The text keys are the field names, and `clock` (auto, coarse, precise), `system_cpu` and `system_io` (on, off; default
 * off): CPU and block I/O as resources, sampled from the kernel for running tasks while an overload is suspected.
 */
typedef struct atropos_config {
  size_t size;
  /** NULL: an anonymous shared mapping, inherited over fork. Else a file, created with mode 0600. */
  const char *region_path;
  /** NULL, or the path of a file of "key = value" lines, # begins a comment. */
  const char *file;
  /** NULL, or text of the same form. */
  const char *text;
  /** NULL, or a path: the controller's process appends one JSON object per line. */
  const char *decision_log;
  /** ATROPOS_MODE_*; default observe. */
  uint32_t mode;
  /** Tasks tracked at once, 16..65536; default 1024. Further tasks run untracked. */
  uint32_t max_tasks;
  /** Workers beyond each task's first, 16..65536; default 256. */
  uint32_t max_workers;
  /** Length of a window in ms, 20..10000; default 100. Windows slide by a quarter of it. */
  uint32_t window_ms;
  /** Windows in a row over the objective before an overload is acted on, 1..100; default 3. */
  uint32_t trigger_windows;
  /** Time a cancel has to show effect, in ms, 10..60000; default 200. */
  uint32_t verify_ms;
  /** Objective for the 99th percentile of latency in ms; 0 = relative to the learned baseline. */
  double slo_ms;
  /** Relative objective: this share above the baseline, 0.01..10; default 0.20. */
  double slo_tolerance;
  /** Share of execution time lost to a resource from which on it is overloaded, 0..1; default 0.30. */
  double contention_threshold;
  /** Share of execution time that a cancel must give back, 0..1; default 0.25. */
  double min_relief;
  /** Cancels per second in the long run; default 2. */
  double cancel_rate_per_s;
  /** Cancels at once; default 4. */
  uint32_t cancel_burst;
  /** At most this share of completions may be cancelled (the burst excepted), 0..1; default 0.01. */
  double cancel_share;
  /**
   * For how long what a task was cancelled for must have been calm before it runs again, in ms, 10..600000; default
   * 1000. See atropos_retry_wait.
   */
  uint32_t retry_calm_ms;
  /** Longest wait to run again of a background task, or of one without a deadline, in ms, 1..86400000; default 600000. */
  uint32_t retry_background_max_ms;
  /**
   * A cancelled task runs again only while the throughput is at most this share of what it was before the cancel,
   * above 0..1; default 0.5. 1 = at any throughput; 0 (only without any load) can be said in the text form.
   */
  double retry_load_share;
} atropos_config;

/** Level: 1 error, 2 warning, 3 notice, 4 debug. Called only by threads inside init, reload, tick, controller or agent. */
typedef void (*atropos_log_fn)(int level, const char *message, void *arg);

/** A registered resource; 0 = unknown, harmless. */
typedef uint32_t atropos_resource_t;

/**
 * A task: a unit of work that can be cancelled. Index + generation; 0 = "not tracked". Every call accepts 0 and stale
 * handles and then does nothing.
 */
typedef uint64_t atropos_task_t;

/** "waiter waits for blocker", as the host knows it. */
typedef struct atropos_edge {
  atropos_task_t waiter;
  /** 0: somebody untracked, whom nobody can cancel. */
  atropos_task_t blocker;
  atropos_resource_t resource;
  /** ATROPOS_EDGE_* */
  uint32_t kind;
  uint64_t instance;
} atropos_edge;

/**
 * Fills at most `max` edges and returns how many there are. Called only while an overload is suspected, by the thread
 * that runs the controller.
 */
typedef size_t (*atropos_edge_fn)(struct atropos_edge *edges, size_t max, void *arg);

/**
 * Fills in how far a task is (rows processed, rows expected; `total` 0 = unknown) and returns 1; 0 when it does not know; -1
 * when nothing can cancel the task just now, such as in the middle of a commit: it is left alone.
 * Called by the thread that runs the controller, for those who might be cancelled; wins over atropos_progress.
 */
typedef int (*atropos_progress_fn)(atropos_task_t task,
                                   uint64_t key,
                                   uint64_t *done,
                                   uint64_t *total,
                                   void *arg);

/**
 * How long, in ns, undoing the task's work would take (a rollback); 0 = nothing to undo, or not known. Called by the
 * thread that runs the controller, for those who might be cancelled.
 */
typedef uint64_t (*atropos_cost_fn)(atropos_task_t task, uint64_t key, void *arg);

/**
 * Writes words for one object of a resource ("table 16402 of database 5"), at most `size` bytes, and returns how many;
 * 0 = none. Called by the thread that runs the controller.
 */
typedef size_t (*atropos_describe_fn)(atropos_resource_t r,
                                      uint64_t instance,
                                      char *buf,
                                      size_t size,
                                      void *arg);

/** What a cancel action gets. */
typedef struct atropos_cancel_request {
  size_t size;
  atropos_task_t task;
  uint64_t key;
  /** The scope sequence the decision was made for. */
  uint64_t scope;
  uint32_t owner_pid;
  /** 1 = cancel action, 2 = terminate action. */
  uint32_t rung;
  uint64_t decision_id;
  atropos_resource_t resource;
  uint64_t instance;
  /** One line in words; valid during the call. */
  const char *reason;
} atropos_cancel_request;

/**
 * 0: told to stop; anything else: could not. May be called again for the same scope (a lost cancel is repeated). It must
 * return, as every callback: no exception, longjmp or pthread_exit out of it. While one blocks its thread serves nobody
 * else: a controller's is replaced by another process's within 200 ms, if there is one.
 */
typedef int (*atropos_cancel_fn)(const struct atropos_cancel_request *req, void *arg);

/** One recorded decision as a JSON object. */
typedef void (*atropos_decision_fn)(const char *json, void *arg);

/** A worker (one thread or process working for a task), returned by atropos_task_attach. */
typedef uint64_t atropos_worker_t;

/**
 * A task's mailbox, for the host that acts on it. `size` must be sizeof(atropos_cancel_info): no more is written, and
 * fields that only a newer header has become 0.
 */
typedef struct atropos_cancel_info {
  size_t size;
  uint64_t scope;
  uint64_t decision_id;
  atropos_resource_t resource;
  uint32_t rung;
  uint64_t instance;
  /** How long the task had held (or barred) the resource. */
  uint64_t held_ns;
  /** Tasks that waited for it. */
  uint32_t victims;
  char resource_name[32];
  char reason[160];
} atropos_cancel_info;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Makes this process part of a region: creates it, or joins the one that `region_path` names. NULL = all defaults.
 * A process that joins takes the settings that are there. A forked child calls atropos_after_fork instead.
 *
 * Memory: `cfg` is NULL or points to a struct whose first member is its size; its strings are NULL or NUL-terminated.
 */
int atropos_init(const struct atropos_config *cfg);

/**
 * Leaves the region: stops this library's threads, ends this process's tasks, closes the gates. Calls that other threads
 * are inside stay harmless: they find an empty region. Waits for a callback that runs on the library's threads.
 */
int atropos_shutdown(void);

/**
 * Changes settings while running, for all processes of the region. What `cfg` does not name goes back to its default;
 * sizes and region_path must stay as they are (or unnamed).
 *
 * Memory: As atropos_init.
 */
int atropos_reload(const struct atropos_config *cfg);

/**
 * In a forked child: joins the inherited region under its own identity. Until then every call does nothing here.
 * Calling it again is harmless.
 */
int atropos_after_fork(void);

/**
 * Copies the text of this thread's last error, NUL-terminated and cut to `size`; returns its full length.
 *
 * Memory: `buf` is NULL or has room for `size` bytes.
 */
size_t atropos_last_error(char *buf, size_t size);

/** What an error code means; never NULL. */
const char *atropos_strerror(int code);

/** The library's version at run time: major << 16 | minor << 8 | patch. */
uint32_t atropos_version(void);

/**
 * Sets the log callback of this process (NULL: none). May be called before atropos_init.
 *
 * Memory: `func` must stay callable with `arg` until another is set.
 */
int atropos_set_log(atropos_log_fn func, void *arg);

/**
 * Registers a resource, or finds it by name; returns 0 on failure (atropos_last_error says why). The same name has the
 * same number in all processes. At most 31 resources; names of 1 to 31 bytes.
 *
 * Memory: `name` is NULL or NUL-terminated.
 */
atropos_resource_t atropos_resource_register(const char *name,
                                             uint32_t kind);

/**
 * Sets the function that lists "who blocks whom" now (NULL: none), in the process that runs the controller.
 *
 * Memory: `func` must stay callable with `arg` until another is set.
 */
int atropos_edge_source(atropos_edge_fn func, void *arg);

/**
 * Sets the function that says how far a task is (NULL: nothing), in the process that runs the controller: for hosts that
 * count rows where no call can be placed.
 *
 * Memory: `func` must stay callable with `arg` until another is set.
 */
int atropos_set_progress_source(atropos_progress_fn func,
                                void *arg);

/**
 * Sets the function that says what undoing a task's work would take (NULL: nothing), in the process that runs the
 * controller. It is taken off what cancelling the task would give back, and breaks near-ties.
 *
 * Memory: `func` must stay callable with `arg` until another is set.
 */
int atropos_set_rollback_cost(atropos_cost_fn func,
                              void *arg);

/**
 * Sets the function that gives instances words in decisions (NULL: they stay numbers), in the process that runs the
 * controller.
 *
 * Memory: `func` must stay callable with `arg` until another is set.
 */
int atropos_set_describe(atropos_describe_fn func,
                         void *arg);

/**
 * How many servers a QUEUE resource has in all (worker slots); 0 = not known. While some are free nobody is to blame for
 * waits.
 */
void atropos_queue_capacity(atropos_resource_t r,
                            uint64_t servers);

/**
 * Waiters that are not tasks yet (connections in the kernel's backlog): how many, and for how long the oldest. Counts for
 * a second: repeat it at every tick. They count as requests in flight of the class that most requests are of.
 */
void atropos_queue_observed(atropos_resource_t r,
                            uint64_t waiting,
                            uint64_t oldest_wait_ns);

/**
 * Sets what stops a task of this process (NULL: nothing but the mailbox, which cooperative hosts poll). It runs in this
 * process: by the controller if that leads here, else by the agent (atropos_agent_start or atropos_agent_poll).
 *
 * Memory: `func` must stay callable with `arg` until another is set.
 */
int atropos_set_cancel_action(atropos_cancel_fn func,
                              void *arg);

/**
 * As atropos_set_cancel_action, with flags (ATROPOS_ACTION_*).
 *
 * Memory: As atropos_set_cancel_action.
 */
int atropos_set_cancel_action_ex(atropos_cancel_fn func, void *arg, uint32_t flags);

/**
 * Sets the next rung: what ends a task that did not react to the cancel action (its session, say).
 *
 * Memory: As atropos_set_cancel_action.
 */
int atropos_set_terminate_action(atropos_cancel_fn func, void *arg, uint32_t flags);

/**
 * Runs the standing cancel requests of this process's tasks, for processes that must not have threads; returns how
 * many actions ran, or an error code. Call it now and then; it is cheap when nothing was asked.
 */
int atropos_agent_poll(void);

/** Starts a thread that does so instead, all signals blocked. */
int atropos_agent_start(void);

/** Starts the controller's own thread in this process, all signals blocked. */
int atropos_controller_start(void);

/** Stops the library's threads of this process, waits for them and gives the lead up. */
int atropos_controller_stop(void);

/**
 * How long, in ms, the host may pause before its next atropos_controller_tick: 25 in calm times, less while an overload
 * is suspected or a cancel is on its way. 0 without a region.
 */
uint32_t atropos_controller_pause_ms(void);

/**
 * One step of the controller, for hosts that drive it: call it every 5 to 25 ms. ATROPOS_OK when this process leads,
 * ATROPOS_E_NOT_LEADER when another one does.
 */
int atropos_controller_tick(void);

/**
 * JSON text of state, counters, resources and tasks, NUL-terminated and cut to `size`; returns its full length.
 *
 * Memory: `buf` is NULL or has room for `size` bytes.
 */
size_t atropos_stats(char *buf,
                     size_t size);

/**
 * Calls `func` for each decision the region still keeps (the last 64), oldest first; returns how many, or an error code.
 *
 * Memory: `func` is callable with `arg`.
 */
int atropos_decisions(atropos_decision_fn func,
                      void *arg);

/** The bound task acquired `amount` of `r`; ends its wait for `r`. */
void atropos_get_resource(atropos_resource_t r, uint64_t amount);

/** The bound task gave `amount` of `r` back. What is not held is ignored and counted. */
void atropos_free_resource(atropos_resource_t r, uint64_t amount);

/** The bound task begins to wait for `r`; atropos_get_resource or atropos_wait_abandoned ends the wait. */
void atropos_slow_by_resource(atropos_resource_t r, uint64_t amount);

/** As atropos_get_resource, for one object of the resource (this table's lock); 0 = not told apart. */
void atropos_get_resource_on(atropos_resource_t r, uint64_t instance, uint64_t amount);

/** As atropos_free_resource, for one object. */
void atropos_free_resource_on(atropos_resource_t r, uint64_t instance, uint64_t amount);

/** As atropos_slow_by_resource, for one object. */
void atropos_slow_by_resource_on(atropos_resource_t r, uint64_t instance, uint64_t amount);

/** The bound task's wait for `r` ended without it. */
void atropos_wait_abandoned(atropos_resource_t r);

/** MEMORY: this task's acquisitions evicted `amount` units of others. */
void atropos_evicted(atropos_resource_t r, uint64_t amount);

/** Progress of the bound task: rows processed, rows expected (0 = unknown). */
void atropos_progress(uint64_t done, uint64_t total);

/** Does a cancel stand for the bound task's present scope? A cheap poll for cooperative hosts: nonzero = stop. */
int atropos_cancel_requested(void);

/** The bound task's running wait for `r` is for `blocker`, until the wait ends. Better than inference. */
void atropos_blocked_by(atropos_resource_t r, atropos_task_t blocker);

/**
 * Begins a request on the bound task, of class 0..15: latency and throughput are measured from here on, and the task's
 * scope sequence changes. A request that is open ends as completed.
 */
void atropos_request_begin(uint32_t class_);

/** Ends the bound task's request; status 0 = ok. What it holds stays held (idle in transaction). */
void atropos_request_end(int32_t status);

/** As atropos_get_resource_on, on a task. One thread at a time per task. */
void atropos_task_get_resource(atropos_task_t t, atropos_resource_t r, uint64_t instance, uint64_t amount);

/** As atropos_free_resource_on, on a task. */
void atropos_task_free_resource(atropos_task_t t, atropos_resource_t r, uint64_t instance, uint64_t amount);

/** As atropos_slow_by_resource_on, on a task. */
void atropos_task_slow_by_resource(atropos_task_t t,
                                   atropos_resource_t r,
                                   uint64_t instance,
                                   uint64_t amount);

/** As atropos_wait_abandoned, on a task. */
void atropos_task_wait_abandoned(atropos_task_t t, atropos_resource_t r);

/** As atropos_blocked_by, on a task. */
void atropos_task_blocked_by(atropos_task_t t, atropos_resource_t r, atropos_task_t blocker);

/**
 * The task's request had waited for `r` for `wait_ns` before it could be seen (a connection in the kernel's backlog): it
 * counts as begun so much earlier. Call it right after the request began.
 */
void atropos_task_waited(atropos_task_t t,
                         atropos_resource_t r,
                         uint64_t wait_ns);

/** As atropos_progress, on a task. */
void atropos_task_progress(atropos_task_t t, uint64_t done, uint64_t total);

/** As atropos_cancel_requested, on a task. */
int atropos_task_cancel_requested(atropos_task_t t);

/** Drops everything the task holds (the end of a transaction). */
void atropos_task_release_all(atropos_task_t t);

/** As atropos_request_begin, on a task. */
void atropos_task_request_begin(atropos_task_t t, uint32_t class_);

/** As atropos_request_end, on a task. */
void atropos_task_request_end(atropos_task_t t, int32_t status);

/**
 * For a request that occupies a server of a queue from its begin on: as atropos_task_request_begin, and the task has 1 of
 * `r` (0 = nothing). Returns the request's scope sequence; 0 = untracked: the gate is closed (it needs no look at
 * atropos_trace_is_on before), a stale handle, or another process's task.
 */
uint64_t atropos_task_enter(atropos_task_t t,
                            uint32_t class_,
                            atropos_resource_t r);

/** As atropos_task_request_end, and what the task holds and waits for is forgotten: the task is ready for another request. */
void atropos_task_leave(atropos_task_t t,
                        int32_t status);

/** Brackets time the host spends waiting for its own client inside a request: it is not execution time. */
void atropos_task_client_wait(atropos_task_t t, int32_t on);

/**
 * Waits until a request that the controller has cancelled may run again: ATROPOS_RETRY, or ATROPOS_DROP.
 *
 * Call it once the request has ended and its work is undone, with the handle under which it was cancelled: either
 * after atropos_free_cancel(task), or, where the task lives on (a session), between atropos_request_end and the next
 * begin, holding nothing. Any thread of the task's process may call it; it blocks without holding anything.
 *
 * It may run again when each resource it was cancelled for has been calm for `retry_calm_ms` and the server does at
 * most `retry_load_share` of the work it did before; those who wait go one by one, who has waited longest first, the next
 * when the one before has ended or has run for `retry_calm_ms` without contention. A request runs again once: its
 * retry is marked (ATROPOS_TASK_RETRIED) and is not cancelled. A session's next request is marked by the library; on a task
 * made anew for the retry the host sets the mark.
 *
 * `deadline_ns`: until when a retry makes sense, on CLOCK_MONOTONIC, in ns (the client's patience); 0 = none. Background
 * tasks, and those without a deadline, wait for at most `retry_background_max_ms`.
 *
 * ATROPOS_DROP comes at once for a task that was not cancelled by the controller (or by hand, or too long ago: ten minutes,
 * or 128 cancels), for what has run again already, with a past deadline, while the mode is off, before
 * atropos_init, and where no controller has ever run; within 2 s after the last one has stopped.
 *
 * Only what is safe may run again: not a byte of the answer was sent, the transaction is rolled back, and it was not one
 * statement inside an explicit transaction block, whose earlier statements would be missing.
 */
int atropos_retry_wait(atropos_task_t task,
                       uint64_t deadline_ns);

/**
 * As atropos_retry_wait, for hosts that must not block: ATROPOS_RETRY_LATER until there is an answer. The first call begins
 * the wait and its deadline counts. Call it again at least once a second; who stays silent for 3 s, or does not come within
 * 1 s when it is its turn, is dropped. Where this process drives the controller itself, tick in between.
 */
int atropos_retry_poll(atropos_task_t task,
                       uint64_t deadline_ns);

/**
 * The request is not to run again after all (its client has gone, the server stops): whoever waits for it, in any thread of
 * this process, is told ATROPOS_DROP. Harmless for every other handle.
 */
void atropos_retry_give_up(atropos_task_t task);

/**
 * Begins a task and binds it to the calling thread; 0 = it runs untracked (no region, gate closed or table full).
 * `key` is the host's own name for it (a session number). It counts as one request until it ends, unless the host uses
 * atropos_request_begin.
 */
atropos_task_t atropos_create_cancel(uint64_t key);

/** Ends a task; what it held is forgotten. A second call, 0 and stale handles do nothing. */
void atropos_free_cancel(atropos_task_t task);

/** As atropos_create_cancel, bound to no thread: for hosts that use the explicit calls. */
atropos_task_t atropos_task_create(uint64_t key);

/** The task this thread is bound to, 0 = none. */
atropos_task_t atropos_current_task(void);

/** This thread's bound calls act on `task` from now on; 0 unbinds. */
int atropos_task_bind(atropos_task_t task);

/** Another worker (this thread, perhaps of another process) joins the task and is bound to it; 0 = untracked. */
atropos_worker_t atropos_task_attach(atropos_task_t task);

/** The worker leaves its task; what it held is forgotten. */
void atropos_task_detach(atropos_worker_t worker);

/** `child` works for `parent`: what it holds and waits for counts as the parent's, and cancelling the parent cancels it. */
int atropos_task_child(atropos_task_t parent,
                       atropos_task_t child);

/** Says something about a task: `what` is ATROPOS_TASK_*. */
int atropos_task_set(atropos_task_t task, uint32_t what, int64_t value);

/** The task's scope sequence: it changes with every request that begins, and only by its owner. 0 for stale handles. */
uint64_t atropos_task_scope(atropos_task_t t);

/**
 * Asks, by hand, to cancel the task's scope (0 = the present one): the leading controller posts it at its next tick, in
 * observe and enforce mode alike, outside the budget. ATROPOS_E_STALE when the scope has passed.
 *
 * Memory: `reason` is NULL or NUL-terminated; 63 bytes are kept.
 */
int atropos_task_cancel(atropos_task_t t,
                        uint64_t scope,
                        const char *reason);

/**
 * Reads the task's mailbox, in its own process: 1 = a cancel stands for its present scope and `info` is filled in, else
 * 0. A task between requests keeps the scope of its last one.
 *
 * Memory: `info` is NULL or points to a struct whose `size` is set.
 */
int atropos_task_cancel_info(atropos_task_t t,
                             struct atropos_cancel_info *info);

/** The host acted on the cancel of `scope`: the controller stops repeating it and waits for the effect. */
void atropos_task_cancel_acknowledge(atropos_task_t t, uint64_t scope);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#ifndef ATROPOS_NO_PAPER_NAMES
#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/** The paper's name of atropos_create_cancel. */
atropos_task_t createCancel(uint64_t key);

/** The paper's name of atropos_free_cancel. */
void freeCancel(atropos_task_t task);

/**
 * The paper's name of atropos_set_cancel_action.
 *
 * Memory: As atropos_set_cancel_action.
 */
int setCancelAction(atropos_cancel_fn func, void *arg);

/** The paper's name of atropos_get_resource. */
void getResource(atropos_resource_t r, uint64_t amount);

/** The paper's name of atropos_free_resource. */
void freeResource(atropos_resource_t r, uint64_t amount);

/** The paper's name of atropos_slow_by_resource. */
void slowByResource(atropos_resource_t r, uint64_t amount);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus
#endif /* ATROPOS_NO_PAPER_NAMES */

#endif  /* ATROPOS_H */
