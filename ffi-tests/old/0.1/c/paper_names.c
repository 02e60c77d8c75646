/* The six names of the paper do what their atropos_ twins do. */
#include "check.h"

/* The same types, checked by the compiler. */
static atropos_task_t (*const create_twins[])(uint64_t) = {createCancel, atropos_create_cancel};
static void (*const free_twins[])(atropos_task_t) = {freeCancel, atropos_free_cancel};
static int (*const action_twins[])(atropos_cancel_fn, void *) = {setCancelAction, atropos_set_cancel_action};
static void (*const amount_twins[])(atropos_resource_t, uint64_t) = {
    getResource,  atropos_get_resource,   freeResource,
    atropos_free_resource, slowByResource, atropos_slow_by_resource};

static int action(const atropos_cancel_request *req, void *arg) {
  (void)req, (void)arg;
  return 0;
}

int main(void) {
  init_with(NULL);
  atropos_resource_t lock = atropos_resource_register("lock", ATROPOS_LOCK);
  for (int twin = 0; twin < 2; twin++) {
    CHECK_EQ(action_twins[twin](action, NULL), ATROPOS_OK);
    atropos_task_t task = create_twins[twin](77);
    CHECK(task != 0);
    CHECK_EQ(atropos_current_task(), task);
    amount_twins[4 + twin](lock, 1);
    CHECK(task_waits(77, "lock"));
    CHECK(!task_holds(77, "lock"));
    amount_twins[0 + twin](lock, 1);
    CHECK(task_holds(77, "lock"));
    amount_twins[2 + twin](lock, 1);
    CHECK(!task_holds(77, "lock"));
    free_twins[twin](task);
    CHECK_EQ(atropos_current_task(), 0);
    CHECK(!task_is_listed(77));
  }
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
