/* A host that has these six names for things of its own hides the paper's. */
#define ATROPOS_NO_PAPER_NAMES
#include "check.h"

typedef struct {
  double createCancel;
} freeCancel;
enum { setCancelAction = 3 };
static const char *getResource(const char *name) { return name; }
#define freeResource 4
static long slowByResource = 5;

int main(void) {
  freeCancel own = {1.5};
  CHECK(own.createCancel > 1 && setCancelAction + freeResource + (int)slowByResource == 12);
  CHECK(strcmp(getResource("mine"), "mine") == 0);
  init_with(NULL);
  atropos_task_t task = atropos_create_cancel(1);
  CHECK(task != 0);
  atropos_free_cancel(task);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
