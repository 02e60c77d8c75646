/* The server: sessions, SQLite, and everything that an integration of Atropos needs (see README.md).
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "server.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "atropos.h"
#include "hogs.h"
#include "wire.h"

enum { CLASS_READ, CLASS_WRITE, CLASS_HUGE, CLASS_BRANCH };
enum { Q_READ, Q_BRANCH, Q_BEGIN, Q_CREDIT, Q_JOURNAL, Q_STATEMENTS, Q_COMMIT, Q_ROLLBACK, Q_COUNT };

static const char *const QUERIES[Q_COUNT] = {
  [Q_READ] = "SELECT balance, (SELECT count(*) FROM journal WHERE account = ?1) FROM account WHERE id = ?1",
  [Q_BRANCH] = "SELECT count(*), sum(amount) FROM journal WHERE account BETWEEN ?1 AND ?1 + 499",
  /* IMMEDIATE takes the write lock here and not at the first write, where it could not be waited for safely. */
  [Q_BEGIN] = "BEGIN IMMEDIATE",
  [Q_CREDIT] = "UPDATE account SET balance = balance + ?2 WHERE id = ?1 RETURNING balance",
  [Q_JOURNAL] = "INSERT INTO journal(account, day, amount) VALUES (?1, 40, ?2)",
  [Q_STATEMENTS] =
    "WITH RECURSIVE days(day) AS (SELECT 1 UNION ALL SELECT day + 1 FROM days WHERE day < ?1) "
    "INSERT INTO statement(account, day, balance) "
    "SELECT account.id, days.day, "
    "(SELECT coalesce(sum(j.amount) FILTER (WHERE j.day <= days.day), 0) FROM journal j WHERE j.account = account.id) "
    "FROM days CROSS JOIN account",
  [Q_COMMIT] = "COMMIT",
  [Q_ROLLBACK] = "ROLLBACK",
};

typedef struct session {
  uint64_t key; /* index + 1: what Atropos hands back to name the session */
  wire wire;
  pthread_t thread;
  _Atomic int state; /* 0 free, 1 in use, 2 ended and to be joined */
  sqlite3 *db;
  sqlite3_stmt *query[Q_COUNT];
  uint64_t rows_done, rows_expected;
  int log_fd;  /* SQLite's log, for DURABLE; -1: not opened yet */
  bool waits;  /* a wait for the write lock has been reported and not ended */

  /* Orders "cancel this request" against "this request has ended": under `guard`, `task` and `scope` name the
   * request that runs, and `interruptible` says whether it may still be stopped. */
  pthread_mutex_t guard;
  atropos_task_t task;
  uint64_t scope;
  bool interruptible;
  atropos_task_t waits_to_retry; /* a cancelled request that may run again; under `guard` */
  atomic_bool stop;
} session;

static struct {
  int listener;
  char db_path[512], socket_path[108];
  pthread_t acceptor, checkpointer;
  atomic_bool stopping, draining;
  bool with_atropos;
  session sessions[DEMO_MAX_SESSIONS];
  atropos_resource_t write_lock;
  _Atomic uint64_t huge_locked_ns, first_cancel_ns, huge_cancelled_ns, retry_began_ns;
} S;

/* ---- the queue of writers ------------------------------------------------------------------------------------
 * SQLite lets one connection write at a time, and its busy handler only polls: a writer sleeps up to 100 ms at a
 * time and whoever happens to wake first wins. A server that has all writers in its own process knows better, so
 * they queue here first-come-first-served, and the turn is handed over. BEGIN IMMEDIATE then meets an open lock,
 * unless another process writes to the same file: that wait is the busy handler's, and is reported the same way. */
typedef struct waiter {
  pthread_cond_t turn;
  bool granted;
  struct waiter *next;
} waiter;

static struct {
  pthread_mutex_t mutex;
  bool busy;
  waiter *head, **tail;
  uint32_t waiting;
} W = {.mutex = PTHREAD_MUTEX_INITIALIZER, .tail = &W.head};

static void wait_begins(session *s) {
  if (!s->waits) atropos_slow_by_resource(S.write_lock, 1);
  s->waits = true;
}

static void wait_given_up(session *s) {
  if (s->waits) atropos_wait_abandoned(S.write_lock);
  s->waits = false;
}

/* False: told to stop while waiting; the place in the queue is given up. */
static bool writers_enter(session *s) {
  pthread_mutex_lock(&W.mutex);
  bool mine = !W.busy;
  if (mine) {
    W.busy = true;
  } else {
    waiter w = {.granted = false};
    pthread_cond_init(&w.turn, NULL);
    wait_begins(s);
    *W.tail = &w;
    W.tail = &w.next;
    W.waiting++;
    while (!w.granted && !atomic_load(&s->stop)) pthread_cond_wait(&w.turn, &W.mutex);
    mine = w.granted;
    if (!mine) {
      waiter **at = &W.head;
      while (*at != &w) at = &(*at)->next;
      *at = w.next;
      if (W.tail == &w.next) W.tail = at;
      W.waiting--;
    }
    pthread_cond_destroy(&w.turn);
  }
  pthread_mutex_unlock(&W.mutex);
  if (!mine) {
    wait_given_up(s);
    atropos_task_cancel_acknowledge(s->task, s->scope);
  }
  return mine;
}

static void writers_leave(void) {
  pthread_mutex_lock(&W.mutex);
  waiter *next = W.head;
  W.busy = next != NULL;
  if (next) {
    W.head = next->next;
    if (!W.head) W.tail = &W.head;
    W.waiting--;
    next->granted = true;
    pthread_cond_signal(&next->turn);
  }
  pthread_mutex_unlock(&W.mutex);
}

static void writers_wake_all(void) {
  pthread_mutex_lock(&W.mutex);
  for (waiter *w = W.head; w; w = w->next) pthread_cond_signal(&w->turn);
  pthread_mutex_unlock(&W.mutex);
}

/* ---- cancelling ------------------------------------------------------------------------------------------- */
static void note_cancel(void) {
  uint64_t none = 0;
  atomic_compare_exchange_strong(&S.first_cancel_ns, &none, now_ns());
}

/* With s->guard held. */
static void stop_request(session *s) {
  atomic_store(&s->stop, true);
  sqlite3_interrupt(s->db);
}

/* The controller's thread calls this. The request may have ended a moment ago and the same session may run the
 * next one: only the request that the decision was made for is stopped. */
static int on_cancel(const atropos_cancel_request *request, void *arg) {
  (void)arg;
  if (request->key == 0 || request->key > DEMO_MAX_SESSIONS) return -1;
  session *s = &S.sessions[request->key - 1];
  pthread_mutex_lock(&s->guard);
  bool same = request->task != 0 && s->task == request->task && s->scope == request->scope && s->interruptible;
  if (same) {
    note_cancel();
    stop_request(s);
  }
  pthread_mutex_unlock(&s->guard);
  if (same) writers_wake_all(); /* it may be one of those that still wait */
  return same ? 0 : -1;
}

/* SQLite calls this every few thousand steps of a statement: report how far it is, and ask whether to go on. The
 * answer reaches statements that began right after sqlite3_interrupt, which that call alone would miss. */
static int on_progress(void *arg) {
  session *s = arg;
  if (!s->interruptible) return 0; /* only this thread writes it */
  if (s->rows_expected) atropos_progress(s->rows_done, s->rows_expected);
  if (atropos_cancel_requested()) {
    note_cancel();
    atomic_store(&s->stop, true);
  }
  return atomic_load(&s->stop);
}

static void on_row(void *arg, int operation, const char *db, const char *table, sqlite3_int64 row) {
  (void)operation, (void)db, (void)table, (void)row;
  ((session *)arg)->rows_done++;
}

static int on_busy(void *arg, int attempt) {
  session *s = arg;
  if (attempt > 1000 || atomic_load(&s->stop) || atropos_cancel_requested()) return 0;
  wait_begins(s);
  usleep(5000); /* another process holds the file's lock: SQLite offers no way but to ask again */
  return 1;
}

/* ---- requests --------------------------------------------------------------------------------------------- */
static void request_begin(session *s, uint32_t class_, const char *label) {
  atropos_task_t task = atropos_create_cancel(s->key);
  atropos_task_set(task, ATROPOS_TASK_CLASS, class_);
  atropos_task_set(task, ATROPOS_TASK_LABEL, (int64_t)(intptr_t)label);
  s->rows_done = s->rows_expected = 0;
  pthread_mutex_lock(&s->guard);
  s->task = task;
  s->scope = atropos_task_scope(task);
  s->interruptible = true;
  atomic_store(&s->stop, atomic_load(&S.draining));
  pthread_mutex_unlock(&s->guard);
}

/* From here on nobody stops this request: what follows (COMMIT, ROLLBACK) must run to its end. True: it was
 * stopped before. */
static bool point_of_no_return(session *s) {
  atropos_task_set(s->task, ATROPOS_TASK_CANCELLABLE, 0);
  pthread_mutex_lock(&s->guard);
  s->interruptible = false;
  bool stopped = atomic_load(&s->stop);
  pthread_mutex_unlock(&s->guard);
  return stopped;
}

static void request_end(session *s, bool ok) {
  atropos_task_t task = s->task;
  atropos_task_request_end(task, ok ? 0 : -1);
  pthread_mutex_lock(&s->guard);
  s->task = 0;
  s->interruptible = false;
  pthread_mutex_unlock(&s->guard);
  atropos_free_cancel(task);
}

/* Runs a query with up to two integers in; the first row's integers come out when asked for. */
static int run(session *s, int which, const int64_t in[2], int64_t out[2]) {
  sqlite3_stmt *q = s->query[which];
  if (s->interruptible && atomic_load(&s->stop)) return SQLITE_INTERRUPT;
  for (int i = 0; in && i < sqlite3_bind_parameter_count(q); i++) sqlite3_bind_int64(q, i + 1, in[i]);
  int rc, rows = 0;
  while ((rc = sqlite3_step(q)) == SQLITE_ROW)
    if (rows++ == 0 && out)
      for (int i = 0; i < sqlite3_column_count(q) && i < 2; i++) out[i] = sqlite3_column_int64(q, i);
  rc = rc == SQLITE_DONE ? SQLITE_OK : rc;
  int reset = sqlite3_reset(q);
  if (reset != SQLITE_OK) rc = reset;
  /* Before the rollback: the controller wants to know that the request obeys, not how long it cleans up. */
  if (rc == SQLITE_INTERRUPT) atropos_task_cancel_acknowledge(s->task, s->scope);
  if (rc != SQLITE_OK) return rc;
  return out && rows == 0 ? SQLITE_NOTFOUND : SQLITE_OK;
}

/* SQLITE_OK: the write lock is held, and Atropos knows. Else nothing is held. */
static int transaction_begin(session *s) {
  if (!writers_enter(s)) return SQLITE_INTERRUPT;
  int rc = run(s, Q_BEGIN, NULL, NULL);
  if (rc != SQLITE_OK) {
    wait_given_up(s);
    writers_leave();
    return rc;
  }
  atropos_get_resource(S.write_lock, 1); /* ends the wait, if there was one */
  s->waits = false;
  return SQLITE_OK;
}

/* Commits when all went well so far, else rolls back; the write lock is free afterwards. */
static int transaction_end(session *s, int rc) {
  if (point_of_no_return(s) && rc == SQLITE_OK) rc = SQLITE_INTERRUPT;
  if (rc == SQLITE_OK) rc = run(s, Q_COMMIT, NULL, NULL);
  /* An interrupted write has rolled back by itself already. */
  if (!sqlite3_get_autocommit(s->db)) run(s, Q_ROLLBACK, NULL, NULL);
  atropos_free_resource(S.write_lock, 1);
  writers_leave();
  return rc;
}

/* What the client of the request that runs is told. True: the request was cancelled by Atropos. */
static bool error_text(session *s, int rc, const char *cause, char text[400]) {
  const size_t size = 400;
  if (rc == SQLITE_INTERRUPT) {
    atropos_cancel_info info = {.size = sizeof info};
    bool cancelled = atropos_task_cancel_info(s->task, &info) == 1;
    if (cancelled)
      snprintf(text, size, "ERR cancelled by Atropos: this request %s; its transaction was rolled back, run it at a "
               "quiet time or in smaller parts", info.reason);
    else
      snprintf(text, size, "ERR stopping the server stops; the transaction was rolled back");
    return cancelled;
  }
  if (rc == SQLITE_NOTFOUND) snprintf(text, size, "ERR bad-request no such account (1..%d)", DEMO_ACCOUNTS);
  else snprintf(text, size, "ERR %s %s", rc == SQLITE_BUSY ? "busy" : "sql", cause);
  return false;
}

static bool reply_error(session *s, int rc, const char *cause) {
  char text[400];
  error_text(s, rc, cause, text);
  return wire_send(&s->wire, "%s", text);
}

/* The cancelled request has ended, its work is undone and nothing was answered yet: may it run again? Until then the
 * session's thread, and its client, wait. */
static bool may_run_again(session *s, atropos_task_t cancelled, int64_t within_s) {
  pthread_mutex_lock(&s->guard);
  s->waits_to_retry = cancelled;
  bool draining = atomic_load(&S.draining);
  pthread_mutex_unlock(&s->guard);
  uint64_t deadline_ns = now_ns() + (uint64_t)within_s * 1000000000u;
  bool again = !draining && atropos_retry_wait(cancelled, deadline_ns) == ATROPOS_RETRY;
  pthread_mutex_lock(&s->guard);
  s->waits_to_retry = 0;
  pthread_mutex_unlock(&s->guard);
  return again;
}

/* A request that is one query of two numbers. */
static bool serve_query(session *s, uint32_t class_, const char *label, int query, int64_t account) {
  int64_t out[2] = {0, 0};
  request_begin(s, class_, label);
  int rc = run(s, query, (int64_t[]){account, 0}, out);
  bool ok = rc == SQLITE_OK ? wire_send(&s->wire, "OK %" PRId64 " %" PRId64, out[0], out[1])
                            : reply_error(s, rc, sqlite3_errmsg(s->db));
  request_end(s, rc == SQLITE_OK);
  return ok;
}

/* The commit is on the disk. After the write lock is free: others write meanwhile, and one flush serves all before it. */
static int log_to_disk(session *s, char *cause, size_t size) {
  char path[sizeof S.db_path + 8];
  snprintf(path, sizeof path, "%s-wal", S.db_path);
  if (s->log_fd < 0) s->log_fd = open(path, O_RDWR | O_CLOEXEC);
  if (s->log_fd >= 0 && fdatasync(s->log_fd) == 0) return SQLITE_OK;
  snprintf(cause, size, "SQLite's log: %s", strerror(errno));
  return SQLITE_IOERR;
}

static bool serve_write(session *s, int64_t account, int64_t amount, bool durable) {
  int64_t balance[2] = {0, 0};
  char cause[160] = "";
  request_begin(s, CLASS_WRITE, "WRITE");
  int rc = transaction_begin(s);
  if (rc == SQLITE_OK) {
    rc = run(s, Q_CREDIT, (int64_t[]){account, amount}, balance);
    if (rc == SQLITE_OK) rc = run(s, Q_JOURNAL, (int64_t[]){account, amount}, NULL);
    snprintf(cause, sizeof cause, "%s", sqlite3_errmsg(s->db));
    rc = transaction_end(s, rc);
    if (rc == SQLITE_OK && durable) rc = log_to_disk(s, cause, sizeof cause);
  }
  bool ok = rc == SQLITE_OK ? wire_send(&s->wire, "OK %" PRId64, balance[0]) : reply_error(s, rc, cause);
  request_end(s, rc == SQLITE_OK);
  return ok;
}

/* One attempt: all of the statements, or none. */
static int write_statements(session *s, int64_t days, bool again, char cause[160]) {
  int rc = transaction_begin(s);
  if (rc != SQLITE_OK) return rc;
  atomic_store(again ? &S.retry_began_ns : &S.huge_locked_ns, now_ns());
  s->rows_expected = (uint64_t)days * DEMO_ACCOUNTS;
  sqlite3_update_hook(s->db, on_row, s);
  rc = run(s, Q_STATEMENTS, (int64_t[]){days, 0}, NULL);
  sqlite3_update_hook(s->db, NULL, NULL);
  snprintf(cause, 160, "%s", sqlite3_errmsg(s->db));
  return transaction_end(s, rc);
}

static bool serve_statements(session *s, int64_t days, int64_t retry_within_s) {
  char label[48], cause[160] = "", error[400];
  snprintf(label, sizeof label, "STATEMENTS %" PRId64 " days", days);
  request_begin(s, CLASS_HUGE, label);
  int rc = write_statements(s, days, false, cause);
  if (rc != SQLITE_OK && error_text(s, rc, cause, error)) {
    atropos_task_t cancelled = s->task;
    atomic_store(&S.huge_cancelled_ns, now_ns());
    request_end(s, false);
    if (retry_within_s == 0 || !may_run_again(s, cancelled, retry_within_s)) return wire_send(&s->wire, "%s", error);
    request_begin(s, CLASS_HUGE, label);
    atropos_task_set(s->task, ATROPOS_TASK_RETRIED, 1); /* nobody cancels it a second time */
    rc = write_statements(s, days, true, cause);
  }
  bool ok = rc == SQLITE_OK ? wire_send(&s->wire, "OK %" PRIu64, s->rows_done) : reply_error(s, rc, cause);
  request_end(s, rc == SQLITE_OK);
  return ok;
}

/* Takes more than its share of the machine. Atropos is told nothing but which threads work for the task. */
static bool serve_hog(session *s, hog_kind kind, int64_t units, int64_t threads) {
  char label[48], cause[160] = "";
  snprintf(label, sizeof label, kind == HOG_RANK ? "RANK %" PRId64 " accounts" : "EXPORT %" PRId64 " MiB", units);
  request_begin(s, CLASS_HUGE, label);
  atomic_store(&S.huge_locked_ns, now_ns());
  hog_request request = {.kind = kind, .units = (uint64_t)units, .threads = (uint32_t)threads, .db_path = S.db_path,
                         .task = s->task, .stop = &s->stop};
  hog_result result = hog_run(&request, cause);
  if (result == HOG_STOPPED) atropos_task_cancel_acknowledge(s->task, s->scope);
  bool ok = result == HOG_DONE ? wire_send(&s->wire, "OK %" PRId64, units)
                               : reply_error(s, result == HOG_STOPPED ? SQLITE_INTERRUPT : SQLITE_ERROR, cause);
  request_end(s, result == HOG_DONE);
  return ok;
}

static bool serve(session *s, const char *line) {
  long long a, b;
  int end = -1;
  if (sscanf(line, "READ %lld %n", &a, &end) == 1 && end >= 0 && !line[end])
    return serve_query(s, CLASS_READ, "READ", Q_READ, a);
  end = -1;
  if (sscanf(line, "WRITE %lld %lld %n", &a, &b, &end) == 2 && end >= 0 && !line[end]) return serve_write(s, a, b, false);
  end = -1;
  if (sscanf(line, "DURABLE %lld %lld %n", &a, &b, &end) == 2 && end >= 0 && !line[end]) return serve_write(s, a, b, true);
  end = -1;
  if (sscanf(line, "BRANCH %lld %n", &a, &end) == 1 && end >= 0 && !line[end])
    return serve_query(s, CLASS_BRANCH, "BRANCH", Q_BRANCH, a);
  bool fits = sscanf(line, "%*s %lld %lld %n", &a, &b, &end) == 2 && a >= 1 && a <= 1000000 && b >= 1 && b <= 256;
  if (fits && end >= 0 && !line[end] && strncmp(line, "RANK ", 5) == 0) return serve_hog(s, HOG_RANK, a, b);
  if (fits && end >= 0 && !line[end] && strncmp(line, "EXPORT ", 7) == 0) return serve_hog(s, HOG_EXPORT, a, b);
  end = -1;
  if (sscanf(line, "STATEMENTS %lld %n", &a, &end) == 1 && end >= 0 && !line[end] && a >= 1 && a <= 100000)
    return serve_statements(s, a, 0);
  end = -1;
  if (sscanf(line, "STATEMENTS %lld %lld %n", &a, &b, &end) == 2 && end >= 0 && !line[end] && a >= 1 && a <= 100000 && b >= 0 && b <= 86400)
    return serve_statements(s, a, b);
  return wire_send(&s->wire, "ERR bad-request want READ <account>, WRITE <account> <amount> or STATEMENTS <days 1..100000>, or one of server.h");
}

/* ---- sessions --------------------------------------------------------------------------------------------- */
static sqlite3 *open_db(void) {
  sqlite3 *db = NULL;
  /* NOMUTEX: each connection is used by its own thread only; sqlite3_interrupt is allowed from any thread. */
  int rc = sqlite3_open_v2(S.db_path, &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, NULL);
  if (rc == SQLITE_OK) {
    /* A connection that closes holds the file for a moment. */
    sqlite3_busy_timeout(db, 2000);
    /* No checkpoint inside a client's commit: the checkpointer's thread does it. */
    rc = sqlite3_exec(db, "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA wal_autocheckpoint = 0",
                      NULL, NULL, NULL);
  }
  if (rc == SQLITE_OK) return db;
  fprintf(stderr, "cannot open the database %s: %s\n", S.db_path, db ? sqlite3_errmsg(db) : "out of memory");
  sqlite3_close(db);
  return NULL;
}

static bool session_open(session *s) {
  if (!(s->db = open_db())) return false;
  for (int i = 0; i < Q_COUNT; i++)
    if (sqlite3_prepare_v3(s->db, QUERIES[i], -1, SQLITE_PREPARE_PERSISTENT, &s->query[i], NULL) != SQLITE_OK) {
      fprintf(stderr, "cannot prepare \"%s\": %s\n", QUERIES[i], sqlite3_errmsg(s->db));
      return false;
    }
  sqlite3_busy_handler(s->db, on_busy, s);
  sqlite3_progress_handler(s->db, 2000, on_progress, s); /* 2000 steps: about 0.1 ms */
  return true;
}

static void *session_main(void *arg) {
  session *s = arg;
  char line[sizeof s->wire.in];
  s->log_fd = -1;
  if (session_open(s))
    while (wire_recv(&s->wire, line) && serve(s, line)) {}
  for (int i = 0; i < Q_COUNT; i++) {
    sqlite3_finalize(s->query[i]);
    s->query[i] = NULL;
  }
  if (s->log_fd >= 0) close(s->log_fd);
  sqlite3_close(s->db);
  close(s->wire.fd);
  atomic_store(&s->state, 2);
  return NULL;
}

static void *acceptor_main(void *arg) {
  (void)arg;
  for (;;) {
    int fd = accept(S.listener, NULL, NULL);
    if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (fd < 0) return NULL; /* shut down by server_stop */
    session *s = NULL;
    for (int i = 0; i < DEMO_MAX_SESSIONS && !s; i++) {
      if (atomic_load(&S.sessions[i].state) == 1) continue;
      s = &S.sessions[i];
      if (atomic_load(&s->state) == 2) pthread_join(s->thread, NULL);
    }
    if (s) {
      s->wire = (wire){.fd = fd};
      atomic_store(&s->state, 1);
      if (pthread_create(&s->thread, NULL, session_main, s) == 0) continue;
      atomic_store(&s->state, 0);
    }
    wire_send(&(wire){.fd = fd}, "ERR busy all %d sessions are in use, try again later", DEMO_MAX_SESSIONS);
    close(fd);
  }
}

/* Moves the log's pages into the database, beside the writers: PASSIVE never waits and never takes the write lock,
 * so there is nothing to report to Atropos. */
static void *checkpointer_main(void *arg) {
  sqlite3 *db = arg;
  while (!atomic_load(&S.stopping)) {
    sqlite3_wal_checkpoint_v2(db, NULL, SQLITE_CHECKPOINT_PASSIVE, NULL, NULL);
    usleep(250000);
  }
  sqlite3_close(db);
  return NULL;
}

/* ---- start and stop --------------------------------------------------------------------------------------- */
static void on_log(int level, const char *message, void *arg) {
  (void)arg;
  if (level <= 2) fprintf(stderr, "atropos: %s\n", message);
}

static int atropos_failed(const char *what) {
  char text[256] = "";
  atropos_last_error(text, sizeof text);
  fprintf(stderr, "%s: %s\n", what, text);
  return -1;
}

static int start_atropos(const server_options *o) {
  atropos_set_log(on_log, NULL);
  atropos_config config = {.size = sizeof config, .file = o->config_file, .text = o->config_text, .mode = o->mode, .slo_ms = o->slo_ms,
                           .window_ms = 50}; /* half the default: requests take well under a millisecond here */
  if (atropos_init(&config) != ATROPOS_OK) return atropos_failed("atropos_init");
  S.with_atropos = true;
  if (!(S.write_lock = atropos_resource_register("sqlite write lock", ATROPOS_LOCK)))
    return atropos_failed("atropos_resource_register(sqlite write lock)");
  if (atropos_set_cancel_action(on_cancel, NULL) != ATROPOS_OK) return atropos_failed("atropos_set_cancel_action");
  if (atropos_controller_start() != ATROPOS_OK) return atropos_failed("atropos_controller_start");
  return 0;
}

static int create_schema(uint64_t seed) {
  sqlite3 *db = open_db();
  if (!db) return -1;
  char sql[1600], *error = NULL;
  snprintf(sql, sizeof sql,
    "BEGIN;"
    "CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER NOT NULL);"
    "CREATE TABLE journal(id INTEGER PRIMARY KEY, account INTEGER NOT NULL, day INTEGER NOT NULL, amount INTEGER NOT NULL);"
    "CREATE TABLE statement(id INTEGER PRIMARY KEY, account INTEGER NOT NULL, day INTEGER NOT NULL, balance INTEGER NOT NULL);"
    "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < %d) "
    "INSERT INTO journal(account, day, amount) SELECT i %% %d + 1, i / %d + 1, (i * 2654435761 + %" PRIu64 ") %% 2001 - 1000 FROM n;"
    "CREATE INDEX journal_account ON journal(account, day, amount);"
    "INSERT INTO account(id, balance) SELECT account, sum(amount) FROM journal GROUP BY account;"
    "COMMIT", DEMO_ACCOUNTS * 40 - 1, DEMO_ACCOUNTS, DEMO_ACCOUNTS, seed % 1000003);
  int rc = sqlite3_exec(db, sql, NULL, NULL, &error);
  if (rc != SQLITE_OK) fprintf(stderr, "cannot fill the database %s: %s\n", S.db_path, error ? error : "?");
  sqlite3_free(error);
  sqlite3_close(db);
  return rc == SQLITE_OK ? 0 : -1;
}

static void remove_files(void) {
  static const char *const SUFFIX[] = {"", "-wal", "-shm"};
  for (int i = 0; i < 3; i++) {
    char path[sizeof S.db_path + 8];
    snprintf(path, sizeof path, "%s%s", S.db_path, SUFFIX[i]);
    unlink(path);
  }
  unlink(S.socket_path);
}

int server_start(const server_options *o) {
  struct sockaddr_un address;
  if (!wire_address(&address, o->socket_path)) return -1;
  snprintf(S.socket_path, sizeof S.socket_path, "%s", o->socket_path);
  if (snprintf(S.db_path, sizeof S.db_path, "%s", o->db_path) >= (int)sizeof S.db_path) {
    fprintf(stderr, "database path too long: %s\n", o->db_path);
    return -1;
  }
  remove_files();
  for (int i = 0; i < DEMO_MAX_SESSIONS; i++) {
    S.sessions[i].key = (uint64_t)i + 1;
    pthread_mutex_init(&S.sessions[i].guard, NULL);
  }
  if (create_schema(o->seed) != 0) return -1;
  if (o->mode != 0 && start_atropos(o) != 0) return -1;
  mode_t mask = umask(0177);
  S.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool listens = S.listener >= 0 && bind(S.listener, (struct sockaddr *)&address, sizeof address) == 0 &&
                 listen(S.listener, DEMO_MAX_SESSIONS) == 0;
  umask(mask);
  sqlite3 *checkpoints = listens ? open_db() : NULL;
  if (!listens) fprintf(stderr, "cannot listen on %s: %s\n", S.socket_path, strerror(errno));
  if (!checkpoints) return -1;
  if (pthread_create(&S.checkpointer, NULL, checkpointer_main, checkpoints) != 0 ||
      pthread_create(&S.acceptor, NULL, acceptor_main, NULL) != 0) {
    fprintf(stderr, "cannot create a thread\n");
    return -1;
  }
  return 0;
}

server_stats server_stats_now(void) {
  pthread_mutex_lock(&W.mutex);
  uint32_t waiting = W.waiting;
  pthread_mutex_unlock(&W.mutex);
  server_stats stats = {.huge_locked_ns = atomic_load(&S.huge_locked_ns), .first_cancel_ns = atomic_load(&S.first_cancel_ns),
                        .waiting_writers = waiting, .huge_cancelled_ns = atomic_load(&S.huge_cancelled_ns),
                        .retry_began_ns = atomic_load(&S.retry_began_ns)};
  for (int i = 0; i < DEMO_MAX_SESSIONS; i++) {
    session *s = &S.sessions[i];
    pthread_mutex_lock(&s->guard);
    stats.retry_waits |= s->waits_to_retry != 0;
    pthread_mutex_unlock(&s->guard);
  }
  return stats;
}

void server_interrupt_all(void) {
  atomic_store(&S.draining, true);
  for (int i = 0; i < DEMO_MAX_SESSIONS; i++) {
    session *s = &S.sessions[i];
    pthread_mutex_lock(&s->guard);
    if (s->interruptible) stop_request(s);
    atropos_retry_give_up(s->waits_to_retry);
    pthread_mutex_unlock(&s->guard);
  }
  writers_wake_all();
}

bool server_is_consistent(uint64_t expected_statement_rows) {
  sqlite3 *db = open_db();
  sqlite3_stmt *q = NULL;
  bool ok = db && sqlite3_prepare_v2(db,
    "SELECT (SELECT count(*) FROM account a WHERE balance IS NOT (SELECT sum(amount) FROM journal WHERE account = a.id)),"
    "       (SELECT count(*) FROM statement), (SELECT * FROM pragma_quick_check(1))", -1, &q, NULL) == SQLITE_OK &&
    sqlite3_step(q) == SQLITE_ROW;
  if (ok) {
    int64_t unequal = sqlite3_column_int64(q, 0);
    uint64_t rows = (uint64_t)sqlite3_column_int64(q, 1);
    const char *check = (const char *)sqlite3_column_text(q, 2);
    ok = unequal == 0 && rows == expected_statement_rows && strcmp(check, "ok") == 0;
    if (!ok)
      fprintf(stderr, "inconsistent: %" PRId64 " balances differ from the journal, %" PRIu64 " statement rows (expected %" PRIu64 "), quick_check: %s\n",
              unequal, rows, expected_statement_rows, check);
  } else {
    fprintf(stderr, "cannot check the database: %s\n", db ? sqlite3_errmsg(db) : "not opened");
  }
  sqlite3_finalize(q);
  sqlite3_close(db);
  return ok;
}

void server_stop(void) {
  atomic_store(&S.stopping, true);
  server_interrupt_all();
  shutdown(S.listener, SHUT_RDWR);
  pthread_join(S.acceptor, NULL);
  close(S.listener);
  for (int i = 0; i < DEMO_MAX_SESSIONS; i++)
    if (atomic_load(&S.sessions[i].state) != 0) pthread_join(S.sessions[i].thread, NULL);
  pthread_join(S.checkpointer, NULL);
  if (S.with_atropos) {
    atropos_controller_stop();
    atropos_shutdown();
  }
  remove_files();
}
