/* What host.c, peer.cpp and count.c share.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef BENCH_HOST_H
#define BENCH_HOST_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* One thing that is done again and again. Groups: base (what there is to compare with), peer (what a host could use
 * instead), hot (the library's calls). */
typedef struct {
  const char *group, *name;
  void (*run)(uint64_t rounds);
  uint64_t calls; /* in each round: times are given per call */
} bench_loop;

/* Ends with a NULL name. */
extern const bench_loop bench_loops[];

/* 0, or the library's code. `text`: its configuration. */
int bench_init(const char *text);
int bench_shutdown(void);
int bench_is_tracked(void);
int bench_tick(void);
/* A task and a request on the calling thread. */
void bench_thread_begin(void);
void bench_thread_end(void);

void peer_map_get_free(uint64_t n);
void peer_map_wait_get_free(uint64_t n);

#ifdef __cplusplus
}
#endif
#endif
