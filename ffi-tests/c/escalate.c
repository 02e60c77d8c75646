/* A culprit that does not react to the cancel action is told again, then terminated (rung 2). */
#include "stage.h"

static atomic_int terminates;

static int deaf_action(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  CHECK_EQ(req->rung, 1);
  record_request(req);
  atomic_fetch_add(&cancels, 1);
  return 0;
}

static int terminate_action(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  CHECK_EQ(req->rung, 2);
  record_request(req);
  atomic_fetch_add(&terminates, 1);
  atomic_store(&stop_culprit, 1);
  return 0;
}

int main(void) {
  init_with("mode = enforce\nverify_ms = 50\n" STAGE_CONFIG);
  CHECK_EQ(atropos_set_cancel_action(deaf_action, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_set_terminate_action(terminate_action, NULL, 0), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  stage_begin();
  atropos_task_t culprit = culprit_takes_lock();
  WAIT_FOR(20, atomic_load(&stop_culprit));
  CHECK(atomic_load(&cancels) >= 1);
  culprit_gives_lock(culprit);
  stage_end();
  CHECK_EQ(atomic_load(&wrong_cancels), 0);
  CHECK(atomic_load(&terminates) >= 1);
  CHECK(stat_number("cancels_escalated") >= 1);
  show_cancel();
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
