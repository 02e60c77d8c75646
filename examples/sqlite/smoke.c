/* The server alone, with the library linked but never started, then with mode off: nothing may change for a client.
 * Ends with 0 when all answers are right. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "atropos.h"
#include "server.h"
#include "wire.h"

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

int main(int argc, char **argv) {
  const char *dir = argc > 1 ? argv[1] : ".";
  static const uint32_t MODES[] = {0, ATROPOS_MODE_OFF};
  for (int i = 0; i < 2; i++) {
    pid_t child = fork(); /* one server per process */
    if (child == 0) exit(run_with_mode(MODES[i], dir));
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0) {
      fprintf(stderr, "smoke: failed %s\n", i == 0 ? "without atropos_init" : "with mode off");
      return 1;
    }
  }
  puts("smoke: ok");
  return 0;
}
