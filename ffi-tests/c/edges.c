/* A host that knows who blocks whom traces waits only: the holder is looked up, through the edge source or
 * atropos_blocked_by, and is blamed although it never reported an acquisition. */
#include "stage.h"

enum { WAITERS = 4 };
static _Atomic uint64_t waiting[WAITERS], holder;
static atomic_int edge_calls, kind_unknown, cost_calls, progress_calls, waiters_stop, blocked_by_calls_too, commits;
static atropos_resource_t lock;

static size_t edge_source(atropos_edge *edges, size_t max, void *arg) {
  CHECK(arg == &edge_calls);
  atomic_fetch_add(&edge_calls, 1);
  size_t n = 0;
  for (int i = 0; i < WAITERS; i++) {
    uint64_t waiter = atomic_load(&waiting[i]);
    if (!waiter || !atomic_load(&holder)) continue;
    if (n < max) {
      edges[n].waiter = waiter;
      edges[n].blocker = atomic_load(&holder);
      edges[n].resource = lock;
      edges[n].kind = atomic_load(&kind_unknown) ? ATROPOS_EDGE_UNKNOWN : ATROPOS_EDGE_HOLDS;
      edges[n].instance = 1;
    }
    n++;
  }
  return n;
}

static void *waiter(void *arg) {
  uintptr_t i = (uintptr_t)arg;
  atropos_task_t task = atropos_create_cancel(200 + i);
  atropos_slow_by_resource_on(lock, 1, 1);
  if (atomic_load(&blocked_by_calls_too)) atropos_task_blocked_by(task, lock, atomic_load(&holder));
  atomic_store(&waiting[i], task);
  while (!atomic_load(&waiters_stop)) pause_ms(1);
  atomic_store(&waiting[i], 0);
  atropos_get_resource_on(lock, 1, 1);
  atropos_free_resource_on(lock, 1, 1);
  atropos_free_cancel(task);
  return NULL;
}

static int action(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  /* By key: a cancel that is repeated may arrive while this test already ends the culprit. */
  if (req->key != CULPRIT_KEY) atomic_fetch_add(&wrong_cancels, 1);
  atomic_fetch_add(&cancels, 1);
  return 0;
}

static uint64_t rollback_cost(atropos_task_t task, uint64_t key, void *arg) {
  CHECK(arg == &cost_calls && task != 0);
  atomic_fetch_add(&cost_calls, 1);
  return key == CULPRIT_KEY ? 3600000000000u : 0;
}

static int progress(atropos_task_t task, uint64_t key, uint64_t *done, uint64_t *total, void *arg) {
  CHECK(arg == &progress_calls && task != 0);
  atomic_fetch_add(&progress_calls, 1);
  if (key != CULPRIT_KEY) return 0;
  if (atomic_load(&commits)) return -1;
  *done = 1, *total = 4;
  return 1;
}

static void see_decision(const char *json, void *arg) { *(int *)arg += strstr(json, "\"progress\":0.25") != NULL; }

static int decisions_with_progress(void) {
  int found = 0;
  CHECK(atropos_decisions(see_decision, &found) > 0);
  return found;
}

static void one_stall(const char *how) {
  atomic_store(&cancels, 0);
  atomic_store(&waiters_stop, 0);
  atropos_task_t task = atropos_task_create(CULPRIT_KEY);
  atropos_task_request_begin(task, 0);
  atomic_store(&holder, task);
  uint64_t begin = now_ns();
  pthread_t threads[WAITERS];
  for (uintptr_t i = 0; i < WAITERS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, waiter, (void *)i), 0);
  if (atomic_load(&commits)) {
    /* The controller looks again and again, and leaves it alone until it no longer commits. */
    int looked = atomic_load(&progress_calls);
    WAIT_FOR(20, atomic_load(&progress_calls) > looked + 8);
    CHECK_EQ(atomic_load(&cancels), 0);
    atomic_store(&commits, 0);
  }
  WAIT_FOR(20, atomic_load(&cancels) > 0);
  printf("%s: %.1f ms\n", how, (double)(now_ns() - begin) / 1e6);
  atomic_store(&holder, 0);
  atomic_store(&waiters_stop, 1);
  for (int i = 0; i < WAITERS; i++) pthread_join(threads[i], NULL);
  atropos_free_cancel(task);
  CHECK_EQ(atomic_load(&wrong_cancels), 0);
}

int main(void) {
  /* Each stall takes one cancel out of the budget, and hardly anything completes that would refill it. */
  init_with("mode = enforce\n" STAGE_CONFIG "cancel_burst = 16\n");
  lock = atropos_resource_register("lock", ATROPOS_LOCK);
  CHECK_EQ(atropos_set_cancel_action(action, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_edge_source(edge_source, &edge_calls), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  /* Healthy: the source, which may be dear, is not asked. */
  for (double windows = stat_number("windows"); stat_number("windows") < windows + 10;) {
    atropos_free_cancel(atropos_create_cancel(1));
    pause_ms(1);
  }
  CHECK_EQ(atomic_load(&edge_calls), 0);
  one_stall("edge source");
  CHECK(atomic_load(&edge_calls) > 0);

  /* The holder waits for nothing: an edge of unknown kind to it means that it holds. */
  atomic_store(&kind_unknown, 1);
  one_stall("edge source, kinds unknown");

  CHECK_EQ(atropos_edge_source(NULL, NULL), ATROPOS_OK);
  atomic_store(&blocked_by_calls_too, 1);
  one_stall("blocked_by");

  /* Half of what cancelling would give back, and more, goes into undoing: said, and cancelled all the same. */
  CHECK_EQ(atropos_set_rollback_cost(rollback_cost, &cost_calls), ATROPOS_OK);
  one_stall("with a rollback to come");
  CHECK(atomic_load(&cost_calls) > 0);

  CHECK_EQ(atropos_set_progress_source(progress, &progress_calls), ATROPOS_OK);
  one_stall("with progress asked for");
  CHECK(atomic_load(&progress_calls) > 0);
  /* The record is written when the culprit has been told. */
  WAIT_FOR(20, decisions_with_progress() > 0);
  CHECK_EQ(decisions_with_progress(), 1);
  atomic_store(&commits, 1);
  one_stall("after a commit");
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
