/* The gate that inline trace points read is the one the library moves: in an executable linked to the shared library
 * as well (copy relocation), and in all processes of the region at once. */
#include "check.h"

static void reload(const char *text) {
  atropos_config c = config_of(text);
  CHECK_EQ(atropos_reload(&c), ATROPOS_OK);
}

int main(void) {
  CHECK(atropos_gate != NULL);
  CHECK(!atropos_trace_is_on());
  /* Closed: nothing happens, nothing is created. */
  CHECK_EQ(atropos_trace_create_cancel(1), 0);
  CHECK_EQ(atropos_trace_task_create(1), 0);
  CHECK_EQ(atropos_trace_cancel_requested(), 0);
  atropos_trace_get(1, 1);

  init_with("mode = observe");
  CHECK(atropos_trace_is_on());
  atropos_resource_t lock = atropos_resource_register("lock", ATROPOS_LOCK);
  atropos_task_t task = atropos_trace_create_cancel(5);
  CHECK(task != 0);
  atropos_trace_wait_on(lock, 2, 1);
  atropos_trace_get_on(lock, 2, 1);
  CHECK(task_holds(5, "lock"));

  talk t;
  talk_open(&t);
  pid_t child = fork();
  if (child == 0) {
    CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
    CHECK(atropos_trace_is_on());
    say(t.to_parent[1], 1);
    hear(t.to_child[0]);
    CHECK(!atropos_trace_is_on());
    CHECK_EQ(atropos_trace_create_cancel(6), 0);
    say(t.to_parent[1], 2);
    hear(t.to_child[0]);
    CHECK(atropos_trace_is_on());
    /* And the other way round. */
    reload("mode = off");
    _exit(0);
  }
  CHECK(child > 0);
  hear(t.to_parent[0]);
  reload("mode = off");
  CHECK(!atropos_trace_is_on());
  say(t.to_child[1], 1);
  hear(t.to_parent[0]);
  /* Not seen, as the gate is closed... */
  atropos_trace_free_on(lock, 2, 1);
  reload("mode = enforce");
  CHECK(atropos_trace_is_on());
  /* ... so what was held before must be void now, or this task would be blamed for a lock it gave back. */
  CHECK(!task_holds(5, "lock"));
  atropos_trace_get_on(lock, 2, 1);
  CHECK(task_holds(5, "lock"));
  atropos_trace_free_on(lock, 2, 1);
  CHECK(!task_holds(5, "lock"));
  say(t.to_child[1], 1);
  join_child(child);
  CHECK(!atropos_trace_is_on());
  reload("mode = observe");
  CHECK(atropos_trace_is_on());
  atropos_trace_free_cancel(task);
  CHECK(!task_is_listed(5));

  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  CHECK(!atropos_trace_is_on());
  init_with("mode = off");
  CHECK(!atropos_trace_is_on());
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  CHECK(!atropos_trace_is_on());
  return 0;
}
