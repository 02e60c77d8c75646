/* The CPU as a resource, end to end: the host registers nothing and reports nothing but its tasks.
 * `hog`: one task of many threads takes the only processor from all others, and exactly this task is told to stop.
 * `equals`: forty tasks that all want as much are nobody's fault, and nobody is told. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "check.h"
#include <sched.h>
#include <stdatomic.h>

enum { VICTIMS = 4, HOGS = 24, EQUALS = 40, HOG_KEY = 7777 };
#define CONFIG "mode = enforce\nslo_ms = 60\nwindow_ms = 40\ntrigger_windows = 2\nsystem_cpu = on\n"

static atomic_int stop, hog_stop, hog_cancels, other_cancels;
static atomic_long served;
static atropos_task_t hog;
static char reason[256];

static uint64_t cpu_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void work_ms(unsigned ms) {
  uint64_t end = cpu_ns() + ms * 1000000ull;
  while (cpu_ns() < end) {
  }
}

static int on_cancel(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  if (req->key == HOG_KEY && req->resource == ATROPOS_RESOURCE_CPU) {
    snprintf(reason, sizeof reason, "%s", req->reason);
    atomic_fetch_add(&hog_cancels, 1);
    atomic_store(&hog_stop, 1);
  } else {
    fprintf(stderr, "  cancelled: key %" PRIu64 ", resource %u: %s\n", req->key, req->resource, req->reason);
    atomic_fetch_add(&other_cancels, 1);
  }
  return 0;
}

static void *victim(void *arg) {
  while (!atomic_load(&stop)) {
    atropos_task_t task = atropos_create_cancel(100 + (uint64_t)(uintptr_t)arg);
    work_ms(8);
    atropos_free_cancel(task);
    atomic_fetch_add(&served, 1);
    pause_ms(60);
  }
  return NULL;
}

static void *hog_worker(void *arg) {
  (void)arg;
  atropos_worker_t worker = atropos_task_attach(hog);
  CHECK(worker != 0);
  while (!atomic_load(&hog_stop)) work_ms(1);
  atropos_task_detach(worker);
  return NULL;
}

/* A heavy request after the other; explicit calls, as a host with a pool of threads makes them. */
static void *equal(void *arg) {
  atropos_task_t task = atropos_task_create(1000 + (uint64_t)(uintptr_t)arg);
  CHECK(task != 0);
  while (!atomic_load(&stop)) {
    atropos_task_request_begin(task, 1);
    work_ms(40);
    atropos_task_request_end(task, 0);
    atomic_fetch_add(&served, 1);
  }
  atropos_free_cancel(task);
  return NULL;
}

static void run_hog(void) {
  pthread_t victims[VICTIMS], hogs[HOGS];
  for (uintptr_t i = 0; i < VICTIMS; i++) CHECK_EQ(pthread_create(&victims[i], NULL, victim, (void *)i), 0);
  WAIT_FOR(20, atomic_load(&served) > 20);
  hog = atropos_create_cancel(HOG_KEY);
  CHECK(hog != 0);
  for (int i = 0; i < HOGS; i++) CHECK_EQ(pthread_create(&hogs[i], NULL, hog_worker, NULL), 0);
  uint64_t since = now_ns();
  while (!atomic_load(&hog_stop) && now_ns() < since + 30 * 1000000000ull) pause_ms(5);
  int found = atomic_exchange(&hog_stop, 1);
  for (int i = 0; i < HOGS; i++) pthread_join(hogs[i], NULL);
  atropos_free_cancel(hog);
  CHECK(found);
  printf("onset to cancel: %.0f ms; reason: %s\n", (double)(now_ns() - since) / 1e6, reason);
  long before = atomic_load(&served);
  WAIT_FOR(20, atomic_load(&served) > before + 20);
  atomic_store(&stop, 1);
  for (int i = 0; i < VICTIMS; i++) pthread_join(victims[i], NULL);
  CHECK(atomic_load(&hog_cancels) >= 1); /* a cancel that seems lost is repeated */
  CHECK_HAS(reason, "of CPU time");
}

static void run_equals(void) {
  pthread_t threads[EQUALS];
  for (uintptr_t i = 0; i < EQUALS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, equal, (void *)i), 0);
  /* Long enough for an overload to be seen, and for many windows in it. */
  WAIT_FOR(60, stat_number("overloads_regular") >= 1);
  for (double windows = stat_number("windows"); stat_number("windows") < windows + 60;) pause_ms(20);
  atomic_store(&stop, 1);
  for (int i = 0; i < EQUALS; i++) pthread_join(threads[i], NULL);
  CHECK_EQ(stat_number("cancels_requested"), 0);
  CHECK_EQ(stat_number("overloads_resource"), 0);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  cpu_set_t allowed, one;
  CHECK_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  int cpu = 0;
  while (!CPU_ISSET(cpu, &allowed)) cpu++;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0); /* before any thread: all inherit it */
  init_with(CONFIG);
  CHECK_EQ(atropos_set_cancel_action(on_cancel, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  if (strcmp(argv[1], "hog") == 0) run_hog();
  else run_equals();
  CHECK_EQ(atomic_load(&other_cancels), 0);
  CHECK_EQ(stat_number("system_threads_unreadable"), 0);
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
