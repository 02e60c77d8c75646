/* Faults planted for the watchers, each in a store that the library makes: `freed`, a buffer that was freed; `race`, one
 * buffer for two threads at once. `nothing` makes the same calls rightly. */
#include "check.h"

static char *buffer;
static pthread_barrier_t both;

static void *report(void *arg) {
  (void)arg;
  pthread_barrier_wait(&both);
  for (int i = 0; i < 100; i++) atropos_last_error(buffer, 64);
  return NULL;
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  CHECK_EQ(atropos_controller_tick(), ATROPOS_E_NOT_INIT); /* an error text to report */
  buffer = malloc(64);
  CHECK(buffer != NULL);
  if (strcmp(argv[1], "freed") == 0) {
    char *volatile freed = buffer; /* or the compiler says it */
    free(buffer);
    atropos_last_error(freed, 64);
  } else if (strcmp(argv[1], "race") == 0) {
    pthread_t threads[2];
    pthread_barrier_init(&both, NULL, 2);
    for (int i = 0; i < 2; i++) CHECK_EQ(pthread_create(&threads[i], NULL, report, NULL), 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    free(buffer);
  } else {
    atropos_last_error(buffer, 64);
    CHECK_HAS(buffer, "not initialised");
    free(buffer);
  }
  return 0;
}
