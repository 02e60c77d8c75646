/* Calls in the wrong order and absurd amounts: counted as nothing, blamed on nobody, the library works on. */
#include "check.h"

static atropos_resource_t all[3];
static int cancels;

static int action(const atropos_cancel_request *req, void *arg) {
  (void)req, (void)arg;
  cancels++;
  return 0;
}

static void one_round(atropos_task_t task, atropos_resource_t r) {
  static const uint64_t amounts[] = {0, 1, 1u << 31, UINT64_MAX - 1, UINT64_MAX};
  for (size_t i = 0; i < sizeof amounts / sizeof *amounts; i++) {
    uint64_t n = amounts[i];
    atropos_free_resource(r, n);          /* release without acquire */
    atropos_get_resource(r, n);           /* acquire without wait */
    atropos_get_resource(r, UINT64_MAX);  /* the sum overflows */
    atropos_free_resource(r, n);
    atropos_free_resource(r, UINT64_MAX); /* more than held */
    atropos_free_resource(r, UINT64_MAX);
    atropos_slow_by_resource(r, n);
    atropos_slow_by_resource(r, n);       /* waits twice */
    atropos_wait_abandoned(r);
    atropos_wait_abandoned(r);            /* abandons what has ended */
    atropos_slow_by_resource_on(r, UINT64_MAX, n);
    atropos_get_resource_on(r, n, n);     /* acquires another instance than waited for */
    atropos_free_resource_on(r, UINT64_MAX, n);
    atropos_evicted(r, n);
    atropos_progress(n, n / 2);           /* more done than there is */
    atropos_progress(n, 0);
    atropos_blocked_by(r, n);
    atropos_blocked_by(r, task);          /* by itself */
    atropos_queue_observed(r, n, n);
    atropos_queue_observed(r, 0, 0);
    atropos_request_end((int32_t)n);      /* ends what did not begin */
    atropos_request_begin((uint32_t)n);   /* classes beyond 15 */
    atropos_request_begin(0);             /* begins twice */
    atropos_request_end(0);
    atropos_task_client_wait(task, (int32_t)n);
    atropos_task_client_wait(task, 0);
    atropos_task_client_wait(task, 0);
    atropos_task_cancel_acknowledge(task, n); /* nothing to acknowledge */
    atropos_task_set(task, ATROPOS_TASK_WORK_START, 0);
    atropos_task_release_all(task);
    atropos_wait_abandoned(r);
  }
}

int main(void) {
  init_with("mode = enforce\nslo_ms = 1000\nwindow_ms = 20\ntrigger_windows = 1\n");
  all[0] = atropos_resource_register("lock", ATROPOS_LOCK);
  all[1] = atropos_resource_register("pool", ATROPOS_MEMORY);
  all[2] = atropos_resource_register("queue", ATROPOS_QUEUE);
  CHECK_EQ(atropos_set_cancel_action(action, NULL), ATROPOS_OK);
  static const atropos_resource_t unknown[] = {0, 4, 31, 32, 33, 9999, UINT32_MAX};

  /* Without a bound task first: nothing to write to. */
  one_round(0, all[0]);
  atropos_task_t task = atropos_create_cancel(1);
  CHECK(task != 0);
  CHECK_EQ(atropos_task_child(task, task), ATROPOS_E_INVALID); /* its own child */
  uint64_t end = now_ns() + 600000000u;
  while (now_ns() < end) {
    for (int i = 0; i < 3; i++) one_round(task, all[i]);
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) one_round(task, unknown[i]);
    CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
    free(stats());
  }
  CHECK_EQ(cancels, 0);
  for (int i = 0; i < 3; i++) atropos_task_release_all(task);
  CHECK(!task_holds(1, "lock") && !task_holds(1, "pool") && !task_holds(1, "queue"));

  /* More instances held at once than a worker has places for: lost ones are counted, the rest is right. */
  for (uint64_t i = 1; i <= 5000; i++) atropos_get_resource_on(all[0], i, 1);
  CHECK(task_holds(1, "lock"));
  for (uint64_t i = 1; i <= 5000; i++) atropos_free_resource_on(all[0], i, 1);
  CHECK(!task_holds(1, "lock"));

  /* Still exact afterwards. */
  atropos_get_resource(all[1], 5);
  atropos_free_resource(all[1], 4);
  CHECK(task_holds(1, "pool"));
  atropos_free_resource(all[1], 1);
  CHECK(!task_holds(1, "pool"));
  atropos_free_cancel(task);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
