/* The server alone, with the library linked but never started, then with mode off: nothing may change for a client.
 * Then cancels that fly at random moments: none may hit a later request. Ends with 0 when all is right.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "server.c" /* the cancel guard is its own business, but not untested */

#include <sched.h>
#include <sys/wait.h>

static int failures;

static void expect(const char *what, bool ok, const char *seen) {
  if (ok) return;
  failures++;
  fprintf(stderr, "FAILED: %s; seen: %s\n", what, seen);
}

static bool ask(wire *w, const char *request, char *reply) {
  strcpy(reply, "(connection closed)");
  return wire_send(w, "%s", request) && wire_recv(w, reply);
}

static int run_with_mode(uint32_t mode, const char *dir) {
  char db[256], path[100], reply[sizeof((wire *)0)->in];
  snprintf(db, sizeof db, "%s/smoke.db", dir);
  snprintf(path, sizeof path, "%s/smoke.sock", dir);
  server_options options = {.socket_path = path, .db_path = db, .seed = 7, .mode = mode, .slo_ms = 25};
  if (server_start(&options) != 0) return 1;
  wire a = {.fd = socket(AF_UNIX, SOCK_STREAM, 0)}, b = {.fd = socket(AF_UNIX, SOCK_STREAM, 0)};
  struct sockaddr_un address;
  if (!wire_address(&address, path) || connect(a.fd, (struct sockaddr *)&address, sizeof address) != 0 ||
      connect(b.fd, (struct sockaddr *)&address, sizeof address) != 0) {
    perror("connect");
    return 1;
  }
  long long before = 0, after = 0, entries = 0;
  ask(&a, "READ 17", reply);
  expect("READ gives balance and entries", sscanf(reply, "OK %lld %lld", &before, &entries) == 2 && entries == 40, reply);
  ask(&a, "WRITE 17 250", reply);
  expect("WRITE gives the new balance", sscanf(reply, "OK %lld", &after) == 1 && after == before + 250, reply);
  ask(&b, "READ 17", reply);
  expect("another session sees the write", sscanf(reply, "OK %lld %lld", &before, &entries) == 2 && before == after && entries == 41, reply);
  ask(&a, "WRITE 0 1", reply);
  expect("an unknown account is refused", strncmp(reply, "ERR bad-request ", 16) == 0, reply);
  ask(&a, "STATEMENTS 0", reply);
  expect("a size out of range is refused", strncmp(reply, "ERR bad-request ", 16) == 0, reply);
  ask(&a, "READ 1; DROP TABLE account", reply);
  expect("a malformed request is refused", strncmp(reply, "ERR bad-request ", 16) == 0, reply);

  /* A huge transaction holds the lock; a write that comes meanwhile waits for it and then succeeds. */
  const char *huge = "STATEMENTS 30";
  uint64_t sent = now_ns();
  wire_send(&a, "%s", huge);
  while (server_stats_now().huge_locked_ns < sent && now_ns() - sent < 10000000000u) usleep(500);
  ask(&b, "WRITE 17 -250", reply);
  expect("a write behind the huge transaction succeeds", strncmp(reply, "OK ", 3) == 0, reply);
  unsigned long long rows = 0;
  expect("the huge transaction answers", wire_recv(&a, reply) && sscanf(reply, "OK %llu", &rows) == 1 && rows == 30ull * DEMO_ACCOUNTS, reply);
  expect("balances and statements are whole", server_is_consistent(rows), "see above");

  /* Stopped in the middle: everything is rolled back. The request is far larger than
   * what can be done before it is stopped. */
  sent = now_ns();
  wire_send(&a, "STATEMENTS 50000");
  while (server_stats_now().huge_locked_ns < sent && now_ns() - sent < 10000000000u) usleep(500);
  usleep(50000); /* let it write some rows */
  server_interrupt_all();
  expect("a stopped request says so", wire_recv(&a, reply) && strncmp(reply, "ERR stopping ", 13) == 0, reply);
  expect("a stopped transaction leaves nothing", server_is_consistent(rows), "see above");
  close(a.fd);
  close(b.fd);
  server_stop();
  return failures != 0;
}

static struct {
  session *s;
  atomic_bool end;
  _Atomic uint64_t last_delivered; /* the task it was decided for */
  atomic_uint delivered, late;
} fire;

/* Decides to cancel whatever runs now, and acts on it a random while later. */
static void *fire_main(void *arg) {
  (void)arg;
  unsigned random = 1;
  while (!atomic_load(&fire.end)) {
    pthread_mutex_lock(&fire.s->guard);
    atropos_cancel_request request = {.size = sizeof request, .key = fire.s->key, .task = fire.s->task, .scope = fire.s->scope};
    pthread_mutex_unlock(&fire.s->guard);
    if (request.task == 0) continue;
    random = random * 1103515245 + 12345;
    uint64_t until = now_ns() + (random & 0x10000 ? 0 : (random >> 17) % 40000);
    while (now_ns() < until) sched_yield();
    if (on_cancel(&request, NULL) != 0) {
      fire.late++;
      continue;
    }
    atomic_store(&fire.last_delivered, request.task);
    fire.delivered++;
  }
  return NULL;
}

static int run_with_random_cancels(const char *dir) {
  enum { LEAST_REQUESTS = 10000, ENOUGH = 30 };
  char db[256], path[100], seen[160];
  snprintf(db, sizeof db, "%s/smoke.db", dir);
  snprintf(path, sizeof path, "%s/smoke.sock", dir);
  server_options options = {.socket_path = path, .db_path = db, .seed = 7, .mode = ATROPOS_MODE_ENFORCE, .slo_ms = 1000};
  if (server_start(&options) != 0) return 1;
  session *s = fire.s = &S.sessions[DEMO_MAX_SESSIONS - 1];
  pthread_t thread;
  if (!session_open(s) || pthread_create(&thread, NULL, fire_main, NULL) != 0) return 1;
  unsigned stopped = 0, wrong = 0, failed = 0, requests = 0;
  /* Until enough of both kinds were seen, however the machine schedules the two threads. */
  uint64_t deadline = now_ns() + 20000000000u;
  for (; now_ns() < deadline && (requests < LEAST_REQUESTS || stopped < ENOUGH || atomic_load(&fire.late) < ENOUGH); requests++) {
    int64_t out[2];
    request_begin(s, CLASS_READ, "READ");
    int rc = run(s, Q_READ, (int64_t[]){requests % DEMO_ACCOUNTS + 1, 0}, out);
    uint64_t task = s->task;
    request_end(s, rc == SQLITE_OK);
    if (rc == SQLITE_INTERRUPT) {
      /* It may be stopped before the other thread has noted down whom it meant. */
      uint64_t give_up = now_ns() + 2000000000u;
      while (atomic_load(&fire.last_delivered) != task && now_ns() < give_up) sched_yield();
      if (atomic_load(&fire.last_delivered) == task) stopped++;
      else wrong++;
    } else if (rc != SQLITE_OK) {
      failed++;
    }
    if (wrong > 3) break; /* each costs two seconds, and one is enough */
  }
  atomic_store(&fire.end, true);
  pthread_join(thread, NULL);
  snprintf(seen, sizeof seen, "%u requests, %u cancels delivered, %u refused as late; %u requests stopped, %u by another's cancel, %u failed",
           requests, atomic_load(&fire.delivered), atomic_load(&fire.late), stopped, wrong, failed);
  printf("smoke: %s\n", seen);
  expect("a cancel never hits a later request", wrong == 0 && failed == 0, seen);
  expect("enough cancels were late, and enough stopped a request, within 20 s", atomic_load(&fire.late) >= ENOUGH && stopped >= ENOUGH, seen);
  for (int i = 0; i < Q_COUNT; i++) sqlite3_finalize(s->query[i]);
  sqlite3_close(s->db);
  server_stop();
  return failures != 0;
}

int main(int argc, char **argv) {
  const char *dir = argc > 1 ? argv[1] : ".";
  static const char *const NAMES[] = {"without atropos_init", "with mode off", "with cancels at random moments"};
  for (int i = 0; i < 3; i++) {
    pid_t child = fork(); /* one server per process */
    if (child == 0) exit(i < 2 ? run_with_mode(i == 0 ? 0 : ATROPOS_MODE_OFF, dir) : run_with_random_cancels(dir));
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0) {
      fprintf(stderr, "smoke: failed %s\n", NAMES[i]);
      return 1;
    }
  }
  puts("smoke: ok");
  return 0;
}
