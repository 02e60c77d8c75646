/* More processes with cancel actions than the region has places for agents: the rest are told by their mailbox only, a
 * counter says so, and places of processes that ended are given out again. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"

enum { PLACES = 256, PROCESSES = PLACES + 3 };
static talk line;

static void agent(void *arg) {
  (void)arg;
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  int code = atropos_agent_poll();
  CHECK(code == 0 || code == ATROPOS_E_FULL);
  if (code == ATROPOS_E_FULL) CHECK_HAS(last_error(), "256 agent places");
  atropos_task_t task = atropos_task_create((uint64_t)getpid());
  CHECK(task != 0);
  say(line.to_parent[1], code == 0 ? 0 : task);
  hear(line.to_child[0]);
  /* Without an agent a task can still look. */
  if (code != 0) WAIT_FOR(20, atropos_task_cancel_requested(task));
  _exit(0);
}

int main(void) {
  talk_open(&line);
  init_with("mode = enforce\nslo_ms = 1000\nverify_ms = 60000");
  static pid_t children[PROCESSES];
  int without = 0;
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < PROCESSES; i++) {
      children[i] = child_that(agent, NULL);
      atropos_task_t task = hear(line.to_parent[0]);
      if (!task) continue;
      CHECK_EQ(atropos_task_cancel(task, 0, "by the test"), ATROPOS_OK);
      without++;
    }
    CHECK_EQ(without, (round + 1) * (PROCESSES - PLACES));
    CHECK_EQ(stat_number("agents_refused"), without);
    for (int i = 0; i < PROCESSES; i++) say(line.to_child[1], 1);
    tick_for_ms(100);
    for (int i = 0; i < PROCESSES; i++) join_child(children[i]);
    tick_for_ms(1200); /* the dead are looked for twice a second */
  }
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
