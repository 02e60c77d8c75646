/* Checks and small helpers of the test programs. A failed check prints what, where and the library's last error
 * text, and ends the process: in a forked child, too, whose parent looks at the exit status. */
#ifndef CHECK_H
#define CHECK_H
#include <atropos.h>
#include <atropos_trace.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define UNUSED __attribute__((unused))

/* CHECK_NO_LIBRARY: a program that is not linked to the library. */
static const char *last_error(void) {
  static __thread char text[1024];
#ifndef CHECK_NO_LIBRARY
  atropos_last_error(text, sizeof text);
#endif
  return text;
}

static void check_failed(const char *file, int line, const char *what) {
  fprintf(stderr, "%s:%d: pid %d: check failed: %s\n  last error text: \"%s\"\n", file, line, (int)getpid(), what,
          last_error());
  fflush(NULL);
  _exit(1);
}

#define CHECK(condition) ((condition) ? (void)0 : check_failed(__FILE__, __LINE__, #condition))

/* Integers: shows both values. */
#define CHECK_EQ(got, want)                                                                           \
  do {                                                                                                \
    long long got_ = (long long)(got), want_ = (long long)(want);                                     \
    if (got_ != want_) {                                                                              \
      fprintf(stderr, "  %s is %lld, not %lld\n", #got, got_, want_);                                 \
      check_failed(__FILE__, __LINE__, #got " == " #want);                                            \
    }                                                                                                 \
  } while (0)

#define CHECK_HAS(text, part)                                                                         \
  do {                                                                                                \
    const char *text_ = (text), *part_ = (part);                                                      \
    if (!strstr(text_, part_)) {                                                                      \
      fprintf(stderr, "  no \"%s\" in: %s\n", part_, text_);                                          \
      check_failed(__FILE__, __LINE__, #text " has " #part);                                          \
    }                                                                                                 \
  } while (0)

UNUSED static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

UNUSED static void pause_ms(unsigned ms) {
  struct timespec t = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000L};
  nanosleep(&t, NULL);
}

/* Polls a condition; a condition that does not come true in time is a failure, so no pause hides a race. */
#define WAIT_FOR(seconds, condition)                                                                  \
  do {                                                                                                \
    uint64_t end_ = now_ns() + (uint64_t)(seconds) * 1000000000u;                                     \
    while (!(condition)) {                                                                            \
      if (now_ns() > end_) check_failed(__FILE__, __LINE__, "within " #seconds " s: " #condition);    \
      pause_ms(2);                                                                                    \
    }                                                                                                 \
  } while (0)

UNUSED static atropos_config config_of(const char *text) {
  atropos_config c;
  memset(&c, 0, sizeof c);
  c.size = sizeof c;
  c.text = text;
  return c;
}

UNUSED static void init_with(const char *text) {
  atropos_config c = config_of(text);
  CHECK_EQ(atropos_init(&c), ATROPOS_OK);
}

/* Statistics as text; the caller frees it. The text may grow between asking for its length and asking for it. */
UNUSED static char *stats(void) {
  for (size_t size = atropos_stats(NULL, 0) + 4096;; size *= 2) {
    char *text = (char *)malloc(size);
    CHECK(text != NULL);
    size_t length = atropos_stats(text, size);
    if (length < size) {
      CHECK_EQ(strlen(text), length);
      return text;
    }
    free(text);
  }
}

/* The value of the first "name": in a JSON text, or -1. Enough for texts whose names do not repeat. */
UNUSED static double json_number(const char *json, const char *name) {
  char quoted[96];
  snprintf(quoted, sizeof quoted, "\"%s\":", name);
  const char *at = strstr(json, quoted);
  return at ? strtod(at + strlen(quoted), NULL) : -1;
}

/* A number in the statistics; a missing name is a failure. */
UNUSED static double stat_number(const char *name) {
  char *text = stats();
  double value = json_number(text, name);
  if (value < 0) fprintf(stderr, "  no \"%s\" in: %s\n", name, text);
  CHECK(value >= 0);
  free(text);
  return value;
}

/* The object of the task with this key in the statistics (to be freed), or NULL. */
UNUSED static char *task_in_stats(uint64_t key) {
  char quoted[64];
  snprintf(quoted, sizeof quoted, "\"key\":%" PRIu64, key);
  char *text = stats(), *found = NULL;
  for (char *at = strstr(text, quoted); at && !found; at = strstr(at + 1, quoted)) {
    char after = at[strlen(quoted)];
    if (after >= '0' && after <= '9') continue;
    char *begin = at;
    while (begin > text && *begin != '{') begin--;
    int depth = 0;
    char *end = begin;
    do depth += (*end == '{') - (*end == '}');
    while (depth > 0 && *++end);
    found = strndup(begin, (size_t)(end - begin) + 1);
  }
  free(text);
  return found;
}

UNUSED static int task_is_listed(uint64_t key) {
  char *task = task_in_stats(key);
  free(task);
  return task != NULL;
}

/* 1 when the resource is named in this list of the task. */
UNUSED static int task_lists(uint64_t key, const char *list, const char *resource) {
  char *task = task_in_stats(key), *begin = task ? strstr(task, list) : NULL;
  int found = 0;
  if (begin) {
    char *end = strchr(begin, ']'), *name = strstr(begin, resource);
    found = name && end && name < end;
  }
  free(task);
  return found;
}

UNUSED static int task_holds(uint64_t key, const char *resource) { return task_lists(key, "\"holds\":[", resource); }
UNUSED static int task_waits(uint64_t key, const char *resource) { return task_lists(key, "\"waits\":[", resource); }

UNUSED static void count_decision(const char *json, void *arg) {
  CHECK(json[0] == '{' && json[strlen(json) - 1] == '}');
  if (getenv("SHOW")) printf("%s\n", json);
  ++*(int *)arg;
}

UNUSED static int decisions(void) {
  int n = 0;
  CHECK(atropos_decisions(count_decision, &n) >= 0);
  return n;
}

/* Waits for a child and takes its failure over. */
UNUSED static void join_child(pid_t child) {
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fprintf(stderr, "  child %d: wait status %#x\n", (int)child, status);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Two-way signal between parent and child: each reads what the other wrote. */
typedef struct {
  int to_child[2], to_parent[2];
} talk;

UNUSED static void talk_open(talk *t) { CHECK(pipe(t->to_child) == 0 && pipe(t->to_parent) == 0); }

UNUSED static void say(int fd, uint64_t value) { CHECK_EQ(write(fd, &value, sizeof value), sizeof value); }

UNUSED static uint64_t hear(int fd) {
  uint64_t value = 0;
  CHECK_EQ(read(fd, &value, sizeof value), sizeof value);
  return value;
}
#endif
