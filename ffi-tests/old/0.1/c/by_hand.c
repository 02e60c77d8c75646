/* A cancel that an operator asks for: carried out in observe mode, too, for the scope it was asked for and no other. */
#include "check.h"

static int calls;
static uint64_t told_scope;
static char told_reason[256];

static int action(const atropos_cancel_request *req, void *arg) {
  CHECK(arg == &calls);
  CHECK_EQ(req->key, 5);
  CHECK_EQ(req->rung, 1);
  calls++;
  told_scope = req->scope;
  snprintf(told_reason, sizeof told_reason, "%s", req->reason);
  return 0;
}

int main(void) {
  init_with("mode = observe\nslo_ms = 1000\nwindow_ms = 20");
  CHECK_EQ(atropos_set_cancel_action(action, &calls), ATROPOS_OK);
  atropos_task_t task = atropos_create_cancel(5), other = atropos_task_create(6);
  atropos_request_begin(0);
  uint64_t scope = atropos_task_scope(task);

  CHECK_EQ(atropos_task_cancel(task, scope + 1, "not yet"), ATROPOS_E_STALE);
  CHECK_EQ(atropos_task_cancel(task, 0, "operator asked"), ATROPOS_OK);
  for (uint64_t end = now_ns() + 10000000000u; !calls; pause_ms(2)) {
    CHECK(now_ns() < end);
    CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
  }
  CHECK_EQ(told_scope, scope);
  CHECK_HAS(told_reason, "operator asked");
  CHECK(atropos_cancel_requested());
  CHECK(!atropos_task_cancel_requested(other));
  atropos_cancel_info info;
  memset(&info, 0, sizeof info);
  info.size = sizeof info;
  CHECK_EQ(atropos_task_cancel_info(task, &info), 1);
  CHECK_HAS(info.reason, "operator asked");
  atropos_task_cancel_acknowledge(task, scope);

  /* Asked for a scope that passes before the controller looks: nobody is hit. */
  atropos_request_end(-1);
  atropos_request_begin(0);
  CHECK(!atropos_cancel_requested());
  int before = calls;
  CHECK_EQ(atropos_task_cancel(task, 0, NULL), ATROPOS_OK);
  atropos_request_end(0);
  atropos_request_begin(0);
  for (double windows = stat_number("windows"); stat_number("windows") < windows + 10; pause_ms(2))
    CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
  CHECK_EQ(calls, before);
  CHECK(!atropos_cancel_requested());
  CHECK_EQ(atropos_task_cancel(task, scope, "too late"), ATROPOS_E_STALE);
  atropos_request_end(0);
  atropos_free_cancel(task);
  CHECK_EQ(atropos_task_cancel(task, 0, NULL), ATROPOS_E_STALE);
  atropos_free_cancel(other);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
