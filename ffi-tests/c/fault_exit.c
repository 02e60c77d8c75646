/* The ways in which a process ends, with threads in the middle of calls: each ends at once and with its own status, and
 * what runs at exit may still use the library. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"
#include <sys/syscall.h>

enum { THREADS = 3, STATUS = 7 };
static atropos_resource_t lock;
static atropos_task_t main_task;
static atomic_long rounds;
static atomic_int main_has_gone;
static int shutdown_at_exit;

static void *busy(void *arg) {
  for (uint64_t i = (uint64_t)(uintptr_t)arg;; i += THREADS) {
    atropos_task_t task = atropos_create_cancel(i);
    atropos_slow_by_resource(lock, 1);
    atropos_get_resource(lock, 1);
    if (i % 32 == 0) free(stats());
    atropos_free_cancel(task);
    atomic_fetch_add(&rounds, 1);
  }
  return NULL;
}

/* Runs when the main thread's thread-local destructors have run already. */
static void at_exit(void) {
  char text[64];
  if (atropos_trace_is_on()) {
    atropos_get_resource(lock, 1);
    atropos_task_t task = atropos_create_cancel(99);
    CHECK(task != 0);
    CHECK(task_holds(1, "lock"));
    atropos_free_cancel(task);
    CHECK_EQ(atropos_controller_start(), ATROPOS_E_ALREADY);
    CHECK(atropos_last_error(text, sizeof text) < 4096);
    atropos_config c = config_of("mode = observe");
    CHECK_EQ(atropos_reload(&c), ATROPOS_OK);
    atropos_free_cancel(main_task);
    if (shutdown_at_exit) CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  } else {
    CHECK_EQ(atropos_create_cancel(99), 0);
    CHECK_EQ(atropos_shutdown(), ATROPOS_E_NOT_INIT);
    CHECK_EQ(atropos_init(NULL), ATROPOS_OK); /* odd, and no harm */
  }
  CHECK_EQ(atropos_create_cancel(98) != 0, atropos_trace_is_on());
}

static int exits(const atropos_cancel_request *req, void *arg) {
  (void)req, (void)arg;
  exit(STATUS);
}

static void start(const char *path) {
  atropos_config c = config_of("mode = enforce\nslo_ms = 1000");
  c.region_path = path;
  CHECK_EQ(atropos_init(&c), ATROPOS_OK);
  lock = atropos_resource_register("lock", ATROPOS_LOCK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  CHECK_EQ(atropos_agent_start(), ATROPOS_OK);
  for (uintptr_t i = 0; i < THREADS; i++) {
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, busy, (void *)(1000 + i)), 0);
  }
  main_task = atropos_create_cancel(1);
  atropos_get_resource(lock, 1);
  WAIT_FOR(20, atomic_load(&rounds) > 200);
}

static void exit_with_handlers(void *how) {
  CHECK_EQ(atexit(at_exit), 0);
  shutdown_at_exit = strcmp((const char *)how, "shutdown at exit") == 0;
  start(NULL);
  if (strcmp((const char *)how, "shutdown before") == 0) CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  exit(STATUS);
}

static void return_from_handler_first(void *arg) {
  (void)arg;
  start(NULL);
  CHECK_EQ(atexit(at_exit), 0); /* registered after the library began: runs before anything of the library's might */
  exit(STATUS);
}

static void quick(void *arg) {
  (void)arg;
  CHECK_EQ(at_quick_exit(at_exit), 0);
  start(NULL);
  quick_exit(STATUS);
}

static void at_once(void *arg) {
  (void)arg;
  CHECK_EQ(atexit(at_exit), 0);
  start(NULL);
  _exit(STATUS);
}

/* exit() called by the controller's own thread, in a callback. */
static void in_callback(void *how) {
  CHECK_EQ(atexit(at_exit), 0);
  shutdown_at_exit = strcmp((const char *)how, "with shutdown") == 0;
  CHECK_EQ(atropos_set_cancel_action(exits, NULL), ATROPOS_OK);
  start(NULL);
  CHECK_EQ(atropos_task_cancel(main_task, 0, "by the test"), ATROPOS_OK);
  for (;;) pause();
}

static void must_end(const char *what, void (*body)(void *), void *arg) {
  pid_t child = child_that(body, arg);
  int status = 0;
  WAIT_FOR(20, waitpid(child, &status, WNOHANG) == child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != STATUS) fprintf(stderr, "  %s: wait status %#x\n", what, status);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == STATUS);
}

/* The first thread ends and the others go on: /proc shows such a process as a zombie, and it lives. */
static pthread_t first_thread;
static atropos_task_t kept;

static void *after_main(void *arg) {
  (void)arg;
  CHECK_EQ(pthread_join(first_thread, NULL), 0);
  atomic_store(&main_has_gone, 1);
  char state[64];
  snprintf(state, sizeof state, "/proc/%d/status", (int)getpid());
  FILE *f = fopen(state, "r");
  CHECK(f != NULL);
  char line[128];
  int zombie = 0;
  while (fgets(line, sizeof line, f)) zombie |= strncmp(line, "State:\tZ", 8) == 0;
  fclose(f);
  CHECK(zombie);
  CHECK(atropos_task_bind(kept) == ATROPOS_OK);
  atropos_get_resource_on(lock, 5, 1);
  /* A leader in another process looks for the dead, thoroughly, all ten seconds. */
  uint64_t end = now_ns() + 12000000000u;
  while (now_ns() < end) {
    CHECK(task_holds(2, "lock"));
    pause_ms(50);
  }
  /* The name of the region is still this host's: who starts now joins it. */
  int status;
  pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "join", "join", (char *)NULL);
    _exit(9);
  }
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_EQ(atropos_controller_tick(), ATROPOS_E_NOT_LEADER);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  exit(STATUS);
}

static void leads(void *arg) {
  (void)arg;
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  for (;;) {
    atropos_controller_tick();
    pause_ms(5);
  }
}

static pid_t leader;
static void main_ends(void *arg) {
  (void)arg;
  atropos_config c = config_of("mode = enforce\nslo_ms = 1000");
  c.region_path = "region";
  CHECK_EQ(atropos_init(&c), ATROPOS_OK);
  lock = atropos_resource_register("lock", ATROPOS_LOCK);
  leader = child_that(leads, NULL);
  WAIT_FOR(20, stat_number("ticks") > 3);
  kept = atropos_task_create(2);
  first_thread = pthread_self();
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, after_main, NULL), 0);
  pthread_exit(NULL);
}

static int join(void) {
  atropos_config c = config_of(NULL);
  c.region_path = "region";
  CHECK_EQ(atropos_init(&c), ATROPOS_OK);
  CHECK(task_holds(2, "lock"));
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  if (strcmp(argv[1], "join") == 0) return join();
  if (strcmp(argv[1], "main-thread") == 0) {
    must_end("pthread_exit of main", main_ends, NULL);
    return 0;
  }
  CHECK(strcmp(argv[1], "ways") == 0);
  for (int round = 0; round < 2; round++) {
    must_end("exit", exit_with_handlers, "");
    must_end("shutdown in a handler", exit_with_handlers, "shutdown at exit");
    must_end("exit after a shutdown", exit_with_handlers, "shutdown before");
    must_end("exit, handler registered late", return_from_handler_first, NULL);
    must_end("quick_exit", quick, NULL);
    must_end("_exit", at_once, NULL);
    must_end("exit in a callback", in_callback, "");
    must_end("exit in a callback, shutdown in a handler", in_callback, "with shutdown");
  }
  return 0;
}
