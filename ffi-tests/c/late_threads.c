/* A host that loads the library at run time (all servers with a module do): not even a thread's first hot call allocates.
 * Storage of a thread that the loader makes room for late would. */
#define CHECK_NO_LIBRARY
#include "check.h"
#include <dlfcn.h>

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
int main(void) {
  puts("SKIPPED: a sanitizer has an allocator of its own, and allocates for each thread");
  return 0;
}
#else

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_memalign(size_t, size_t);

static __thread volatile int counting; /* the compiler takes malloc for one that cannot read it */
static int allocations;

static void count(void) {
  if (counting) __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED);
}

/* The program's own come before the C library's, for the loader as well. */
void *malloc(size_t size) { return count(), __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return count(), __libc_calloc(n, size); }
void *aligned_alloc(size_t align, size_t size) { return count(), __libc_memalign(align, size); }
void *memalign(size_t align, size_t size) { return count(), __libc_memalign(align, size); }

static struct {
  atropos_task_t (*create)(uint64_t);
  void (*end)(atropos_task_t);
  void (*get)(atropos_resource_t, uint64_t);
  void (*release)(atropos_resource_t, uint64_t);
  int (*requested)(void);
} hot;
static atropos_resource_t lock;

static void *load(void *handle, const char *name) {
  void *found = dlsym(handle, name);
  if (!found) fprintf(stderr, "  %s\n", dlerror());
  CHECK(found != NULL);
  return found;
}

static void *first_call(void *unbound) {
  counting = 1;
  if (unbound) {
    hot.get(lock, 1);
    (void)hot.requested();
  }
  atropos_task_t task = hot.create(1);
  hot.get(lock, 1);
  hot.release(lock, 1);
  hot.end(task);
  counting = 0;
  CHECK(task != 0);
  return NULL;
}

static int allocations_in_a_thread(void *(*body)(void *), void *arg) {
  pthread_t thread;
  allocations = 0;
  CHECK_EQ(pthread_create(&thread, NULL, body, arg), 0);
  pthread_join(thread, NULL);
  return allocations;
}

static void *allocate(void *arg) {
  counting = 1;
  void *volatile p = malloc(100);
  free(p);
  counting = 0;
  return arg;
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  CHECK_EQ(allocations_in_a_thread(allocate, NULL), 1); /* it would be seen */
  void *handle = dlopen(argv[1], RTLD_NOW);
  if (!handle) fprintf(stderr, "  %s\n", dlerror());
  CHECK(handle != NULL);
  int (*init)(const atropos_config *);
  atropos_resource_t (*reg)(const char *, uint32_t);
  *(void **)&init = load(handle, "atropos_init");
  *(void **)&reg = load(handle, "atropos_resource_register");
  *(void **)&hot.create = load(handle, "atropos_create_cancel");
  *(void **)&hot.end = load(handle, "atropos_free_cancel");
  *(void **)&hot.get = load(handle, "atropos_get_resource");
  *(void **)&hot.release = load(handle, "atropos_free_resource");
  *(void **)&hot.requested = load(handle, "atropos_cancel_requested");
  atropos_config c = config_of("");
  CHECK_EQ(init(&c), 0);
  lock = reg("lock", ATROPOS_LOCK);
  for (int i = 0; i < 4; i++) CHECK_EQ(allocations_in_a_thread(first_call, i % 2 ? &c : NULL), 0);
  return 0;
}
#endif
