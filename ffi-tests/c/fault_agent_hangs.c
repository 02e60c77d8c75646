/* An agent whose cancel action never returns: the leader goes on, other agents are served, its task is given up as
 * unresponsive, and when the action returns after all the agent serves the next ones.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"

struct shared {
  atomic_int entered, release, served;
};
static struct shared *shared;
static talk hanging, healthy;

static int hangs(const atropos_cancel_request *req, void *arg) {
  (void)req, (void)arg;
  atomic_fetch_add(&shared->entered, 1);
  while (!atomic_load(&shared->release)) pause_ms(1);
  return 0;
}

static int serves(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  CHECK_EQ(req->owner_pid, getpid());
  atomic_fetch_add(&shared->served, 1);
  return 0;
}

static void owner(void *arg) {
  talk *t = (talk *)arg;
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  CHECK_EQ(atropos_set_cancel_action(t == &hanging ? hangs : serves, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_set_terminate_action(t == &hanging ? hangs : serves, NULL, 0), ATROPOS_OK);
  CHECK_EQ(atropos_agent_start(), ATROPOS_OK);
  atropos_task_t task = atropos_task_create((uint64_t)getpid());
  atropos_task_request_begin(task, 0);
  say(t->to_parent[1], task);
  hear(t->to_child[0]);
  /* A second task: the agent that hung is there again. */
  atropos_free_cancel(task);
  task = atropos_task_create((uint64_t)getpid());
  atropos_task_request_begin(task, 0);
  say(t->to_parent[1], task);
  hear(t->to_child[0]);
  CHECK_EQ(atropos_task_cancel_requested(task), 1);
  atropos_free_cancel(task);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK); /* stops the agent's thread */
}

int main(void) {
  init_with("mode = enforce\nslo_ms = 1000\nverify_ms = 50\nmax_tasks = 16\nmax_workers = 16");
  shared = (struct shared *)shared_memory(sizeof *shared);
  talk_open(&hanging);
  talk_open(&healthy);
  pid_t bad = child_that(owner, &hanging), good = child_that(owner, &healthy);
  atropos_task_t bad_task = hear(hanging.to_parent[0]), good_task = hear(healthy.to_parent[0]);
  CHECK_EQ(atropos_task_cancel(bad_task, 0, "by the test"), ATROPOS_OK);
  TICK_UNTIL(20, atomic_load(&shared->entered) == 1);
  /* Told twice, the second time on the next rung; neither has an effect. */
  TICK_UNTIL(20, stat_number("cancels_unresponsive") >= 1);
  CHECK(stat_number("cancels_escalated") >= 1);
  CHECK_EQ(atomic_load(&shared->entered), 1);

  CHECK_EQ(atropos_task_cancel(good_task, 0, "by the test"), ATROPOS_OK);
  TICK_UNTIL(20, atomic_load(&shared->served) >= 1);
  CHECK_EQ(atomic_load(&shared->entered), 1);

  atomic_store(&shared->release, 1);
  TICK_UNTIL(20, atomic_load(&shared->entered) >= 2); /* what was rung for meanwhile */
  say(hanging.to_child[1], 1);
  say(healthy.to_child[1], 1);
  bad_task = hear(hanging.to_parent[0]), good_task = hear(healthy.to_parent[0]);
  int entered = atomic_load(&shared->entered), served = atomic_load(&shared->served);
  CHECK_EQ(atropos_task_cancel(bad_task, 0, "again"), ATROPOS_OK);
  CHECK_EQ(atropos_task_cancel(good_task, 0, "again"), ATROPOS_OK);
  TICK_UNTIL(20, atomic_load(&shared->entered) > entered && atomic_load(&shared->served) > served);
  say(hanging.to_child[1], 1);
  say(healthy.to_child[1], 1);
  join_child(bad);
  join_child(good);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
