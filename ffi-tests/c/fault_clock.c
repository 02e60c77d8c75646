/* Clocks that jump, and hosts that stand still: time that passed for nobody makes nobody a culprit, and a real one is found
 * afterwards as before. The program stands in for the kernel's clocks; the processor's counter, where the library reads
 * that, stays as it is and so runs out of step with them. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"
#include "stage.h"
#include <sys/syscall.h>

static _Atomic int64_t wall_offset_ns, monotonic_offset_ns;

/* Takes the place of libc's for the library as well. */
int clock_gettime(clockid_t id, struct timespec *t) {
  int code = (int)syscall(SYS_clock_gettime, id, t);
  int64_t offset = id == CLOCK_REALTIME ? atomic_load(&wall_offset_ns)
                   : id == CLOCK_MONOTONIC ? atomic_load(&monotonic_offset_ns) : 0;
  if (code == 0 && offset != 0) {
    int64_t ns = (int64_t)t->tv_sec * 1000000000 + t->tv_nsec + offset;
    t->tv_sec = (time_t)(ns / 1000000000);
    t->tv_nsec = (long)(ns % 1000000000);
  }
  return code;
}

static atomic_int stop_ticking, distrusted;

static void log_line(int level, const char *message, void *arg) {
  (void)arg;
  if (level == 2 && strstr(message, "out of step")) atomic_fetch_add(&distrusted, 1);
}

/* The controller, driven: the library's own thread sleeps by the kernel's clock, which does not jump. */
static void *ticks(void *arg) {
  (void)arg;
  while (!atomic_load(&stop_ticking)) {
    CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
    pause_ms(5);
  }
  return NULL;
}

static pthread_t ticker;

static void start(void) {
  init_with("mode = enforce\n" CALM_STAGE_CONFIG);
  CHECK_EQ(atropos_set_log(log_line, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_set_cancel_action(cancel_action, &cancels), ATROPOS_OK);
  CHECK_EQ(pthread_create(&ticker, NULL, ticks, NULL), 0);
  stage_begin();
}

static void nobody_is_blamed(void) {
  long served = atomic_load(&stage_served);
  double windows = stat_number("windows");
  WAIT_FOR(30, atomic_load(&stage_served) > served + 100 && stat_number("windows") > windows + 20);
  CHECK_EQ(atomic_load(&cancels), 0);
}

static void a_culprit_is_found(void) {
  atomic_store(&stop_culprit, 0);
  atropos_task_t culprit = culprit_takes_lock();
  WAIT_FOR(20, atomic_load(&stop_culprit));
  culprit_gives_lock(culprit);
  CHECK_EQ(atomic_load(&wrong_cancels), 0);
  CHECK(atomic_load(&cancels) >= 1);
  long served = atomic_load(&stage_served);
  WAIT_FOR(20, atomic_load(&stage_served) > served + 50);
}

static void end(void) {
  stage_end();
  atomic_store(&stop_ticking, 1);
  pthread_join(ticker, NULL);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

/* Wall clock: years back and forth, all the time. */
static void *set_clock(void *arg) {
  (void)arg;
  while (!atomic_load(&stop_ticking)) {
    atomic_store(&wall_offset_ns, ((int64_t)random_below(2000) - 1000) * 86400000000000);
    pause_ms(3);
  }
  return NULL;
}

static void in_order(const char *json, void *arg) {
  double now = json_number(json, "time_ns"), *before = (double *)arg;
  CHECK(now >= *before);
  *before = now;
}

static void wall(void) {
  pthread_t setter;
  random_below(1);
  CHECK_EQ(pthread_create(&setter, NULL, set_clock, NULL), 0);
  start();
  nobody_is_blamed();
  a_culprit_is_found();
  WAIT_FOR(20, decisions() > 0); /* told first, written down second */
  double before = 0;
  CHECK(atropos_decisions(in_order, &before) >= 1);
  CHECK_EQ(atomic_load(&distrusted), 0);
  end();
  pthread_join(setter, NULL);
}

/* CLOCK_MONOTONIC: half a minute is missing, as after a suspend that one clock counts and the other does not. The first time
 * the counter is found out; from then on the jumping clock is all there is. */
static void steps(void) {
  start();
  int counter_is_read = 0;
  for (int step = 0; step < 4; step++) {
    nobody_is_blamed();
    atomic_fetch_add(&monotonic_offset_ns, 30000000000);
    nobody_is_blamed();
    if (step == 0) counter_is_read = atomic_load(&distrusted);
  }
  printf("%s\n", counter_is_read ? "the counter was given up" : "the counter was never used");
  CHECK_EQ(atomic_load(&distrusted), counter_is_read);
  CHECK(stat_number("clock_gaps") >= 4);
  a_culprit_is_found();
  end();
}

/* The whole host stands still: SIGSTOP of all its threads at any moment, as a machine's pause does. */
struct shared {
  atomic_int ready, go_on;
};
static struct shared *shared;

static void stands_still(void *arg) {
  (void)arg;
  start();
  nobody_is_blamed();
  atomic_store(&shared->ready, 1);
  while (!atomic_load(&shared->go_on)) pause_ms(1);
  nobody_is_blamed();
  CHECK_EQ(atomic_load(&distrusted), 0);
  a_culprit_is_found();
  end();
}

static void gap(void) {
  shared = (struct shared *)shared_memory(sizeof *shared);
  pid_t child = child_that(stands_still, NULL);
  WAIT_FOR(60, atomic_load(&shared->ready) || waitpid(child, NULL, WNOHANG) != 0);
  CHECK(atomic_load(&shared->ready));
  for (int i = 0; i < 8; i++) {
    CHECK_EQ(kill(child, SIGSTOP), 0);
    pause_ms(300 + random_below(900));
    CHECK_EQ(kill(child, SIGCONT), 0);
    pause_ms(random_below(200));
  }
  atomic_store(&shared->go_on, 1);
  join_child(child);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  if (strcmp(argv[1], "wall") == 0) wall();
  else if (strcmp(argv[1], "steps") == 0) steps();
  else if (strcmp(argv[1], "gap") == 0) gap();
  else CHECK(!"a known mode");
  return 0;
}
