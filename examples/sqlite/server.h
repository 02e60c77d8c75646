/* A small account server on SQLite: one thread and one database connection per client, one line per request.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 *   READ <account>             -> OK <balance> <entries>      light, never waits for a writer (WAL)
 *   WRITE <account> <amount>   -> OK <balance>                light, needs the write lock for about 0.1 ms
 *   STATEMENTS <days> [<s>]    -> OK <rows>                   huge: writes a balance per account and day, ONE transaction;
 *                                                             cancelled, it runs again at a quiet time within <s> seconds
 *   BRANCH <account>           -> OK <entries> <sum>          of 500 accounts: a few ms of CPU
 *   DURABLE <account> <amount> -> OK <balance>                WRITE, answered when it is on the disk
 *   RANK <accounts> <threads>  -> OK <accounts>               huge: compares each entry with all others, in parallel
 *   EXPORT <MiB> <threads>     -> OK <MiB>                    huge: writes files and flushes each MiB, in parallel
 *   anything that fails        -> ERR <code> <words>          bad-request | cancelled | stopping | busy | sql
 */
#ifndef DEMO_SERVER_H
#define DEMO_SERVER_H
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define DEMO_ACCOUNTS 5000
#define DEMO_MAX_SESSIONS 64

typedef struct server_options {
  const char *socket_path;  /* Unix socket, created 0600 */
  const char *db_path;      /* removed and created anew */
  uint64_t seed;            /* of the amounts in the journal */
  uint32_t mode;            /* ATROPOS_MODE_*; 0: never call atropos_init, so every call in here is a no-op */
  double slo_ms;            /* objective for the p99 of all requests */
  const char *config_file;  /* NULL, or an Atropos "key = value" file */
  const char *config_text;  /* NULL, or text of the same form, which wins over the file */
} server_options;

typedef struct server_stats {
  uint64_t huge_locked_ns;   /* the huge transaction got the write lock, or RANK or EXPORT began (CLOCK_MONOTONIC); 0: not yet */
  uint64_t first_cancel_ns;  /* the first request was told to stop; 0: none was */
  uint32_t waiting_writers;  /* in the queue for the write lock now */
  uint64_t huge_cancelled_ns; /* the huge transaction was cancelled and rolled back; 0: it was not */
  uint64_t retry_began_ns;   /* it ran again and got the write lock then; 0: it did not */
  bool retry_waits;          /* it waits to run again */
} server_stats;

/* 0, or -1 with the cause on stderr. One server per process. */
int server_start(const server_options *options);
server_stats server_stats_now(void);
/* Stops the requests that still run, or wait to run again: their clients get "ERR stopping". Connections stay open. */
void server_interrupt_all(void);
/* The balances equal the journal, and the statements are exactly these many rows. */
bool server_is_consistent(uint64_t expected_statement_rows);
/* Call when the clients have hung up. Ends sessions, controller and library. */
void server_stop(void);

static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
#endif
