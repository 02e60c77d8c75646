/* Tasks that come and go, 10,000 a second, from threads that come and go as well, under a running controller: memory stays
 * what it was, and so do the tables. Argument: seconds. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"

enum { PER_SECOND = 10000, THREADS = 4, TASKS_OF_A_THREAD = 500, SLACK_KB = 1024 };
static atropos_resource_t lock;
static atomic_long tasks;
static uint64_t begin_ns, end_ns;

static void *some_tasks(void *arg) {
  (void)arg;
  for (int i = 0; i < TASKS_OF_A_THREAD; i++) {
    long n = atomic_fetch_add(&tasks, 1);
    /* An even pace: each task has its time; who is late makes up for it. */
    uint64_t due = begin_ns + (uint64_t)n * (1000000000u / PER_SECOND), now = now_ns();
    if (due > now + 1000000) pause_us((unsigned)((due - now) / 1000));
    atropos_task_t task = atropos_create_cancel((uint64_t)n);
    CHECK(task != 0);
    atropos_request_begin(n % 3);
    atropos_slow_by_resource_on(lock, (uint64_t)n, 1);
    atropos_get_resource_on(lock, (uint64_t)n, 1);
    atropos_worker_t worker = n % 10 ? 0 : atropos_task_attach(task);
    if (n % 2) atropos_free_resource_on(lock, (uint64_t)n, 1);
    if (n % 5 == 0) atropos_task_set(task, ATROPOS_TASK_LABEL, (int64_t)(uintptr_t) "one of many");
    atropos_task_detach(worker);
    atropos_request_end(0);
    atropos_free_cancel(task);
  }
  return NULL;
}

static void *threads_in_a_row(void *arg) {
  while (now_ns() < end_ns) {
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, some_tasks, arg), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
  }
  return NULL;
}

static void run_until(uint64_t end) {
  pthread_t threads[THREADS];
  end_ns = end;
  for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, threads_in_a_row, NULL), 0);
  for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  unsigned seconds = (unsigned)atoi(argv[1]);
  CHECK(seconds >= 4);
  init_with("mode = observe\nmax_tasks = 64\nmax_workers = 16");
  lock = atropos_resource_register("lock", ATROPOS_LOCK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  begin_ns = now_ns();
  uint64_t warm = begin_ns + 2000000000u, end = begin_ns + seconds * 1000000000ull;
  run_until(warm);
  long before_kb = status_kb("VmRSS"), highest_kb = before_kb;
  while (now_ns() < end) {
    uint64_t next = now_ns() + 1000000000u;
    run_until(next < end ? next : end);
    long kb = status_kb("VmRSS");
    highest_kb = kb > highest_kb ? kb : highest_kb;
  }
  double took_s = (double)(now_ns() - begin_ns) / 1e9;
  printf("%ld tasks in %.1f s, %.0f/s; memory %ld kB, at most %ld kB later\n", atomic_load(&tasks), took_s,
         (double)atomic_load(&tasks) / took_s, before_kb, highest_kb);
  CHECK(highest_kb <= before_kb + SLACK_KB);
  CHECK_EQ(stat_number("tasks_untracked"), 0);
  CHECK_EQ(stat_number("workers_untracked"), 0);
  /* All places are free. */
  for (uint64_t i = 0; i < 64; i++) CHECK(atropos_task_create(i) != 0);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
