/* Inline gates over the hot calls of atropos.h.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A server calls these at its trace points. While Atropos is off (mode = off, before atropos_init, after
 * atropos_shutdown) each costs two loads and one branch that the processor predicts; while it is on they
 * call the function of the same meaning in atropos.h, where parameters and answers are described.
 *
 * The gate is one word in the region, so turning Atropos off in one process closes it in all of them.
 * What was acquired or waited for before the gate closed is void when it opens again: releases in between
 * were not seen.
 *
 * C11 and C++17 with GCC or Clang (__atomic and __builtin_expect are theirs).
 */
#ifndef ATROPOS_TRACE_H
#define ATROPOS_TRACE_H

#include "atropos.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Points to the gate word of this process: a constant zero outside init .. shutdown, else a word of the
 * region. Only the library writes it; read it through atropos_trace_is_on(). */
extern const uint32_t *atropos_gate;

/* 1 while the hot calls have an effect. Relaxed: a trace point that sees a change late by a few
 * nanoseconds is one of those that ran just before it. */
static inline int atropos_trace_is_on(void) {
  const uint32_t *word = __atomic_load_n(&atropos_gate, __ATOMIC_RELAXED);
  return __builtin_expect(__atomic_load_n(word, __ATOMIC_RELAXED) != 0, 0);
}

/* ---- tasks ---- */

/* 0 (untracked) while off. */
static inline atropos_task_t atropos_trace_create_cancel(uint64_t key) {
  return atropos_trace_is_on() ? atropos_create_cancel(key) : 0;
}

static inline atropos_task_t atropos_trace_task_create(uint64_t key) {
  return atropos_trace_is_on() ? atropos_task_create(key) : 0;
}

/* Not behind the gate: a task that began while it was open must end when it is closed, too. */
static inline void atropos_trace_free_cancel(atropos_task_t task) {
  if (task) atropos_free_cancel(task);
}

/* ---- requests ---- */

static inline void atropos_trace_request_begin(uint32_t class_) {
  if (atropos_trace_is_on()) atropos_request_begin(class_);
}

static inline void atropos_trace_request_end(int32_t status) {
  if (atropos_trace_is_on()) atropos_request_end(status);
}

static inline void atropos_trace_task_request_begin(atropos_task_t t, uint32_t class_) {
  if (atropos_trace_is_on()) atropos_task_request_begin(t, class_);
}

static inline void atropos_trace_task_request_end(atropos_task_t t, int32_t status) {
  if (atropos_trace_is_on()) atropos_task_request_end(t, status);
}

/* Not behind the gate: what began while it was open must end when it is closed, too. */
static inline void atropos_trace_task_leave(atropos_task_t t, int32_t status) {
  if (t) atropos_task_leave(t, status);
}

static inline void atropos_trace_task_client_wait(atropos_task_t t, int32_t on) {
  if (atropos_trace_is_on()) atropos_task_client_wait(t, on);
}

/* ---- resources, on the task bound to this thread ---- */

static inline void atropos_trace_get(atropos_resource_t r, uint64_t amount) {
  if (atropos_trace_is_on()) atropos_get_resource(r, amount);
}

static inline void atropos_trace_free(atropos_resource_t r, uint64_t amount) {
  if (atropos_trace_is_on()) atropos_free_resource(r, amount);
}

static inline void atropos_trace_wait(atropos_resource_t r, uint64_t amount) {
  if (atropos_trace_is_on()) atropos_slow_by_resource(r, amount);
}

static inline void atropos_trace_get_on(atropos_resource_t r, uint64_t instance, uint64_t amount) {
  if (atropos_trace_is_on()) atropos_get_resource_on(r, instance, amount);
}

static inline void atropos_trace_free_on(atropos_resource_t r, uint64_t instance, uint64_t amount) {
  if (atropos_trace_is_on()) atropos_free_resource_on(r, instance, amount);
}

static inline void atropos_trace_wait_on(atropos_resource_t r, uint64_t instance, uint64_t amount) {
  if (atropos_trace_is_on()) atropos_slow_by_resource_on(r, instance, amount);
}

static inline void atropos_trace_wait_abandoned(atropos_resource_t r) {
  if (atropos_trace_is_on()) atropos_wait_abandoned(r);
}

static inline void atropos_trace_evicted(atropos_resource_t r, uint64_t amount) {
  if (atropos_trace_is_on()) atropos_evicted(r, amount);
}

static inline void atropos_trace_progress(uint64_t done, uint64_t total) {
  if (atropos_trace_is_on()) atropos_progress(done, total);
}

static inline void atropos_trace_blocked_by(atropos_resource_t r, atropos_task_t blocker) {
  if (atropos_trace_is_on()) atropos_blocked_by(r, blocker);
}

static inline void atropos_trace_queue_observed(atropos_resource_t r, uint64_t waiting, uint64_t oldest_wait_ns) {
  if (atropos_trace_is_on()) atropos_queue_observed(r, waiting, oldest_wait_ns);
}

/* 0 while off. */
static inline int atropos_trace_cancel_requested(void) {
  return atropos_trace_is_on() ? atropos_cancel_requested() : 0;
}

/* ---- the same on an explicit task ---- */

static inline void atropos_trace_task_get(atropos_task_t t, atropos_resource_t r, uint64_t instance, uint64_t amount) {
  if (atropos_trace_is_on()) atropos_task_get_resource(t, r, instance, amount);
}

static inline void atropos_trace_task_free(atropos_task_t t, atropos_resource_t r, uint64_t instance, uint64_t amount) {
  if (atropos_trace_is_on()) atropos_task_free_resource(t, r, instance, amount);
}

static inline void atropos_trace_task_wait(atropos_task_t t, atropos_resource_t r, uint64_t instance, uint64_t amount) {
  if (atropos_trace_is_on()) atropos_task_slow_by_resource(t, r, instance, amount);
}

static inline void atropos_trace_task_wait_abandoned(atropos_task_t t, atropos_resource_t r) {
  if (atropos_trace_is_on()) atropos_task_wait_abandoned(t, r);
}

static inline void atropos_trace_task_progress(atropos_task_t t, uint64_t done, uint64_t total) {
  if (atropos_trace_is_on()) atropos_task_progress(t, done, total);
}

static inline int atropos_trace_task_cancel_requested(atropos_task_t t) {
  return atropos_trace_is_on() ? atropos_task_cancel_requested(t) : 0;
}

static inline void atropos_trace_task_release_all(atropos_task_t t) {
  if (atropos_trace_is_on()) atropos_task_release_all(t);
}

#ifdef __cplusplus
}
#endif

#endif /* ATROPOS_TRACE_H */
