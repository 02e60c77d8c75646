/* A host that loads, uses, shuts down and unloads the library 1,000 times while its threads live and are in the middle of
 * calls: nothing crashes, and nothing grows but by what threads may still be reading: the first pages of each region that
 * was shut down, about 9 kB. Argument: the library. SPDX-License-Identifier: MIT OR Apache-2.0 */
#define CHECK_NO_LIBRARY
#include "fault.h"
#include <dlfcn.h>

enum { ROUNDS = 1000, THREADS = 4, SLACK_KB = 12 * ROUNDS };

static struct {
  int (*init)(const atropos_config *);
  int (*shutdown)(void);
  int (*start)(void);
  atropos_resource_t (*resource)(const char *, uint32_t);
  atropos_task_t (*create)(uint64_t);
  void (*free_task)(atropos_task_t);
  void (*wait)(atropos_resource_t, uint64_t);
  void (*get)(atropos_resource_t, uint64_t);
  void (*release)(atropos_resource_t, uint64_t);
  void (*release_all)(atropos_task_t);
  size_t (*stats)(char *, size_t);
} api;

static atomic_int stop;
static atomic_long calls, tracked;

/* dlclose must not take the code away under a thread that is inside: the pointers stay good. */
static void *worker(void *arg) {
  (void)arg;
  char text[256];
  for (uint64_t i = 0; !atomic_load_explicit(&stop, memory_order_relaxed); i++) {
    atropos_task_t task = api.create(i);
    api.wait(1, 1);
    api.get(1, 1);
    if (i % 2) api.release(1, 1);
    if (i % 8 == 0) api.release_all(task);
    if (i % 64 == 0) api.stats(text, sizeof text);
    api.free_task(task);
    if (task) atomic_fetch_add_explicit(&tracked, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
    if (i % 8 == 0) pause_us(100);
  }
  return NULL;
}

static void *load(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) fprintf(stderr, "%s\n", dlerror());
  CHECK(library != NULL);
  struct {
    void *to;
    const char *name;
  } symbols[] = {
      {&api.init, "atropos_init"}, {&api.shutdown, "atropos_shutdown"}, {&api.start, "atropos_controller_start"},
      {&api.resource, "atropos_resource_register"}, {&api.create, "atropos_create_cancel"},
      {&api.free_task, "atropos_free_cancel"}, {&api.wait, "atropos_slow_by_resource"},
      {&api.get, "atropos_get_resource"}, {&api.release, "atropos_free_resource"},
      {&api.release_all, "atropos_task_release_all"}, {&api.stats, "atropos_stats"},
  };
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void *found = dlsym(library, symbols[i].name), *before;
    CHECK(found != NULL);
    memcpy(&before, symbols[i].to, sizeof found);
    /* It stays where it is: threads go on calling through the pointers of the first time. */
    CHECK(before == NULL || before == found);
    if (!before) memcpy(symbols[i].to, &found, sizeof found); /* ISO C has no cast from data to function pointers */
  }
  return library;
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  pthread_t threads[THREADS];
  long before_kb = 0;
  atropos_config config = config_of("max_tasks = 128\nmax_workers = 16");
  for (int round = 0; round < ROUNDS; round++) {
    void *library = load(argv[1]);
    CHECK_EQ(api.init(&config), ATROPOS_OK);
    CHECK_EQ(api.resource("lock", ATROPOS_LOCK), 1);
    if (round % 4 == 0) CHECK_EQ(api.start(), ATROPOS_OK);
    if (round == 0)
      for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, worker, NULL), 0);
    long n = atomic_load(&tracked);
    if (round % 16 == 0) WAIT_FOR(20, atomic_load(&tracked) > n + 10);
    CHECK_EQ(api.shutdown(), ATROPOS_OK);
    CHECK_EQ(dlclose(library), 0);
    if (round == 20) before_kb = status_kb("VmRSS");
  }
  long after_kb = status_kb("VmRSS");
  atomic_store(&stop, 1);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  printf("%d rounds, %ld calls of which %ld tracked; memory %ld kB, then %ld kB\n", ROUNDS, atomic_load(&calls),
         atomic_load(&tracked), before_kb, after_kb);
  CHECK(after_kb <= before_kb + SLACK_KB);
  return 0;
}
