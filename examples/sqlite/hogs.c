/* Parallel requests: units of work from a common counter, and threads that take them until none is left or somebody
 * says stop. Each further thread is attached to the request's task, so that Atropos knows whose CPU time and I/O it is.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "hogs.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server.h"

enum { MIB = 1 << 20, FILE_MIB = 64 }; /* a file is begun again when it is full: the disk must not be */

typedef struct hog {
  const hog_request *request;
  _Atomic uint64_t next, done;
  atomic_bool failed;
  char *cause;
} hog;

typedef struct worker {
  hog *hog;
  pthread_t thread;
  uint32_t number;
} worker;

static bool stopped(const hog *h) { return atomic_load(h->request->stop) || atomic_load(&h->failed); }

static void fail(hog *h, const char *what, const char *why) {
  if (!atomic_exchange(&h->failed, true)) snprintf(h->cause, 160, "%s: %s", what, why);
}

/* True while there is a unit to do. Only the first thread is bound to the task itself: it reports how far all are. */
static bool take(hog *h, uint32_t number, uint64_t *unit) {
  if (number == 0) atropos_progress(atomic_load(&h->done), h->request->units);
  *unit = atomic_fetch_add(&h->next, 1);
  return *unit < h->request->units && !stopped(h);
}

static int on_steps(void *arg) { return stopped(arg); }

static void rank(hog *h, uint32_t number) {
  sqlite3 *db = NULL;
  sqlite3_stmt *query = NULL;
  uint64_t unit;
  if (sqlite3_open_v2(h->request->db_path, &db, SQLITE_OPEN_READONLY | SQLITE_OPEN_NOMUTEX, NULL) != SQLITE_OK ||
      sqlite3_busy_timeout(db, 2000) != SQLITE_OK ||
      sqlite3_prepare_v2(db, "SELECT count(*) FROM journal a JOIN journal b ON b.amount < a.amount WHERE a.account = ?1", -1,
                         &query, NULL) != SQLITE_OK)
    fail(h, "rank", db ? sqlite3_errmsg(db) : "out of memory");
  if (query) sqlite3_progress_handler(db, 2000, on_steps, h);
  while (query && take(h, number, &unit)) {
    sqlite3_bind_int64(query, 1, (sqlite3_int64)(unit % DEMO_ACCOUNTS) + 1);
    int rc = sqlite3_step(query);
    sqlite3_reset(query);
    if (rc == SQLITE_ROW) atomic_fetch_add(&h->done, 1);
    else if (rc != SQLITE_INTERRUPT) fail(h, "rank", sqlite3_errmsg(db));
  }
  sqlite3_finalize(query);
  sqlite3_close(db);
}

static void export_(hog *h, uint32_t number) {
  char path[600], line[64];
  snprintf(path, sizeof path, "%s-export-%u", h->request->db_path, number);
  char *block = malloc(MIB);
  int fd = block ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
  if (fd < 0) fail(h, "export file", strerror(errno));
  else unlink(path); /* whatever happens, nothing is left behind */
  uint64_t unit, position = 0;
  while (fd >= 0 && take(h, number, &unit)) {
    size_t length = (size_t)snprintf(line, sizeof line, "account %08llu; part %08llu\n", (unsigned long long)(unit % DEMO_ACCOUNTS + 1),
                                     (unsigned long long)unit);
    for (size_t at = 0; at < MIB; at += length) memcpy(block + at, line, at + length <= MIB ? length : MIB - at);
    if (pwrite(fd, block, MIB, (off_t)(position % FILE_MIB * MIB)) != MIB || fdatasync(fd) != 0) fail(h, "export file", strerror(errno));
    position++;
    atomic_fetch_add(&h->done, 1);
  }
  if (fd >= 0) close(fd);
  free(block);
}

static void work(hog *h, uint32_t number) { h->request->kind == HOG_RANK ? rank(h, number) : export_(h, number); }

static void *worker_main(void *arg) {
  worker *w = arg;
  atropos_worker_t attached = atropos_task_attach(w->hog->request->task);
  work(w->hog, w->number);
  atropos_task_detach(attached);
  return NULL;
}

hog_result hog_run(const hog_request *request, char cause[160]) {
  hog h = {.request = request, .cause = cause};
  worker *workers = calloc(request->threads, sizeof *workers);
  uint32_t started = 1;
  cause[0] = '\0';
  if (!workers) {
    snprintf(cause, 160, "out of memory");
    return HOG_FAILED;
  }
  for (; started < request->threads; started++) {
    workers[started] = (worker){.hog = &h, .number = started};
    int rc = pthread_create(&workers[started].thread, NULL, worker_main, &workers[started]);
    if (rc != 0) {
      fail(&h, "cannot create a thread", strerror(rc));
      break;
    }
  }
  work(&h, 0);
  for (uint32_t i = 1; i < started; i++) pthread_join(workers[i].thread, NULL);
  free(workers);
  if (atomic_load(&h.failed)) return HOG_FAILED;
  return atomic_load(&h.done) == request->units ? HOG_DONE : HOG_STOPPED;
}
