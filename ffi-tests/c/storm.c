/* Threads that make every call in random order, right and wrong, while the controller runs, others read reports, and the
 * settings change: nothing crashes, hangs, or leaves a task behind. */
#include "check.h"
#include <stdatomic.h>

enum { THREADS = 8, SHARED = 8 };
static atropos_resource_t resources[4];
static _Atomic uint64_t shared_tasks[SHARED];
static atomic_int stop;
static atomic_long calls;

static int action(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  atropos_task_cancel_acknowledge(req->task, req->scope);
  return (int)(req->scope % 2);
}

static void *storm(void *arg) {
  uint64_t seed = 0x9e3779b97f4a7c15u * ((uint64_t)(uintptr_t)arg + 1);
  atropos_task_t mine = 0;
  atropos_worker_t worker = 0;
  long n = 0;
  while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    atropos_resource_t r = resources[seed >> 8 & 3];
    uint64_t instance = seed >> 16 & 7, amount = seed >> 24 & 15;
    atropos_task_t shared = atomic_load(&shared_tasks[seed >> 32 & (SHARED - 1)]);
    n++;
    switch (seed >> 40 & 31) {
      case 0: atropos_free_cancel(mine), mine = atropos_create_cancel(seed); break;
      case 1: atropos_free_cancel(mine); break; /* keeps the stale handle */
      case 2: atropos_slow_by_resource_on(r, instance, amount); break;
      case 3: atropos_get_resource_on(r, instance, amount); break;
      case 4: atropos_free_resource_on(r, instance, amount); break;
      case 5: atropos_get_resource(r, amount); break;
      case 6: atropos_free_resource(r, amount); break;
      case 7: atropos_wait_abandoned(r); break;
      case 8: atropos_progress(amount, 16); break;
      case 9: atropos_request_begin((uint32_t)instance); break;
      case 10: atropos_request_end((int32_t)amount); break;
      case 11: atropos_evicted(r, amount); break;
      case 12: atropos_blocked_by(r, shared); break;
      case 13: atropos_queue_observed(r, amount, seed >> 30); break;
      case 14: atropos_task_detach(worker), worker = atropos_task_attach(shared); break;
      case 15: atropos_task_detach(worker); break;
      case 16: atropos_task_bind(mine); break;
      case 17: atropos_task_child(shared, mine); break;
      case 18: atropos_task_set(mine, 1 + (uint32_t)(seed >> 50 & 7), 0); break;
      case 19: atropos_task_release_all(mine); break;
      case 20: {
        atropos_task_t fresh = atropos_task_create(seed);
        atropos_free_cancel(atomic_exchange(&shared_tasks[seed >> 32 & (SHARED - 1)], fresh));
        break;
      }
      case 21: (void)atropos_cancel_requested(); break;
      case 22: atropos_task_client_wait(mine, (int32_t)(seed >> 60 & 1)); break;
      case 23: if (n % 64 == 0) free(stats()); break;
      default: atropos_trace_get_on(r, instance, 1), atropos_trace_free_on(r, instance, 1); break;
    }
  }
  atropos_task_detach(worker);
  atropos_free_cancel(mine);
  atomic_fetch_add(&calls, n);
  return NULL;
}

int main(void) {
  init_with("mode = enforce\nslo_ms = 1\nwindow_ms = 20\ntrigger_windows = 1\ncancel_rate_per_s = 1000\n"
            "cancel_burst = 1000\ncancel_share = 1\nmin_relief = 0\ncontention_threshold = 0\nmax_tasks = 32\nmax_workers = 16");
  for (int i = 0; i < 4; i++) {
    char name[] = "resource 0";
    name[9] = (char)('0' + i);
    resources[i] = atropos_resource_register(name, i < 2 ? ATROPOS_LOCK : i == 2 ? ATROPOS_MEMORY : ATROPOS_QUEUE);
  }
  CHECK_EQ(atropos_set_cancel_action(action, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  pthread_t threads[THREADS];
  for (uintptr_t i = 0; i < THREADS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, storm, (void *)i), 0);
  uint64_t end = now_ns() + 2000000000u;
  for (int i = 0; now_ns() < end; i++) {
    atropos_config c = config_of(i % 4 == 3 ? "mode = off" : i % 4 == 1 ? "mode = observe" : "mode = enforce");
    CHECK_EQ(atropos_reload(&c), ATROPOS_OK);
    decisions();
    pause_ms(20);
  }
  atomic_store(&stop, 1);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  atropos_config c = config_of("mode = enforce");
  CHECK_EQ(atropos_reload(&c), ATROPOS_OK);
  for (int i = 0; i < SHARED; i++) atropos_free_cancel(atomic_load(&shared_tasks[i]));

  /* All places of the table are there again, and the controller still works. */
  for (uint64_t i = 0; i < 32; i++) CHECK(atropos_task_create(i) != 0);
  CHECK_EQ(atropos_task_create(1), 0);
  double windows = stat_number("windows");
  WAIT_FOR(10, stat_number("windows") > windows);
  printf("%ld calls, %d decisions in the ring\n", atomic_load(&calls), decisions());
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
