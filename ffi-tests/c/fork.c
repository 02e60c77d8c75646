/* fork: the child has no part in its parent's tasks. Until atropos_after_fork its hot calls do nothing; then it is a
 * process of the region like any other, and its tasks are visible to the parent's controller. */
#include "check.h"

static atropos_resource_t lock, pool;

static void child_process(talk *t, atropos_task_t inherited) {
  /* The inherited binding is the parent's: nothing here may write into its slot. */
  CHECK_EQ(atropos_current_task(), 0);
  atropos_get_resource(pool, 5);
  atropos_free_resource(lock, 1);
  atropos_trace_get(pool, 5);
  atropos_task_get_resource(inherited, pool, 0, 5);
  atropos_task_free_resource(inherited, lock, 0, 1);
  atropos_progress(1, 2);
  atropos_request_begin(0);
  atropos_task_release_all(inherited);
  CHECK_EQ(atropos_create_cancel(60), 0);
  CHECK_EQ(atropos_task_create(60), 0);
  CHECK_EQ(atropos_controller_tick(), ATROPOS_E_FORKED);
  CHECK_HAS(last_error(), "atropos_after_fork");
  CHECK_EQ(atropos_controller_start(), ATROPOS_E_FORKED);
  atropos_free_cancel(inherited);
  say(t->to_parent[1], 1);
  hear(t->to_child[0]);

  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  CHECK_EQ(atropos_current_task(), 0);
  /* Still the parent's. */
  atropos_task_get_resource(inherited, pool, 0, 5);
  atropos_free_cancel(inherited);
  CHECK_EQ(atropos_resource_register("lock", ATROPOS_LOCK), lock);
  atropos_task_t own = atropos_create_cancel(61);
  CHECK(own != 0 && own != inherited);
  atropos_get_resource(lock, 1);
  CHECK_EQ(atropos_controller_tick(), ATROPOS_E_NOT_LEADER); /* the parent leads */
  say(t->to_parent[1], 2);
  hear(t->to_child[0]);
  atropos_free_resource(lock, 1);
  atropos_free_cancel(own);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  say(t->to_parent[1], 3);
  hear(t->to_child[0]);
  _exit(0);
}

int main(void) {
  init_with("mode = enforce\nslo_ms = 1000");
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK); /* not a child: nothing to do */
  lock = atropos_resource_register("lock", ATROPOS_LOCK);
  pool = atropos_resource_register("pool", ATROPOS_MEMORY);
  atropos_task_t task = atropos_create_cancel(50);
  atropos_get_resource(lock, 1);
  uint64_t scope = atropos_task_scope(task);
  /* The parent leads by a thread, which the child does not inherit. */
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  WAIT_FOR(10, stat_number("windows") >= 1);

  talk t;
  talk_open(&t);
  pid_t child = fork();
  if (child == 0) child_process(&t, task);
  CHECK(child > 0);
  CHECK_EQ(hear(t.to_parent[0]), 1);
  CHECK_EQ(atropos_current_task(), task);
  CHECK_EQ(atropos_task_scope(task), scope);
  CHECK(task_holds(50, "lock"));
  CHECK(!task_holds(50, "pool"));
  CHECK(!task_is_listed(60));
  say(t.to_child[1], 1);

  CHECK_EQ(hear(t.to_parent[0]), 2);
  CHECK(task_holds(61, "lock"));
  char *json = task_in_stats(61);
  CHECK_EQ(json_number(json, "pid"), child);
  free(json);
  CHECK(task_holds(50, "lock"));
  CHECK(!task_holds(50, "pool"));
  say(t.to_child[1], 1);

  CHECK_EQ(hear(t.to_parent[0]), 3);
  CHECK(!task_is_listed(61));
  CHECK(task_holds(50, "lock"));
  CHECK(atropos_trace_is_on()); /* the child's shutdown was the child's alone */
  say(t.to_child[1], 1);
  join_child(child);
  double windows = stat_number("windows");
  WAIT_FOR(10, stat_number("windows") > windows); /* and the controller runs on */
  atropos_free_cancel(task);
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
