/* kill -9 of a process that holds a resource and most of the task table: the controller takes its slots back. */
#include "check.h"

enum { TASKS = 16, OF_CHILD = 15 };

int main(void) {
  init_with("mode = enforce\nslo_ms = 1000\nmax_tasks = 16\nmax_workers = 16");
  atropos_resource_t lock = atropos_resource_register("lock", ATROPOS_LOCK);
  talk t;
  talk_open(&t);
  pid_t child = fork();
  if (child == 0) {
    CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
    for (uint64_t i = 0; i < OF_CHILD; i++) {
      atropos_task_t task = atropos_task_create(500 + i);
      CHECK(task != 0);
      atropos_task_get_resource(task, lock, i + 1, 1);
    }
    say(t.to_parent[1], 1);
    hear(t.to_child[0]); /* until killed */
    _exit(1);
  }
  CHECK(child > 0);
  hear(t.to_parent[0]);
  atropos_task_t own = atropos_create_cancel(1);
  CHECK(own != 0);
  CHECK_EQ(atropos_task_create(2), 0); /* full */
  /* While the child lives nothing of it is taken, however often the controller looks. */
  for (double windows = stat_number("windows"); stat_number("windows") < windows + 20;) {
    CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
    pause_ms(5);
  }
  for (uint64_t i = 0; i < OF_CHILD; i++) CHECK(task_holds(500 + i, "lock"));

  CHECK(kill(child, SIGKILL) == 0);
  /* Seen although nobody has waited for the child yet: a zombie owns nothing. */
  uint64_t begin = now_ns();
  for (uint64_t i = 0; i < OF_CHILD; i++)
    while (task_is_listed(500 + i)) {
      CHECK(now_ns() < begin + 15 * 1000000000ull);
      CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
      pause_ms(5);
    }
  printf("reaped after %.0f ms\n", (double)(now_ns() - begin) / 1e6);
  CHECK_EQ(stat_number("slots_reaped"), OF_CHILD);
  CHECK(task_is_listed(1));
  for (uint64_t i = 0; i < OF_CHILD; i++) CHECK(atropos_task_create(600 + i) != 0);
  CHECK_EQ(atropos_task_create(2), 0);
  int status;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
