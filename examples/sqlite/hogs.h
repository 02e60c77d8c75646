/* Requests that take more than their share of the machine, on threads of their own.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef DEMO_HOGS_H
#define DEMO_HOGS_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "atropos.h"

typedef enum hog_kind {
  HOG_RANK,   /* CPU: the rank of each journal entry among all, account by account; reads only */
  HOG_EXPORT, /* block I/O: writes MiB after MiB to files beside the database, each of them flushed to the disk */
} hog_kind;

typedef struct hog_request {
  hog_kind kind;
  uint64_t units;          /* accounts to rank, or MiB to write */
  uint32_t threads;        /* at least 1; the calling thread is one of them */
  const char *db_path;
  atropos_task_t task;     /* bound to the calling thread; the others are attached to it */
  const atomic_bool *stop; /* set by whoever cancels */
} hog_request;

typedef enum hog_result { HOG_DONE, HOG_STOPPED, HOG_FAILED } hog_result;

/* Returns when all threads have ended; `cause` in words when it failed. */
hog_result hog_run(const hog_request *request, char cause[160]);

#endif
