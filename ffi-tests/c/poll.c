/* A cooperative host: it registers no action and polls. The cancel is for one scope; the next scope of the same task
 * does not see it. */
#include "stage.h"

int main(void) {
  init_with("mode = enforce\n" STAGE_CONFIG);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  stage_begin();

  atropos_task_t task = culprit_takes_lock();
  WAIT_FOR(20, atropos_cancel_requested());
  CHECK(atropos_task_cancel_requested(task));
  CHECK(atropos_trace_cancel_requested());

  atropos_cancel_info info;
  memset(&info, 0xff, sizeof info);
  info.size = sizeof info;
  CHECK_EQ(atropos_task_cancel_info(task, &info), 1);
  CHECK_EQ(info.scope, atropos_task_scope(task));
  CHECK_EQ(info.resource, stage_lock);
  CHECK_EQ(info.instance, 1);
  CHECK_EQ(info.rung, 1);
  CHECK(info.decision_id != 0 && info.held_ns > 0 && info.victims >= 1);
  CHECK(strcmp(info.resource_name, "stage lock") == 0);
  CHECK(memchr(info.reason, 0, sizeof info.reason) != NULL && info.reason[0] != 0);
  printf("held %.1f ms, %u victims: %s\n", (double)info.held_ns / 1e6, info.victims, info.reason);
  atropos_task_cancel_acknowledge(task, info.scope);

  /* The next request of this task is another scope. */
  atropos_free_resource_on(stage_lock, 1, 1);
  pthread_mutex_unlock(&stage_mutex);
  atropos_request_begin(0);
  CHECK(atropos_task_scope(task) != info.scope);
  CHECK_EQ(atropos_cancel_requested(), 0);
  CHECK_EQ(atropos_task_cancel_info(task, &info), 0);
  atropos_request_end(0);
  atropos_free_cancel(task);

  stage_end();
  WAIT_FOR(20, stat_number("cancels_acknowledged") >= 1); /* the controller counts it at its next look */
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
