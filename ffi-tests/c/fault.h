/* What the fault scenarios share: children that are killed at random moments, a controller driven by the test itself,
 * and memory that survives whoever wrote into it. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef FAULT_H
#define FAULT_H
#include "check.h"
#include <stdatomic.h>
#include <sys/mman.h>

/* For stage.h: nobody whom a busy machine passes over for a while, lock in hand, is taken for a culprit. */
#define CALM_STAGE_CONFIG "slo_ms = 200\nwindow_ms = 200\ntrigger_windows = 3\ncancel_burst = 4\n"

/* Another seed in each run, printed first: a failure names the run it belongs to. */
UNUSED static uint64_t fault_seed;

UNUSED static unsigned random_below(unsigned limit) {
  if (!fault_seed) {
    fault_seed = now_ns() | 1;
    printf("seed %" PRIu64 "\n", fault_seed);
  }
  fault_seed ^= fault_seed << 13, fault_seed ^= fault_seed >> 7, fault_seed ^= fault_seed << 17;
  return (unsigned)(fault_seed >> 33) % limit;
}

UNUSED static void pause_us(unsigned us) {
  struct timespec t = {0, (long)us * 1000L};
  nanosleep(&t, NULL);
}

/* Zeroed memory that children share. */
UNUSED static void *shared_memory(size_t size) {
  void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  return memory;
}

/* A child that runs `body` and ends with 0. */
UNUSED static pid_t child_that(void (*body)(void *), void *arg) {
  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    body(arg);
    fflush(NULL);
    _exit(0);
  }
  return child;
}

/* kill -9, and waited for: its pid is gone afterwards. A child that had failed before is a failure. */
UNUSED static void kill_child(pid_t child) {
  int status = 0;
  CHECK_EQ(kill(child, SIGKILL), 0);
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* Drives the controller until the condition holds; that it never does is a failure. */
#define TICK_UNTIL(seconds, condition)                                                                \
  do {                                                                                                \
    uint64_t end_ = now_ns() + (uint64_t)(seconds) * 1000000000u;                                     \
    while (!(condition)) {                                                                            \
      if (now_ns() > end_) check_failed(__FILE__, __LINE__, "within " #seconds " s: " #condition);    \
      int code_ = atropos_controller_tick();                                                          \
      CHECK(code_ == ATROPOS_OK || code_ == ATROPOS_E_NOT_LEADER);                                    \
      pause_ms(2);                                                                                    \
    }                                                                                                 \
  } while (0)

UNUSED static void tick_for_ms(unsigned ms) {
  uint64_t end = now_ns() + (uint64_t)ms * 1000000u;
  TICK_UNTIL(60, now_ns() >= end);
}

/* A line of /proc/self/status in kB. */
UNUSED static long status_kb(const char *name) {
  FILE *f = fopen("/proc/self/status", "r");
  CHECK(f != NULL);
  char line[256];
  long kb = -1;
  size_t length = strlen(name);
  while (kb < 0 && fgets(line, sizeof line, f))
    if (strncmp(line, name, length) == 0 && line[length] == ':') kb = strtol(line + length + 1, NULL, 10);
  fclose(f);
  CHECK(kb >= 0);
  return kb;
}
#endif
