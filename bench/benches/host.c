/* What a host pays, measured as a host pays it: C code with the inline gates, in a module that the process loads and
 * that is linked to libatropos.so. Each function repeats one thing `n` times; `bench_loops` lists them, and the Rust side
 * takes the time. With count.c it is a program whose instructions are counted.
 *
 * The loops of the hot calls run with the gate closed, too. The volatile word keeps the compiler from dropping or
 * merging loops whose gate it could otherwise prove closed.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "host.h"
#include <atropos_trace.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined __has_include
#if __has_include(<sys/sdt.h>)
#include <sys/sdt.h>
#define HAVE_USDT 1
#endif
#endif

/* Each thread has its own task, as in a host. */
static __thread atropos_task_t task;
static atropos_resource_t resource;

int bench_init(const char *text) {
  atropos_config c;
  memset(&c, 0, sizeof c);
  c.size = sizeof c;
  c.text = text;
  int code = atropos_init(&c);
  if (code) return code;
  resource = atropos_resource_register("bench lock", ATROPOS_LOCK);
  bench_thread_begin();
  return resource ? 0 : -100;
}

void bench_thread_begin(void) {
  task = atropos_create_cancel(1);
  atropos_request_begin(0);
}

void bench_thread_end(void) {
  atropos_request_end(0);
  atropos_free_cancel(task);
  task = 0;
}

int bench_is_tracked(void) { return task != 0 && atropos_trace_is_on(); }

int bench_shutdown(void) {
  bench_thread_end();
  return atropos_shutdown();
}

size_t bench_error(char *buf, size_t size) { return atropos_last_error(buf, size); }
int bench_tick(void) { return atropos_controller_tick(); }
size_t bench_stats(char *buf, size_t size) { return atropos_stats(buf, size); }

/* ---- what there is to compare with ---- */

#define BASE(name, what)                                        \
  static void base_##name(uint64_t n) {                         \
    for (uint64_t i = 0; i < n; i++) {                          \
      what;                                                     \
      __asm__ volatile("" ::: "memory");                        \
    }                                                           \
  }

static uint64_t shared_word;
static struct timespec now;

/* An empty loop of the same kind: to be taken off in thought. */
BASE(loop, )
BASE(relaxed_store, __atomic_store_n(&shared_word, i, __ATOMIC_RELAXED))
BASE(fetch_add, __atomic_fetch_add(&shared_word, 1, __ATOMIC_RELAXED))
/* The least that a call into the library can cost: it returns a constant. */
BASE(library_call, (void)atropos_version())
BASE(clock_gettime, clock_gettime(CLOCK_MONOTONIC, &now))
#if defined __x86_64__
BASE(rdtsc, __asm__ volatile("" ::"r"(__builtin_ia32_rdtsc())))
#endif

/* ---- what a host could use instead ---- */

#ifdef HAVE_USDT
/* Two probes that nobody listens to: they tell an observer what happened, and keep nothing. */
static void peer_usdt_get_free(uint64_t n) {
  const atropos_resource_t r = resource;
  for (uint64_t i = 0; i < n; i++) {
    DTRACE_PROBE2(bench, get, r, 1);
    DTRACE_PROBE2(bench, free, r, 1);
    __asm__ volatile("" ::: "memory");
  }
}
#endif

/* ---- the hot calls; the memory clobber makes each gate be read anew ---- */

#define LOOP(name, calls)                                       \
  static void name(uint64_t n) {                                       \
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

const bench_loop bench_loops[] = {
    {"base", "loop", base_loop, 1},
    {"base", "relaxed_store", base_relaxed_store, 1},
    {"base", "fetch_add", base_fetch_add, 1},
    {"base", "library_call", base_library_call, 1},
#if defined __x86_64__
    {"base", "rdtsc", base_rdtsc, 1},
#endif
    {"base", "clock_gettime", base_clock_gettime, 1},
#ifdef HAVE_USDT
    {"peer", "usdt_get_free", peer_usdt_get_free, 2},
#endif
    {"peer", "map_get_free", peer_map_get_free, 2},
    {"peer", "map_wait_get_free", peer_map_wait_get_free, 3},
#define HOT(name, calls) {"hot", #name, hot_##name, calls}
    HOT(get_free, 2), HOT(get_free_on, 2), HOT(wait_get_free, 3), HOT(wait_abandoned, 2), HOT(progress, 1),
    HOT(cancel_requested, 1), HOT(request, 2), HOT(task_get_free, 2), HOT(task_wait_get_free, 3), HOT(task_progress, 1),
    HOT(task_cancel_requested, 1),
    /* Begin and end together are one. */
    HOT(create_free, 1), HOT(task_create_free, 1),
    {NULL, NULL, NULL, 0},
};

/* ---- several threads at once ---- */

typedef struct {
  void (*run)(uint64_t);
  uint64_t rounds;
  pthread_barrier_t *start;
  double cpu_ns;
} one_thread;

static double thread_cpu_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *run_thread(void *arg) {
  one_thread *me = (one_thread *)arg;
  bench_thread_begin();
  me->run(me->rounds / 16 + 1); /* warm */
  pthread_barrier_wait(me->start);
  double begin = thread_cpu_ns();
  me->run(me->rounds);
  me->cpu_ns = thread_cpu_ns() - begin;
  bench_thread_end();
  return NULL;
}

/* Each of `threads` makes `rounds` rounds, all at once. CPU time of a thread in ns, on average; < 0: no threads. */
double bench_on_threads(void (*run)(uint64_t), unsigned threads, uint64_t rounds) {
  pthread_t ids[64];
  one_thread each[64];
  pthread_barrier_t start;
  if (threads == 0 || threads > 64 || pthread_barrier_init(&start, NULL, threads)) return -1;
  double sum = 0;
  for (unsigned i = 0; i < threads; i++) {
    each[i] = (one_thread){run, rounds, &start, 0};
    if (pthread_create(&ids[i], NULL, run_thread, &each[i])) abort(); /* the others wait at the barrier for good */
  }
  for (unsigned i = 0; i < threads; i++) {
    pthread_join(ids[i], NULL);
    sum += each[i].cpu_ns;
  }
  pthread_barrier_destroy(&start);
  return sum / threads;
}
