/* Before init, after shutdown, init twice: defined codes, no effect, and the library can be started again. */
#include "check.h"

static int action(const atropos_cancel_request *req, void *arg) {
  (void)req, (void)arg;
  return 0;
}

static size_t no_edges(atropos_edge *edges, size_t max, void *arg) {
  (void)edges, (void)max, (void)arg;
  return 0;
}

static void everything_answers_not_init(uint64_t handle) {
  CHECK(!atropos_trace_is_on());
  CHECK_EQ(atropos_shutdown(), ATROPOS_E_NOT_INIT);
  CHECK_HAS(last_error(), "atropos_init");
  CHECK_EQ(atropos_reload(NULL), ATROPOS_E_NOT_INIT);
  CHECK_EQ(atropos_after_fork(), ATROPOS_E_NOT_INIT);
  CHECK_EQ(atropos_resource_register("lock", ATROPOS_LOCK), 0);
  CHECK_HAS(last_error(), "atropos_init");
  CHECK_EQ(atropos_controller_tick(), ATROPOS_E_NOT_INIT);
  CHECK_EQ(atropos_controller_start(), ATROPOS_E_NOT_INIT);
  CHECK_EQ(atropos_controller_stop(), ATROPOS_E_NOT_INIT);
  CHECK_EQ(atropos_agent_start(), ATROPOS_E_NOT_INIT);
  CHECK(atropos_agent_poll() <= 0);
  int n = 0;
  CHECK_EQ(atropos_decisions(count_decision, &n), ATROPOS_E_NOT_INIT);
  CHECK_EQ(n, 0);
  char text[64] = "not touched";
  CHECK_EQ(atropos_stats(text, sizeof text), strlen(text));
  CHECK_EQ(atropos_stats(NULL, 0), strlen(text));

  CHECK_EQ(atropos_create_cancel(1), 0);
  CHECK_EQ(createCancel(1), 0);
  CHECK_EQ(atropos_task_create(1), 0);
  CHECK_EQ(atropos_current_task(), 0);
  CHECK_EQ(atropos_task_attach(handle), 0);
  CHECK_EQ(atropos_task_bind(handle), handle ? ATROPOS_E_NOT_INIT : ATROPOS_OK); /* unbinding is always fine */
  CHECK_EQ(atropos_task_set(handle, ATROPOS_TASK_CLASS, 1), ATROPOS_E_NOT_INIT);
  CHECK_EQ(atropos_task_child(handle, handle), ATROPOS_E_NOT_INIT);
  CHECK_EQ(atropos_task_cancel(handle, 0, NULL), ATROPOS_E_NOT_INIT);
  CHECK_EQ(atropos_task_scope(handle), 0);
  CHECK_EQ(atropos_cancel_requested(), 0);
  CHECK_EQ(atropos_task_cancel_requested(handle), 0);
  atropos_cancel_info info;
  memset(&info, 0, sizeof info);
  info.size = sizeof info;
  CHECK_EQ(atropos_task_cancel_info(handle, &info), 0);
  atropos_get_resource(1, 1), atropos_free_resource(1, 1), atropos_slow_by_resource(1, 1);
  getResource(1, 1), freeResource(1, 1), slowByResource(1, 1);
  atropos_get_resource_on(1, 1, 1), atropos_free_resource_on(1, 1, 1), atropos_slow_by_resource_on(1, 1, 1);
  atropos_wait_abandoned(1), atropos_evicted(1, 1), atropos_progress(1, 2), atropos_blocked_by(1, handle);
  atropos_queue_observed(1, 1, 1), atropos_request_begin(0), atropos_request_end(0);
  atropos_task_get_resource(handle, 1, 1, 1), atropos_task_free_resource(handle, 1, 1, 1);
  atropos_task_slow_by_resource(handle, 1, 1, 1), atropos_task_wait_abandoned(handle, 1);
  atropos_task_blocked_by(handle, 1, handle), atropos_task_waited(handle, 1, 1), atropos_queue_capacity(1, 4);
  atropos_task_progress(handle, 1, 2), atropos_task_release_all(handle), atropos_task_client_wait(handle, 1);
  atropos_task_request_begin(handle, 0), atropos_task_request_end(handle, 0);
  atropos_task_cancel_acknowledge(handle, 1), atropos_task_detach(handle);
  atropos_free_cancel(handle), freeCancel(handle);
}

int main(void) {
  everything_answers_not_init(0);
  everything_answers_not_init(0x0123456789abcdefu);
  CHECK_EQ(atropos_version(), ATROPOS_VERSION_NUMBER); /* works at any time */

  for (int life = 0; life < 3; life++) {
    init_with("mode = enforce");
    atropos_resource_t lock = atropos_resource_register("lock", ATROPOS_LOCK);
    CHECK(lock != 0);
    atropos_task_t task = atropos_create_cancel(5);
    atropos_get_resource(lock, 1);
    CHECK(task != 0);

    CHECK_EQ(atropos_init(NULL), ATROPOS_E_ALREADY);
    CHECK(last_error()[0] != 0);
    atropos_config other = config_of("mode = off\nmax_tasks = 64");
    CHECK_EQ(atropos_init(&other), ATROPOS_E_ALREADY);
    CHECK(atropos_trace_is_on()); /* the second one changed nothing */
    CHECK_EQ(atropos_current_task(), task);
    CHECK(task_holds(5, "lock"));

    CHECK_EQ(atropos_set_cancel_action(action, NULL), ATROPOS_OK);
    CHECK_EQ(atropos_edge_source(no_edges, NULL), ATROPOS_OK);
    CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
    CHECK_EQ(atropos_controller_start(), ATROPOS_E_ALREADY);
    CHECK_EQ(atropos_agent_start(), ATROPOS_OK);
    CHECK_EQ(atropos_agent_start(), ATROPOS_E_ALREADY);
    /* Shutdown with tasks alive and both threads running. */
    CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
    everything_answers_not_init(task);
  }
  return 0;
}
