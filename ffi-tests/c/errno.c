/* Hot calls keep errno: a trace point may stand between a system call and the look at its error. */
#include "check.h"

static void kept(const char *call, int line) {
  if (errno != 4242) fprintf(stderr, "  line %d: %s set errno to %d\n", line, call, errno);
  CHECK(errno == 4242);
}

#define KEEPS(call) (errno = 4242, (void)(call), kept(#call, __LINE__))

static void all_hot_calls(atropos_task_t t, atropos_resource_t r) {
  KEEPS(atropos_request_begin(0)), KEEPS(atropos_request_end(0));
  KEEPS(atropos_slow_by_resource(r, 1)), KEEPS(atropos_get_resource(r, 1)), KEEPS(atropos_free_resource(r, 1));
  KEEPS(atropos_slow_by_resource_on(r, 7, 1)), KEEPS(atropos_get_resource_on(r, 7, 1));
  KEEPS(atropos_free_resource_on(r, 7, 1));
  KEEPS(atropos_slow_by_resource(r, 1)), KEEPS(atropos_blocked_by(r, t)), KEEPS(atropos_wait_abandoned(r));
  KEEPS(atropos_evicted(r, 1)), KEEPS(atropos_progress(1, 2)), KEEPS(atropos_cancel_requested());
  KEEPS(atropos_queue_observed(r, 1, 1)), KEEPS(atropos_current_task());
  KEEPS(atropos_task_request_begin(t, 0)), KEEPS(atropos_task_request_end(t, 0));
  KEEPS(atropos_task_slow_by_resource(t, r, 7, 1)), KEEPS(atropos_task_get_resource(t, r, 7, 1));
  KEEPS(atropos_task_free_resource(t, r, 7, 1)), KEEPS(atropos_task_wait_abandoned(t, r));
  KEEPS(atropos_task_progress(t, 1, 2)), KEEPS(atropos_task_cancel_requested(t)), KEEPS(atropos_task_scope(t));
  KEEPS(atropos_task_client_wait(t, 1)), KEEPS(atropos_task_client_wait(t, 0)), KEEPS(atropos_task_release_all(t));
  KEEPS(atropos_trace_wait(r, 1)), KEEPS(atropos_trace_get(r, 1)), KEEPS(atropos_trace_free(r, 1));
  KEEPS(slowByResource(r, 1)), KEEPS(getResource(r, 1)), KEEPS(freeResource(r, 1));
}

static void *in_new_thread(void *arg) {
  /* The first call of a thread sets up what the thread needs. */
  KEEPS(atropos_get_resource(1, 1));
  atropos_task_t task = 0;
  KEEPS(task = atropos_create_cancel(2));
  CHECK(task != 0);
  all_hot_calls(task, *(atropos_resource_t *)arg);
  KEEPS(atropos_free_cancel(task));
  return NULL;
}

int main(void) {
  all_hot_calls(0, 1); /* before init */
  init_with("max_tasks = 16\nclock = precise");
  atropos_resource_t lock = atropos_resource_register("lock", ATROPOS_LOCK);
  all_hot_calls(0, lock); /* no task bound */
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, in_new_thread, &lock), 0);
  pthread_join(thread, NULL);
  for (int i = 0; i < 40; i++) { /* beyond the table */
    atropos_task_t task = 0;
    KEEPS(task = atropos_task_create(1));
    all_hot_calls(task, lock);
    all_hot_calls(task, 999);
  }
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  all_hot_calls(0, lock);
  return 0;
}
