/* A full stall, end to end: one task keeps the lock that all others need. In enforce mode exactly this task is told to
 * stop; in observe mode a decision is recorded and nobody is told. A task that has held another instance of the same
 * lock for longer, with nobody waiting for it, is never blamed. */
#include "stage.h"

int main(int argc, char **argv) {
  CHECK(argc == 2);
  int enforce = strcmp(argv[1], "enforce") == 0;
  char text[512];
  snprintf(text, sizeof text, "mode = %s\n%s", argv[1], STAGE_CONFIG);
  init_with(text);
  CHECK_EQ(atropos_set_cancel_action(cancel_action, &cancels), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  stage_begin();

  atropos_task_t bystander = atropos_task_create(BYSTANDER_KEY);
  CHECK(bystander != 0);
  atropos_task_get_resource(bystander, stage_lock, 2, 1);

  atropos_task_t culprit = culprit_takes_lock();
  uint64_t since = now_ns();
  if (enforce) {
    while (!atomic_load(&stop_culprit) && now_ns() < since + CULPRIT_LIMIT_S * 1000000000ull) pause_ms(1);
    CHECK(atomic_load(&stop_culprit));
  } else {
    WAIT_FOR(20, decisions() > 0);
    /* More windows of the same stall change nothing. */
    for (double windows = stat_number("windows"); stat_number("windows") < windows + 10;) pause_ms(5);
  }
  culprit_gives_lock(culprit);
  stage_end();
  atropos_free_cancel(bystander);

  CHECK_EQ(atomic_load(&wrong_cancels), 0);
  CHECK(decisions() > 0);
  if (enforce) {
    CHECK(atomic_load(&cancels) >= 1);
    CHECK(stat_number("cancels_requested") >= 1);
    show_cancel();
  } else {
    CHECK_EQ(atomic_load(&cancels), 0);
    CHECK_EQ(stat_number("cancels_requested"), 0);
    CHECK(stat_number("would_cancel") >= 1);
  }
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
