/* The controller dies or hangs in the middle of what it does: another process leads within two heartbeats, a cancel that
 * was asked for arrives all the same, and whoever wakes up deposed does nothing any more.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"

/* Two heartbeats of 100 ms, and what a busy machine may add. */
enum { TAKE_OVER_MS = 200, SLACK_MS = 2000, CANDIDATES = 3 };

/* What the candidates did, for whoever looks on. */
struct seen {
  _Atomic pid_t leader;
  _Atomic uint64_t led_ns, ticks;
  atomic_int acts[CANDIDATES];
  _Atomic uint64_t acted_scope;
};
static struct seen *seen;
static int mine;

static int action(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  atomic_fetch_add(&seen->acts[mine], 1);
  atomic_store(&seen->acted_scope, req->scope);
  return 0;
}

static void candidate(void *arg) {
  mine = *(int *)arg;
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  CHECK_EQ(atropos_set_cancel_action_ex(action, NULL, ATROPOS_ACTION_ANYWHERE), ATROPOS_OK);
  for (;;) {
    if (atropos_controller_tick() == ATROPOS_OK) {
      if (atomic_load(&seen->leader) != getpid()) {
        atomic_store(&seen->led_ns, now_ns());
        atomic_store(&seen->leader, getpid());
      }
      atomic_fetch_add(&seen->ticks, 1);
    }
    pause_us(300);
  }
}

static pid_t leader_now(void) { return (pid_t)stat_number("pid"); }

/* A candidate other than `before` leads and ticks; returns who. */
static pid_t next_leader(pid_t before, uint64_t since) {
  WAIT_FOR(20, atomic_load(&seen->leader) != before && atomic_load(&seen->leader) == leader_now());
  if (before) CHECK((double)(atomic_load(&seen->led_ns) - since) / 1e6 <= TAKE_OVER_MS + SLACK_MS);
  return atomic_load(&seen->leader);
}

static int index_of(const pid_t *candidates, pid_t pid) {
  int i = 0;
  while (candidates[i] != pid) CHECK(++i < CANDIDATES);
  return i;
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  int kills = strcmp(argv[1], "killed") == 0;
  CHECK(kills || strcmp(argv[1], "stopped") == 0);
  init_with("mode = enforce\nslo_ms = 1000\nverify_ms = 60000\nmax_tasks = 16\nmax_workers = 16");
  seen = (struct seen *)shared_memory(sizeof *seen);
  pid_t candidates[CANDIDATES];
  for (int i = 0; i < CANDIDATES; i++) candidates[i] = child_that(candidate, &i);
  next_leader(0, 0);
  atropos_task_t task = atropos_task_create(7);
  double longest_ms = 0;
  int late_acts = 0, counted = 0, rounds = kills ? 40 : 25;
  for (int round = 0; round < rounds; round++) {
    pid_t leader = next_leader(0, 0);
    double changes = stat_number("lease_changes");
    atropos_task_request_begin(task, 0);
    uint64_t scope = atropos_task_scope(task);
    /* About the time in which the leader takes the request up and acts on it. */
    CHECK_EQ(atropos_task_cancel(task, scope, "asked for by the test"), ATROPOS_OK);
    pause_us(random_below(600));
    uint64_t begin = now_ns();
    CHECK_EQ(kill(leader, kills ? SIGKILL : SIGSTOP), 0);
    int old = index_of(candidates, leader);
    if (kills) {
      CHECK_EQ(waitpid(leader, NULL, 0), leader);
      candidates[old] = child_that(candidate, &old);
    }
    pid_t next = next_leader(leader, begin);
    double ms = (double)(atomic_load(&seen->led_ns) - begin) / 1e6;
    longest_ms = ms > longest_ms ? ms : longest_ms;

    /* Whatever became of the one who was asked first, the task is told. A leader that died while it took the request up
     * has taken it along: then it is asked for once more. */
    uint64_t end = now_ns() + 500000000u;
    while (atomic_load(&seen->acted_scope) != scope && now_ns() < end) pause_ms(1);
    if (atomic_load(&seen->acted_scope) != scope)
      CHECK_EQ(atropos_task_cancel(task, scope, "asked for once more"), ATROPOS_OK);
    WAIT_FOR(10, atomic_load(&seen->acted_scope) == scope);
    WAIT_FOR(10, atropos_task_cancel_requested(task));

    if (!kills) {
      /* The request is repeated while nobody acknowledges it: by the one who leads, and nobody else. */
      int late = atomic_load(&seen->acts[old]), all = 0, before = 0;
      for (int i = 0; i < CANDIDATES; i++) before += atomic_load(&seen->acts[i]);
      uint64_t ticks = atomic_load(&seen->ticks);
      CHECK_EQ(kill(leader, SIGCONT), 0);
      WAIT_FOR(20, (all = atomic_load(&seen->acts[0]) + atomic_load(&seen->acts[1]) + atomic_load(&seen->acts[2]),
                    all >= before + 3 && atomic_load(&seen->ticks) > ticks + 50));
      late = atomic_load(&seen->acts[old]) - late;
      /* A busy machine may pass over a leader for two heartbeats: then the lease went on, perhaps to the one that was
       * stopped, and the round says nothing. */
      if (stat_number("lease_changes") == changes + 1) {
        CHECK_EQ(leader_now(), next);
        late_acts += late;
        counted++;
      }
    }
    atropos_task_cancel_acknowledge(task, scope);
    atropos_task_request_end(task, 1);
    /* A new request finds nothing of it. */
    atropos_task_request_begin(task, 0);
    CHECK_EQ(atropos_task_cancel_requested(task), 0);
  }
  printf("%d leaders %s; longest without one %.1f ms\n", rounds, argv[1], longest_ms);
  if (!kills) {
    printf("%d rounds without a further change, %d late acts\n", counted, late_acts);
    CHECK(counted >= rounds / 5);
    /* Between its last look at the lease and its action a leader can be stopped as well, for what then still is the wish
     * of its successor: some tens of nanoseconds, so hardly ever. */
    CHECK(late_acts <= 1);
  }
  CHECK(stat_number("lease_changes") >= rounds + 1);
  for (int i = 0; i < CANDIDATES; i++) kill_child(candidates[i]);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
