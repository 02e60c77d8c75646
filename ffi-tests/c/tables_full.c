/* Full tables: the host runs on untracked, a counter says so, and the log says it once. */
#include "check.h"

enum { TASKS = 16, WORKERS = 16 };
static int warnings;
static atropos_worker_t workers[WORKERS + 8];
static atropos_task_t joined;
static pthread_barrier_t attached, looked;

static void log_line(int level, const char *message, void *arg) {
  (void)arg;
  if (level <= 2 && strstr(message, "max_tasks")) warnings++;
}

static void *join_task(void *arg) {
  uintptr_t i = (uintptr_t)arg;
  workers[i] = atropos_task_attach(joined);
  atropos_get_resource(1, 1); /* untracked or not: harmless */
  pthread_barrier_wait(&attached);
  pthread_barrier_wait(&looked);
  atropos_task_detach(workers[i]);
  return NULL;
}

int main(void) {
  atropos_set_log(log_line, NULL);
  atropos_config c = config_of(NULL);
  c.max_tasks = TASKS;
  c.max_workers = WORKERS;
  CHECK_EQ(atropos_init(&c), ATROPOS_OK);
  CHECK_EQ(stat_number("tasks_untracked"), 0);

  atropos_task_t tasks[TASKS];
  for (uint64_t i = 0; i < TASKS; i++) {
    tasks[i] = atropos_task_create(i);
    CHECK(tasks[i] != 0);
    for (uint64_t j = 0; j < i; j++) CHECK(tasks[i] != tasks[j]);
  }
  for (int i = 0; i < 5; i++) CHECK_EQ(atropos_task_create(99), 0);
  for (int i = 0; i < 5; i++) {
    atropos_task_t untracked = atropos_create_cancel(99);
    CHECK_EQ(untracked, 0);
    CHECK_EQ(atropos_current_task(), 0);
    atropos_get_resource(1, 1);
    atropos_free_resource(1, 1);
    atropos_request_begin(0);
    atropos_request_end(0);
    atropos_free_cancel(untracked);
  }
  CHECK_EQ(stat_number("tasks_untracked"), 10);
  for (int i = 0; i < 60; i++) {
    CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
    CHECK_EQ(atropos_task_create(99), 0);
    pause_ms(2);
  }
  CHECK_EQ(warnings, 1);

  /* One goes: one place. */
  atropos_free_cancel(tasks[7]);
  atropos_task_t again = atropos_create_cancel(100);
  CHECK(again != 0 && again != tasks[7]);
  CHECK_EQ(atropos_task_create(99), 0);
  CHECK(task_is_listed(100));

  /* Workers. */
  joined = again;
  pthread_t threads[WORKERS + 8];
  pthread_barrier_init(&attached, NULL, WORKERS + 8 + 1);
  pthread_barrier_init(&looked, NULL, WORKERS + 8 + 1);
  for (uintptr_t i = 0; i < WORKERS + 8; i++) CHECK_EQ(pthread_create(&threads[i], NULL, join_task, (void *)i), 0);
  pthread_barrier_wait(&attached);
  int tracked = 0;
  for (int i = 0; i < WORKERS + 8; i++) tracked += workers[i] != 0;
  CHECK_EQ(tracked, WORKERS);
  CHECK_EQ(stat_number("workers_untracked"), 8);
  pthread_barrier_wait(&looked);
  for (int i = 0; i < WORKERS + 8; i++) pthread_join(threads[i], NULL);
  workers[0] = atropos_task_attach(again);
  CHECK(workers[0] != 0);
  atropos_task_detach(workers[0]);

  /* Resources. */
  int registered = 0;
  char name[16];
  for (;; registered++) {
    CHECK(registered < 4096);
    snprintf(name, sizeof name, "resource %d", registered);
    if (!atropos_resource_register(name, ATROPOS_LOCK)) break;
  }
  CHECK(registered >= 31);
  CHECK(last_error()[0] != 0);
  CHECK_EQ(stat_number("resources_refused"), 1);
  CHECK(atropos_resource_register("resource 0", ATROPOS_LOCK) != 0); /* known names are still found */
  printf("%d resources\n", registered);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
