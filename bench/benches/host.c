/* What a host pays, measured as a host pays it: C code with the inline gates, in a module that the process loads and
 * that is linked to libatropos.so. Each function repeats one thing `n` times; the Rust side takes the time.
 *
 * `bench_off_*` run with the gate closed. The volatile word keeps the compiler from dropping or merging loops whose gate
 * it could otherwise prove closed. */
#include <atropos_trace.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static atropos_task_t task;
static atropos_resource_t resource;

int bench_init(const char *text) {
  atropos_config c;
  memset(&c, 0, sizeof c);
  c.size = sizeof c;
  c.text = text;
  int code = atropos_init(&c);
  if (code) return code;
  resource = atropos_resource_register("bench lock", ATROPOS_LOCK);
  task = atropos_create_cancel(1);
  atropos_request_begin(0);
  return resource ? 0 : -100;
}

int bench_is_tracked(void) { return task != 0 && atropos_trace_is_on(); }

int bench_shutdown(void) {
  atropos_request_end(0);
  atropos_free_cancel(task);
  task = 0;
  return atropos_shutdown();
}

size_t bench_error(char *buf, size_t size) { return atropos_last_error(buf, size); }
int bench_tick(void) { return atropos_controller_tick(); }
size_t bench_stats(char *buf, size_t size) { return atropos_stats(buf, size); }

/* ---- what there is to compare with ---- */

/* An empty loop of the same kind: to be taken off in thought. */
void base_loop(uint64_t n) {
  for (uint64_t i = 0; i < n; i++) __asm__ volatile("" ::: "memory");
}

/* The least that a call into the library can cost: it returns a constant. */
void base_call(uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    (void)atropos_version();
    __asm__ volatile("" ::: "memory");
  }
}

void base_clock_gettime(uint64_t n) {
  struct timespec t;
  for (uint64_t i = 0; i < n; i++) clock_gettime(CLOCK_MONOTONIC, &t);
}

#if defined __x86_64__
void base_rdtsc(uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    uint64_t t = __builtin_ia32_rdtsc();
    __asm__ volatile("" ::"r"(t) : "memory");
  }
}
#endif

/* ---- the hot calls; the memory clobber makes each gate be read anew ---- */

#define LOOP(name, calls)                                       \
  void name(uint64_t n) {                                       \
    const atropos_task_t t = task;                              \
    const atropos_resource_t r = resource;                      \
    (void)t, (void)r;                                           \
    for (uint64_t i = 0; i < n; i++) {                          \
      calls;                                                    \
      __asm__ volatile("" ::: "memory");                        \
    }                                                           \
  }

LOOP(hot_get_free, (atropos_trace_get(r, 1), atropos_trace_free(r, 1)))
LOOP(hot_get_free_on, (atropos_trace_get_on(r, 7, 1), atropos_trace_free_on(r, 7, 1)))
LOOP(hot_wait_get_free, (atropos_trace_wait(r, 1), atropos_trace_get(r, 1), atropos_trace_free(r, 1)))
LOOP(hot_wait_abandoned, (atropos_trace_wait(r, 1), atropos_trace_wait_abandoned(r)))
LOOP(hot_progress, atropos_trace_progress(i, n))
LOOP(hot_cancel_requested, (void)atropos_trace_cancel_requested())
LOOP(hot_request, (atropos_trace_request_begin(0), atropos_trace_request_end(0)))
LOOP(hot_task_get_free, (atropos_trace_task_get(t, r, 7, 1), atropos_trace_task_free(t, r, 7, 1)))
LOOP(hot_task_wait_get_free,
     (atropos_trace_task_wait(t, r, 7, 1), atropos_trace_task_get(t, r, 7, 1), atropos_trace_task_free(t, r, 7, 1)))
LOOP(hot_task_progress, atropos_trace_task_progress(t, i, n))
LOOP(hot_task_cancel_requested, (void)atropos_trace_task_cancel_requested(t))
LOOP(hot_create_free, atropos_trace_free_cancel(atropos_trace_create_cancel(i)))
LOOP(hot_task_create_free, atropos_trace_free_cancel(atropos_trace_task_create(i)))

/* ---- a host with many tasks, for the controller ---- */

static atropos_task_t *crowd;
static size_t crowd_size;

/* `tasks` running requests; each holds `held` of the `resources`. With a stall, all but the first wait for one instance
 * that the first holds. Returns how many resources the library took. */
uint32_t crowd_begin(uint32_t tasks, uint32_t resources, uint32_t held, int stalled) {
  atropos_resource_t ids[64];
  uint32_t known = 0;
  for (; known < resources && known < 64; known++) {
    char name[] = "crowd 00";
    name[6] = (char)('0' + known / 10), name[7] = (char)('0' + known % 10);
    if (!(ids[known] = atropos_resource_register(name, ATROPOS_LOCK + known % 3))) break;
  }
  crowd = (atropos_task_t *)calloc(tasks, sizeof *crowd);
  if (!crowd || !known) return 0;
  for (crowd_size = 0; crowd_size < tasks; crowd_size++) {
    atropos_task_t t = atropos_task_create(crowd_size);
    if (!t) return 0;
    crowd[crowd_size] = t;
    atropos_task_request_begin(t, (uint32_t)crowd_size % 4);
    for (uint32_t i = 0; i < held; i++)
      atropos_task_get_resource(t, ids[(crowd_size + i) % known], 1 + crowd_size % 64, 1);
    if (stalled && crowd_size) atropos_task_slow_by_resource(t, ids[0], 4711, 1);
    else if (stalled) atropos_task_get_resource(t, ids[0], 4711, 1);
  }
  return known;
}

void crowd_end(void) {
  for (size_t i = 0; i < crowd_size; i++) {
    atropos_task_request_end(crowd[i], 0);
    atropos_free_cancel(crowd[i]);
  }
  free(crowd);
  crowd = NULL, crowd_size = 0;
}
