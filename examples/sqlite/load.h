/* The load: clients that send on a schedule, whatever the server does. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef DEMO_LOAD_H
#define DEMO_LOAD_H
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* What the huge request takes: the write lock (STATEMENTS), the CPU (RANK) or the disk (EXPORT). The "writers" send what
 * needs it: WRITE, BRANCH or DURABLE. */
typedef enum culprit_kind { CULPRIT_LOCK, CULPRIT_CPU, CULPRIT_IO } culprit_kind;

typedef struct load_options {
  const char *socket_path;
  double seconds;          /* length of the run */
  double onset_s;          /* when the huge request is sent */
  double huge_seconds;     /* how long it shall take if left alone; its size is measured from this */
  uint32_t huge_days;      /* its size, 0: measure */
  culprit_kind culprit;
  uint32_t huge_threads;   /* of RANK and EXPORT */
  uint32_t retry_s;        /* STATEMENTS: cancelled, it may run again within so many seconds; 0: never */
  bool huge;               /* false: a run without it (clean) */
  uint32_t readers, writers;
  double reads_per_s, writes_per_s; /* of all readers, of all writers */
  uint64_t seed;
} load_options;

#define LOAD_BUCKET_S 0.1
typedef struct load_bucket { /* one line of the timeline */
  double reads_per_s, writes_per_s;
  double p50_ms, p99_ms;   /* of the requests that ended in it and the age of those that still wait */
  uint32_t waiting_writers;
} load_bucket;

typedef struct load_result {
  uint32_t huge_days;
  double onset_s;          /* the huge request got the write lock; in a clean run: when it would have been sent */
  /* from the onset to the end of the run: */
  double reads_per_s, writes_per_s;
  double p99_ms, read_p99_ms, write_p99_ms;
  double stall_s;          /* time in which fewer than half as many writes were answered as before the onset */
  double recovered_ms;     /* end of the last such time, from the onset */
  uint64_t given_up;       /* requests whose user left after a second */
  uint64_t victims_cancelled, errors;
  bool huge_cancelled, huge_finished;
  double huge_ran_s;       /* until it ended, or was cancelled */
  bool huge_retried;       /* it was cancelled, and ran again after the load */
  double retry_began_s, retry_ran_s; /* from the onset; its length */
  uint64_t statement_rows; /* rows that the server confirmed */
  char huge_reply[512];    /* "" in a clean run */
  uint32_t buckets;
  load_bucket *timeline;   /* for the caller to free */
} load_result;

/* Runs the load and prints a progress line of JSON every 100 ms to `progress` (NULL: none). 0, or -1 with the cause on stderr. */
int load_run(const load_options *options, FILE *progress, load_result *result);
#endif
