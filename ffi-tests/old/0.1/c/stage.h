/* A small host with one lock: victims take it for a moment again and again, a culprit keeps it. */
#ifndef STAGE_H
#define STAGE_H
#include "check.h"
#include <stdatomic.h>

#define VICTIMS 6
#define CULPRIT_KEY 7777u
#define BYSTANDER_KEY 8888u
/* Longer than any wait of the tests for a decision: a culprit left alone ends by itself and the test fails. */
#define CULPRIT_LIMIT_S 20

/* An absolute objective, so that nothing needs to be learned first; windows short enough for a test. */
#define STAGE_CONFIG "slo_ms = 20\nwindow_ms = 40\ntrigger_windows = 2\ncancel_burst = 4\n"

static pthread_mutex_t stage_mutex = PTHREAD_MUTEX_INITIALIZER;
static atropos_resource_t stage_lock;
static atomic_int stage_stop;
static atomic_long stage_served;
static pthread_t stage_threads[VICTIMS];

/* What the cancel and terminate actions saw. */
static atomic_int cancels, wrong_cancels, stop_culprit;
static _Atomic uint64_t culprit_task, culprit_scope, culprit_since_ns, first_cancel_ns;
static char cancel_reason[256];

static void *stage_victim(void *arg) {
  uint64_t key = 100 + (uint64_t)(uintptr_t)arg;
  while (!atomic_load(&stage_stop)) {
    atropos_task_t task = atropos_trace_create_cancel(key);
    atropos_trace_wait_on(stage_lock, 1, 1);
    pthread_mutex_lock(&stage_mutex);
    atropos_trace_get_on(stage_lock, 1, 1);
    /* Work under the lock: short, and really done. */
    for (volatile int i = 0; i < 20000; i++) {
    }
    atropos_trace_free_on(stage_lock, 1, 1);
    pthread_mutex_unlock(&stage_mutex);
    atropos_trace_free_cancel(task);
    atomic_fetch_add(&stage_served, 1);
    pause_ms(1);
  }
  return NULL;
}

UNUSED static void stage_begin(void) {
  stage_lock = atropos_resource_register("stage lock", ATROPOS_LOCK);
  CHECK(stage_lock != 0);
  for (uintptr_t i = 0; i < VICTIMS; i++)
    CHECK_EQ(pthread_create(&stage_threads[i], NULL, stage_victim, (void *)i), 0);
  /* Traffic flows before anything goes wrong. */
  WAIT_FOR(20, atomic_load(&stage_served) > 200);
}

UNUSED static void stage_end(void) {
  /* The service is back: the lock was given up. */
  long before = atomic_load(&stage_served);
  WAIT_FOR(20, atomic_load(&stage_served) > before + 50);
  atomic_store(&stage_stop, 1);
  for (int i = 0; i < VICTIMS; i++) pthread_join(stage_threads[i], NULL);
}

/* Takes the lock as the culprit. Not to be held twice. */
UNUSED static atropos_task_t culprit_takes_lock(void) {
  atropos_task_t task = atropos_create_cancel(CULPRIT_KEY);
  CHECK(task != 0);
  atropos_slow_by_resource_on(stage_lock, 1, 1);
  pthread_mutex_lock(&stage_mutex);
  atropos_get_resource_on(stage_lock, 1, 1);
  atomic_store(&culprit_task, task);
  atomic_store(&culprit_scope, atropos_task_scope(task));
  atomic_store(&culprit_since_ns, now_ns());
  return task;
}

UNUSED static void culprit_gives_lock(atropos_task_t task) {
  atropos_free_resource_on(stage_lock, 1, 1);
  pthread_mutex_unlock(&stage_mutex);
  atropos_free_cancel(task);
}

/* Which task a request names; checks that it is the culprit in its present scope. */
UNUSED static void record_request(const atropos_cancel_request *req) {
  int right = req->key == CULPRIT_KEY && req->task == atomic_load(&culprit_task) &&
              req->scope == atomic_load(&culprit_scope) && req->resource == stage_lock && req->instance == 1 &&
              req->owner_pid == (uint32_t)getpid() && req->decision_id != 0 && req->size >= sizeof *req &&
              req->reason != NULL && req->reason[0] != 0;
  if (!right) {
    fprintf(stderr, "  request: key %" PRIu64 " task %#" PRIx64 " (culprit %#" PRIx64 ") scope %" PRIu64 " (%" PRIu64
            ") resource %u instance %" PRIu64 " owner %u rung %u decision %" PRIu64 " reason %s\n",
            req->key, req->task, (uint64_t)atomic_load(&culprit_task), req->scope, (uint64_t)atomic_load(&culprit_scope),
            req->resource, req->instance, req->owner_pid, req->rung, req->decision_id, req->reason ? req->reason : "NULL");
    atomic_fetch_add(&wrong_cancels, 1);
  }
  uint64_t unset = 0;
  if (atomic_compare_exchange_strong(&first_cancel_ns, &unset, now_ns()) && req->reason)
    snprintf(cancel_reason, sizeof cancel_reason, "%s", req->reason);
}

UNUSED static int cancel_action(const atropos_cancel_request *req, void *arg) {
  CHECK(arg == &cancels);
  CHECK_EQ(req->rung, 1);
  record_request(req);
  atomic_fetch_add(&cancels, 1);
  atomic_store(&stop_culprit, 1);
  return 0;
}

UNUSED static void show_cancel(void) {
  printf("onset to cancel: %.1f ms; reason: %s\n",
         (double)(atomic_load(&first_cancel_ns) - atomic_load(&culprit_since_ns)) / 1e6, cancel_reason);
}
#endif
