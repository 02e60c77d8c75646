/* Handles that are 0, invented, or of tasks that have ended: nothing happens, above all not to the task that now lives
 * in the same slot. */
#include "check.h"

static atropos_resource_t lock;

/* Every call that takes a handle. None may have an effect. */
static void call_everything(uint64_t handle) {
  atropos_cancel_info info;
  memset(&info, 0, sizeof info);
  info.size = sizeof info;
  CHECK_EQ(atropos_task_set(handle, ATROPOS_TASK_CLASS, 1), ATROPOS_E_STALE);
  if (handle) CHECK_EQ(atropos_task_bind(handle), ATROPOS_E_STALE);
  CHECK_EQ(atropos_task_attach(handle), 0);
  atropos_task_detach(handle);
  CHECK_EQ(atropos_task_child(handle, handle), ATROPOS_E_STALE);
  CHECK_EQ(atropos_task_cancel(handle, 0, NULL), ATROPOS_E_STALE);
  atropos_task_request_begin(handle, 1);
  atropos_task_request_end(handle, 0);
  CHECK_EQ(atropos_task_scope(handle), 0);
  atropos_task_client_wait(handle, 1);
  atropos_task_get_resource(handle, lock, 1, 1);
  atropos_task_free_resource(handle, lock, 1, 1);
  atropos_task_slow_by_resource(handle, lock, 1, 1);
  atropos_task_wait_abandoned(handle, lock);
  atropos_task_progress(handle, 1, 2);
  CHECK_EQ(atropos_task_cancel_requested(handle), 0);
  CHECK_EQ(atropos_task_cancel_info(handle, &info), 0);
  atropos_task_cancel_acknowledge(handle, 1);
  atropos_task_release_all(handle);
  atropos_trace_task_get(handle, lock, 1, 1);
  atropos_trace_task_wait(handle, lock, 1, 1);
  atropos_trace_free_cancel(handle);
  atropos_free_cancel(handle);
}

int main(void) {
  init_with("max_tasks = 16");
  lock = atropos_resource_register("lock", ATROPOS_LOCK);

  atropos_task_t stale = atropos_create_cancel(1);
  atropos_free_cancel(stale);
  atropos_free_cancel(stale); /* double free */
  atropos_task_t live = atropos_create_cancel(2);
  CHECK(live != 0 && live != stale);
  atropos_get_resource_on(lock, 1, 1);
  uint64_t scope = atropos_task_scope(live);

  call_everything(0);
  call_everything(stale);
  call_everything(UINT64_MAX);
  uint64_t seed = 88172645463325252u;
  for (int i = 0; i < 20000; i++) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    /* Wild ones, near misses of index and generation, and the worker's table's number range. */
    uint64_t near = live + (seed % 64 - 32), flipped = live ^ (1ull << (seed % 64));
    if (seed != live) call_everything(seed);
    if (near != live && i % 16 == 0) call_everything(near);
    if (i < 64) call_everything(live ^ (1ull << i));
    if (flipped != live && i % 16 == 1) call_everything(flipped);
  }

  CHECK_EQ(atropos_current_task(), live);
  CHECK_EQ(atropos_task_scope(live), scope);
  CHECK(task_is_listed(2));
  CHECK(task_holds(2, "lock"));
  CHECK(!task_is_listed(1));

  /* A worker that is detached twice, and one whose task has ended under it. */
  atropos_task_bind(0);
  atropos_worker_t worker = atropos_task_attach(live);
  CHECK(worker != 0);
  atropos_task_detach(worker);
  atropos_task_detach(worker);
  worker = atropos_task_attach(live);
  atropos_free_cancel(live);
  CHECK_EQ(atropos_current_task(), 0);
  atropos_get_resource(lock, 1);
  atropos_task_detach(worker);

  /* Handles given out are never given out again: 200,000 lives of the same few slots. */
  uint64_t last = 0;
  for (int i = 0; i < 200000; i++) {
    atropos_task_t t = atropos_create_cancel(3);
    CHECK(t != 0 && t != last && t != live && t != stale);
    last = t;
    atropos_free_cancel(t);
  }
  /* A new region's handles are foreign to the old one's and the other way round. */
  atropos_task_t old = atropos_create_cancel(9);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  init_with("max_tasks = 16");
  lock = atropos_resource_register("lock", ATROPOS_LOCK);
  CHECK_EQ(atropos_current_task(), 0);
  atropos_task_t fresh = atropos_create_cancel(10);
  CHECK(fresh != 0 && fresh != old);
  call_everything(old);
  CHECK(task_is_listed(10));
  atropos_free_cancel(fresh);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  uint64_t first_of_life[8];
  for (int life = 0; life < 8; life++) {
    init_with("max_tasks = 16");
    first_of_life[life] = atropos_create_cancel(1);
    for (int other = 0; other < life; other++) CHECK(first_of_life[life] != first_of_life[other]);
    CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  }
  return 0;
}
