/* Does an installed libatropos work: headers and library of one version, a task followed from begin to end. */
#include <atropos.h>
#include <atropos_trace.h>
#include <stdio.h>

int main(void) {
  if (atropos_init(NULL) != ATROPOS_OK) {
    char why[256];
    atropos_last_error(why, sizeof why);
    fprintf(stderr, "atropos_init: %s\n", why);
    return 1;
  }
  atropos_resource_t lock = atropos_resource_register("a lock", ATROPOS_LOCK);
  atropos_task_t task = atropos_create_cancel(1);
  if (lock == 0 || task == 0 || atropos_current_task() != task) {
    fprintf(stderr, "resource %u, task %llu, bound %llu\n", lock, (unsigned long long)task,
            (unsigned long long)atropos_current_task());
    return 1;
  }
  atropos_get_resource(lock, 1);
  atropos_free_resource(lock, 1);
  atropos_free_cancel(task);
  uint32_t version = atropos_version();
  printf("libatropos %u.%u.%u\n", version >> 16, version >> 8 & 255, version & 255);
  return atropos_shutdown() == ATROPOS_OK ? 0 : 1;
}
