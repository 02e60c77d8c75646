/* fork at the worst moments: a child never acts for its parent, is never held up by what a thread of the parent's was
 * about, and joins the region or not as it likes; exec takes nothing along. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"
#include <dirent.h>
#include <limits.h>

static atropos_resource_t lock;

/* What every child does: nothing of the parent's is its own, then it joins, works, and leaves. */
static void live_as_child(uint64_t key) {
  CHECK_EQ(atropos_current_task(), 0);
  CHECK_EQ(atropos_create_cancel(key), 0);
  CHECK_EQ(atropos_controller_tick(), ATROPOS_E_FORKED);
  atropos_free_resource_on(lock, 1, 1);
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  atropos_task_t task = atropos_create_cancel(key);
  CHECK(task != 0);
  atropos_slow_by_resource_on(lock, 2, 1);
  atropos_get_resource_on(lock, 2, 1);
  CHECK(task_holds(key, "lock"));
  atropos_free_cancel(task);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

static void child_body(void *arg) { live_as_child(*(uint64_t *)arg); }

/* With a task bound, while it waits and holds: both stay the parent's. */
static void bound_and_waiting(void) {
  atropos_task_t task = atropos_create_cancel(50);
  atropos_get_resource_on(lock, 1, 1);
  atropos_slow_by_resource_on(lock, 3, 1);
  for (uint64_t key = 60; key < 70; key++) {
    join_child(child_that(child_body, &key));
    CHECK(task_holds(50, "lock") && task_waits(50, "lock"));
  }
  CHECK_EQ(atropos_current_task(), task);
  atropos_get_resource_on(lock, 3, 1);
  CHECK(!task_waits(50, "lock"));
  atropos_free_cancel(task);
}

/* Inside the controller: its edge source, log and cancel action fork, and one child returns from the callback as if it
 * were the parent. Only the parent goes on leading. */
struct shared {
  atomic_int acts, children_done;
  _Atomic pid_t actor;
};
static struct shared *shared;
static pid_t parent;
static atomic_int forked;

static int forks(const atropos_cancel_request *req, void *arg) {
  (void)req, (void)arg;
  atomic_fetch_add(&shared->acts, 1);
  atomic_store(&shared->actor, getpid());
  if (atomic_fetch_add(&forked, 1) == 0) {
    uint64_t key = 61;
    join_child(child_that(child_body, &key));
    pid_t stray = fork();
    CHECK(stray >= 0);
    if (stray != 0) atomic_store(&shared->children_done, 1);
  }
  return 0;
}

static void in_controller(void) {
  parent = getpid();
  CHECK_EQ(atropos_set_cancel_action(forks, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  atropos_task_t task = atropos_task_create(50);
  CHECK_EQ(atropos_task_cancel(task, 0, "by the test"), ATROPOS_OK);
  WAIT_FOR(20, atomic_load(&shared->children_done));
  double ticks = stat_number("ticks");
  /* Told again and again, always by the parent; the child that returned from the callback has ended its loop. */
  int acts = atomic_load(&shared->acts);
  WAIT_FOR(20, atomic_load(&shared->acts) >= acts + 3 && stat_number("ticks") > ticks + 20);
  CHECK_EQ(atomic_load(&shared->actor), parent);
  CHECK_EQ(stat_number("lease_changes"), 1);
  int status;
  pid_t stray = waitpid(-1, &status, 0);
  CHECK(stray > 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0); /* with the end of its only thread */
  atropos_free_cancel(task);
}

/* A process with an agent's thread and a controller's: the child has neither, and can have its own. */
static int served(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  CHECK_EQ(req->owner_pid, getpid());
  atomic_store(&shared->actor, getpid());
  atomic_fetch_add(&shared->acts, 1);
  return 0;
}

static void with_its_own_agent(void *arg) {
  talk *t = (talk *)arg;
  CHECK_EQ(atropos_agent_start(), ATROPOS_E_FORKED);
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK); /* nothing of the parent's to wait for */
  CHECK_EQ(atropos_agent_start(), ATROPOS_OK);
  atropos_task_t task = atropos_task_create(61);
  say(t->to_parent[1], task);
  hear(t->to_child[0]);
  CHECK_EQ(atropos_task_cancel_requested(task), 1);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

static void with_agent(void) {
  CHECK_EQ(atropos_set_cancel_action(served, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_agent_start(), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  talk t;
  talk_open(&t);
  for (int round = 0; round < 5; round++) {
    pid_t child = child_that(with_its_own_agent, &t);
    atropos_task_t task = hear(t.to_parent[0]);
    int acts = atomic_load(&shared->acts);
    CHECK_EQ(atropos_task_cancel(task, 0, "by the test"), ATROPOS_OK);
    WAIT_FOR(20, atomic_load(&shared->acts) > acts);
    CHECK_EQ(atomic_load(&shared->actor), child);
    say(t.to_child[1], 1);
    join_child(child);
    atropos_task_t own = atropos_task_create(50);
    acts = atomic_load(&shared->acts);
    CHECK_EQ(atropos_task_cancel(own, 0, "by the test"), ATROPOS_OK);
    WAIT_FOR(20, atomic_load(&shared->acts) > acts && atomic_load(&shared->actor) == getpid());
    atropos_free_cancel(own);
  }
}

/* A child of a child, of one that joined and of one that did not. */
static void grandchild(void *arg) {
  int joins = *(int *)arg;
  if (joins) {
    CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
    CHECK(atropos_create_cancel(61) != 0);
    atropos_get_resource_on(lock, 1, 1);
  }
  uint64_t key = 62;
  join_child(child_that(child_body, &key));
  if (joins) CHECK(task_holds(61, "lock"));
  else live_as_child(63);
}

static void twice(void) {
  for (int joins = 0; joins < 2; joins++) join_child(child_that(grandchild, &joins));
  /* Whoever ended without a shutdown is reaped. */
  TICK_UNTIL(15, !task_is_listed(61));
}

/* Threads in the middle of all kinds of calls at the moment of the fork: no child is ever held up. */
static atomic_int stop;
static void *busy(void *arg) {
  for (uintptr_t i = (uintptr_t)arg; !atomic_load(&stop); i += 4) {
    atropos_task_t task = atropos_create_cancel(i);
    atropos_get_resource_on(lock, i, 1);
    switch (i & 3) {
      case 0: free(stats()); break;
      case 1: atropos_resource_register("lock", ATROPOS_LOCK); break;
      case 2: {
        atropos_config c = config_of("mode = enforce\nslo_ms = 1000");
        CHECK_EQ(atropos_reload(&c), ATROPOS_OK);
        break;
      }
      default: decisions(); atropos_controller_pause_ms(); break;
    }
    atropos_free_cancel(task);
  }
  return NULL;
}

static void threads(void) {
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  CHECK_EQ(atropos_agent_start(), ATROPOS_OK);
  pthread_t busy_threads[4];
  for (uintptr_t i = 0; i < 4; i++) CHECK_EQ(pthread_create(&busy_threads[i], NULL, busy, (void *)i), 0);
  for (uint64_t i = 0; i < 40; i++) {
    uint64_t key = 1000000007u + i;
    pause_us(random_below(500));
    join_child(child_that(child_body, &key));
  }
  atomic_store(&stop, 1);
  for (int i = 0; i < 4; i++) pthread_join(busy_threads[i], NULL);
}

/* exec: no file, no region, no mask of signals goes along. What a program does that takes over a process which is part of a
 * region by name: it begins anew there, and its former life's tasks are gone. */
static const char *self;

static int open_files(void) {
  DIR *dir = opendir("/proc/self/fd");
  CHECK(dir != NULL);
  int n = 0;
  while (readdir(dir)) n++;
  closedir(dir);
  return n;
}

static void init_named(void) {
  atropos_config c = config_of("mode = enforce\nslo_ms = 1000");
  c.region_path = "region";
  CHECK_EQ(atropos_init(&c), ATROPOS_OK);
}

static int after_exec(const char *what, const char *files) {
  CHECK_EQ(open_files(), atoi(files));
  sigset_t mask;
  CHECK_EQ(pthread_sigmask(SIG_BLOCK, NULL, &mask), 0);
  for (int s = 1; s < 32; s++) CHECK_EQ(sigismember(&mask, s), 0);
  CHECK(!atropos_trace_is_on());
  CHECK_EQ(atropos_shutdown(), ATROPOS_E_NOT_INIT);
  if (strcmp(what, "anonymous") == 0) {
    init_with("mode = observe");
    CHECK(!task_is_listed(50));
  } else {
    init_named();
    int same_process = strcmp(what, "in place") == 0;
    CHECK_EQ(task_is_listed(50), !same_process); /* its own former task, or its parent's living one */
    lock = atropos_resource_register("lock", ATROPOS_LOCK);
    atropos_task_t task = atropos_create_cancel(61);
    CHECK(task != 0);
    atropos_get_resource_on(lock, 1, 1);
    CHECK(task_holds(61, "lock"));
    if (same_process) TICK_UNTIL(10, atropos_controller_tick() == ATROPOS_OK); /* it led before, and leads again */
  }
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}

static void execs(void *arg) {
  char files[16];
  snprintf(files, sizeof files, "%d", open_files());
  execl(self, self, "after exec", (char *)arg, files, (char *)NULL);
  _exit(9);
}

static void in_place(void *arg) {
  (void)arg;
  char files[16];
  snprintf(files, sizeof files, "%d", open_files());
  init_named();
  lock = atropos_resource_register("lock", ATROPOS_LOCK);
  CHECK(atropos_create_cancel(50) != 0);
  atropos_get_resource_on(lock, 1, 1);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  WAIT_FOR(10, stat_number("ticks") > 2);
  execl(self, self, "after exec", "in place", files, (char *)NULL);
  _exit(9);
}

static void exec_after_fork(void) {
  join_child(child_that(in_place, NULL));
  init_with("mode = enforce\nslo_ms = 1000");
  atropos_create_cancel(50);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  CHECK_EQ(atropos_agent_start(), ATROPOS_OK);
  join_child(child_that(execs, "anonymous"));
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  init_named();
  atropos_create_cancel(50);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  join_child(child_that(execs, "named"));
  CHECK(task_is_listed(50));
  CHECK(!task_is_listed(61));
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

int main(int argc, char **argv) {
  static char path[PATH_MAX];
  CHECK(readlink("/proc/self/exe", path, sizeof path - 1) > 0);
  self = path;
  if (argc == 4 && strcmp(argv[1], "after exec") == 0) return after_exec(argv[2], argv[3]);
  CHECK(argc == 2);
  shared = (struct shared *)shared_memory(sizeof *shared);
  if (strcmp(argv[1], "exec") == 0) return exec_after_fork(), 0;
  init_with("mode = enforce\nslo_ms = 1000\nverify_ms = 60000");
  lock = atropos_resource_register("lock", ATROPOS_LOCK);
  if (strcmp(argv[1], "waiting") == 0) bound_and_waiting();
  else if (strcmp(argv[1], "controller") == 0) in_controller();
  else if (strcmp(argv[1], "agent") == 0) with_agent();
  else if (strcmp(argv[1], "double") == 0) twice();
  else if (strcmp(argv[1], "threads") == 0) threads();
  else CHECK(!"a known mode");
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
