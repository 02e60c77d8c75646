/* A host that loads the library at run time, as plugins do, and unloads it while its threads still live: their
 * thread-local state and the calls they hold must stay good. */
#define CHECK_NO_LIBRARY
#include "check.h"
#include <dlfcn.h>
#include <stdatomic.h>

enum { THREADS = 4 };

/* Calls through pointers only: the program itself is not linked to the library, or dlclose could not unload it. */
static struct {
  int (*init)(const atropos_config *);
  int (*shutdown)(void);
  int (*start)(void);
  uint32_t (*version)(void);
  atropos_resource_t (*resource)(const char *, uint32_t);
  atropos_task_t (*create)(uint64_t);
  void (*free_task)(atropos_task_t);
  void (*get)(atropos_resource_t, uint64_t);
  void (*release)(atropos_resource_t, uint64_t);
  const uint32_t **gate;
} api;

static void *library;
static atropos_resource_t lock;
static pthread_barrier_t step;

static void load(const char *path) {
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) fprintf(stderr, "%s\n", dlerror());
  CHECK(library != NULL);
  struct {
    void *to;
    const char *name;
  } symbols[] = {
      {&api.init, "atropos_init"},          {&api.shutdown, "atropos_shutdown"},
      {&api.start, "atropos_controller_start"}, {&api.version, "atropos_version"},
      {&api.resource, "atropos_resource_register"}, {&api.create, "atropos_create_cancel"},
      {&api.free_task, "atropos_free_cancel"}, {&api.get, "atropos_get_resource"},
      {&api.release, "atropos_free_resource"}, {&api.gate, "atropos_gate"},
  };
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void *found = dlsym(library, symbols[i].name);
    CHECK(found != NULL);
    memcpy(symbols[i].to, &found, sizeof found); /* ISO C has no cast from data to function pointers */
  }
}

static void *worker(void *arg) {
  (void)arg;
  atropos_task_t task = api.create(1);
  CHECK(task != 0);
  api.get(lock, 1);
  pthread_barrier_wait(&step); /* all have thread-local state */
  pthread_barrier_wait(&step); /* the library was shut down and closed */
  api.release(lock, 1);        /* harmless */
  api.free_task(task);
  return NULL; /* the thread's end runs destructors, if there were any */
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  pthread_barrier_init(&step, NULL, THREADS + 1);
  for (int round = 0; round < 3; round++) {
    load(argv[1]);
    CHECK_EQ(api.version(), ATROPOS_VERSION_NUMBER);
    CHECK_EQ(**api.gate, 0);
    CHECK_EQ(api.init(NULL), ATROPOS_OK);
    CHECK(**api.gate != 0);
    lock = api.resource("lock", ATROPOS_LOCK);
    CHECK(lock != 0);
    CHECK_EQ(api.start(), ATROPOS_OK);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, worker, NULL), 0);
    pthread_barrier_wait(&step);
    /* Odd rounds close it while it runs, with its own thread alive. */
    if (round % 2 == 0) CHECK_EQ(api.shutdown(), ATROPOS_OK);
    CHECK_EQ(dlclose(library), 0);
    pthread_barrier_wait(&step);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    if (round % 2 == 1) CHECK_EQ(api.shutdown(), ATROPOS_OK);
  }
  return 0;
}
