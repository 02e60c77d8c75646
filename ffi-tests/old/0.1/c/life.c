/* The whole life of a host that uses the library: every call in its right place, with its right answer. */
#include "check.h"

static atropos_resource_t lock_r, pool_r, queue_r;
static atropos_task_t shared_task;

static void *second_worker(void *arg) {
  (void)arg;
  CHECK_EQ(atropos_current_task(), 0);
  atropos_worker_t worker = atropos_task_attach(shared_task);
  CHECK(worker != 0);
  CHECK_EQ(atropos_current_task(), shared_task);
  atropos_get_resource(pool_r, 3);
  atropos_free_resource(pool_r, 3);
  atropos_task_detach(worker);
  CHECK_EQ(atropos_current_task(), 0);
  return NULL;
}

static int no_action(const atropos_cancel_request *req, void *arg) {
  (void)req, (void)arg;
  return 0;
}

static void log_line(int level, const char *message, void *arg) {
  CHECK(level >= 1 && level <= 4 && message[0] != 0);
  ++*(int *)arg;
}

int main(void) {
  int logged = 0;
  CHECK(atropos_version() >= ATROPOS_VERSION_NUMBER);
  for (int code = 0; code >= -12; code--) {
    CHECK(atropos_strerror(code) != NULL && atropos_strerror(code)[0] != 0);
    for (int other = 0; other > code; other--) CHECK(strcmp(atropos_strerror(code), atropos_strerror(other)) != 0);
  }
  CHECK(atropos_strerror(-4711) != NULL && atropos_strerror(4711) != NULL);

  CHECK_EQ(atropos_set_log(log_line, &logged), ATROPOS_OK);
  init_with("mode = enforce\nslo_ms = 50\n");
  CHECK_EQ(atropos_set_cancel_action(no_action, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_set_cancel_action_ex(no_action, NULL, ATROPOS_ACTION_ANYWHERE), ATROPOS_OK);
  CHECK_EQ(atropos_set_terminate_action(no_action, NULL, 0), ATROPOS_OK);

  lock_r = atropos_resource_register("table lock", ATROPOS_LOCK);
  pool_r = atropos_resource_register("buffer pool", ATROPOS_MEMORY);
  queue_r = atropos_resource_register("workers", ATROPOS_QUEUE);
  CHECK(lock_r && pool_r && queue_r && lock_r != pool_r && pool_r != queue_r && lock_r != queue_r);
  CHECK_EQ(atropos_resource_register("table lock", ATROPOS_LOCK), lock_r);

  /* A task bound to this thread. */
  atropos_task_t task = atropos_create_cancel(42);
  CHECK(task != 0);
  CHECK_EQ(atropos_current_task(), task);
  CHECK_EQ(atropos_task_set(task, ATROPOS_TASK_CLASS, 3), ATROPOS_OK);
  CHECK_EQ(atropos_task_set(task, ATROPOS_TASK_PRIORITY, -100), ATROPOS_OK);
  CHECK_EQ(atropos_task_set(task, ATROPOS_TASK_BACKGROUND, 1), ATROPOS_OK);
  CHECK_EQ(atropos_task_set(task, ATROPOS_TASK_BACKGROUND, 0), ATROPOS_OK);
  CHECK_EQ(atropos_task_set(task, ATROPOS_TASK_PROTECTED, 0), ATROPOS_OK);
  CHECK_EQ(atropos_task_set(task, ATROPOS_TASK_RETRIED, 0), ATROPOS_OK);
  CHECK_EQ(atropos_task_set(task, ATROPOS_TASK_CANCELLABLE, 1), ATROPOS_OK);
  CHECK_EQ(atropos_task_set(task, ATROPOS_TASK_WORK_START, 1), ATROPOS_OK);
  CHECK_EQ(atropos_task_set(task, ATROPOS_TASK_LABEL, (int64_t)(intptr_t) "nightly report"), ATROPOS_OK);

  uint64_t scope = atropos_task_scope(task);
  atropos_request_begin(3);
  CHECK(atropos_task_scope(task) != scope);
  atropos_slow_by_resource_on(lock_r, 9, 1);
  atropos_get_resource_on(lock_r, 9, 1);
  atropos_get_resource(pool_r, 128);
  atropos_evicted(pool_r, 64);
  atropos_progress(10, 100);
  CHECK_EQ(atropos_cancel_requested(), 0);
  CHECK(task_is_listed(42));
  CHECK(task_holds(42, "table lock"));
  CHECK(task_holds(42, "buffer pool"));
  CHECK(!task_holds(42, "workers"));
  char *json = task_in_stats(42);
  CHECK_HAS(json, "nightly report");
  free(json);

  atropos_slow_by_resource(queue_r, 1);
  atropos_wait_abandoned(queue_r);
  atropos_free_resource_on(lock_r, 9, 1);
  CHECK(!task_holds(42, "table lock"));
  atropos_task_client_wait(task, 1);
  atropos_task_client_wait(task, 0);
  atropos_request_end(0);
  atropos_task_release_all(task);
  CHECK(!task_holds(42, "buffer pool"));

  /* A second worker of the same task. */
  shared_task = task;
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, second_worker, NULL), 0);
  pthread_join(thread, NULL);

  /* A task bound to nobody, driven by handle, then bound. */
  atropos_task_t other = atropos_task_create(43);
  CHECK(other != 0 && other != task);
  CHECK_EQ(atropos_current_task(), task);
  CHECK_EQ(atropos_task_child(task, other), ATROPOS_OK);
  atropos_task_request_begin(other, 0);
  atropos_task_slow_by_resource(other, lock_r, 9, 1);
  CHECK_EQ(atropos_task_bind(other), ATROPOS_OK);
  CHECK_EQ(atropos_current_task(), other);
  atropos_blocked_by(lock_r, task);
  CHECK_EQ(atropos_task_bind(task), ATROPOS_OK);
  atropos_task_wait_abandoned(other, lock_r);
  atropos_task_get_resource(other, lock_r, 9, 1);
  atropos_task_progress(other, 1, 2);
  atropos_task_free_resource(other, lock_r, 9, 1);
  CHECK_EQ(atropos_task_cancel_requested(other), 0);
  atropos_task_request_end(other, -1);
  atropos_cancel_info info;
  memset(&info, 0, sizeof info);
  info.size = sizeof info;
  CHECK_EQ(atropos_task_cancel_info(other, &info), 0);
  atropos_free_cancel(other);
  CHECK_EQ(atropos_current_task(), task);
  atropos_queue_observed(queue_r, 5, 1000000);
  CHECK_EQ(atropos_task_bind(0), ATROPOS_OK);
  CHECK_EQ(atropos_current_task(), 0);
  CHECK_EQ(atropos_task_bind(task), ATROPOS_OK);

  /* The controller, driven by the host. */
  for (int i = 0; i < 40; i++) {
    CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
    pause_ms(5);
  }
  CHECK_EQ(atropos_agent_poll(), 0);
  CHECK_EQ(decisions(), 0);
  CHECK(stat_number("ticks") >= 40);
  CHECK(stat_number("windows") >= 1);

  /* Settings change while running; the sizes cannot. */
  atropos_config c = config_of("mode = observe\nslo_ms = 75\n");
  CHECK_EQ(atropos_reload(&c), ATROPOS_OK);
  c = config_of("max_tasks = 2048");
  CHECK_EQ(atropos_reload(&c), ATROPOS_E_CONFIG);
  CHECK_HAS(last_error(), "max_tasks");

  atropos_free_cancel(task);
  CHECK_EQ(atropos_current_task(), 0);
  CHECK(!task_is_listed(42));

  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);

  /* A second life in the same process begins empty. */
  init_with(NULL);
  CHECK(!task_is_listed(42));
  task = atropos_create_cancel(44);
  CHECK(task != 0);
  atropos_free_cancel(task);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  printf("%d log lines\n", logged);
  return 0;
}
