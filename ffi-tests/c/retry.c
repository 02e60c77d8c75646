/* A cancelled request runs again: when it is calm, once, in turn, in time, and with an answer wherever nobody leads.
 * One scenario per argument. */
#include "check.h"
#include <stdatomic.h>

enum { VICTIMS = 4, WINDOW_MS = 40, CALM_MS = 400, PAUSE_MS = 2 * WINDOW_MS };

/* Budget without limit: these tests are about what comes after a cancel. */
#define CONFIG                                                                                        \
  "mode = enforce\nslo_ms = 20\nwindow_ms = 40\ntrigger_windows = 2\ncancel_burst = 100\n"            \
  "cancel_rate_per_s = 1000\ncancel_share = 1\nmin_relief = 0.05\nretry_calm_ms = 400\n"

static atropos_resource_t lock;

static void begin(const char *more) {
  char text[1024];
  snprintf(text, sizeof text, CONFIG "%s", more);
  init_with(text);
  lock = atropos_resource_register("lock", ATROPOS_LOCK);
  CHECK(lock != 0);
}

static uint64_t in_ms(uint64_t ms) { return now_ns() + ms * 1000000u; }

/* Requests that wait for one object of the lock. */
typedef struct {
  atropos_task_t task[VICTIMS];
  uint64_t instance;
} victims;

static victims victims_wait(uint64_t instance) {
  victims v = {.instance = instance};
  for (int i = 0; i < VICTIMS; i++) {
    v.task[i] = atropos_task_create(instance * 100 + (uint64_t)i);
    CHECK(v.task[i] != 0);
    atropos_task_slow_by_resource(v.task[i], lock, instance, 1);
  }
  return v;
}

static void victims_go(const victims *v) {
  for (int i = 0; i < VICTIMS; i++) {
    CHECK(!atropos_task_cancel_requested(v->task[i]));
    atropos_task_get_resource(v->task[i], lock, v->instance, 1);
    atropos_task_free_resource(v->task[i], lock, v->instance, 1);
    atropos_free_cancel(v->task[i]);
  }
}

static void undo(atropos_task_t task) {
  atropos_task_cancel_acknowledge(task, atropos_task_scope(task));
  atropos_task_release_all(task);
  atropos_task_request_end(task, -1);
}

/* Holds an object that others want until it is told to stop, and undoes its work. It has not ended yet. */
static void is_cancelled(atropos_task_t task, uint64_t instance) {
  atropos_task_get_resource(task, lock, instance, 1);
  victims v = victims_wait(instance);
  WAIT_FOR(20, atropos_task_cancel_requested(task));
  undo(task);
  victims_go(&v);
}

static atropos_task_t cancelled_and_ended(uint64_t key) {
  atropos_task_t task = atropos_task_create(key);
  CHECK(task != 0);
  is_cancelled(task, key);
  atropos_free_cancel(task);
  return task;
}

/* The same work again: others wait for it far longer than before its cancel, and it is left alone. */
static void is_left_alone(atropos_task_t task, uint64_t instance) {
  atropos_task_get_resource(task, lock, instance, 1);
  victims v = victims_wait(instance);
  double overloads = stat_number("overloads_regular") + stat_number("overloads_resource");
  WAIT_FOR(20, stat_number("overloads_regular") + stat_number("overloads_resource") > overloads);
  for (uint64_t end = in_ms(500); now_ns() < end; pause_ms(5)) CHECK(!atropos_task_cancel_requested(task));
  atropos_task_release_all(task);
  victims_go(&v);
}

static void expect_counts(double asked, double retried, double dropped) {
  CHECK_EQ(stat_number("retries_asked"), asked);
  CHECK_EQ(stat_number("retried"), retried);
  CHECK_EQ(stat_number("retries_dropped"), dropped);
  CHECK_EQ(stat_number("retries_waiting"), 0);
}

static void expect_drop(atropos_task_t task, uint64_t deadline_ns, const char *why) {
  CHECK_EQ(atropos_retry_wait(task, deadline_ns), ATROPOS_DROP);
  CHECK_HAS(last_error(), why);
}

static void look_for_retry(const char *json, void *arg) {
  if (strstr(json, "\"retry\":\"ran again\"")) *(double *)arg = json_number(json, "retry_waited_ms");
}

static double recorded_wait_ms(void) {
  double waited_ms = -1;
  CHECK(atropos_decisions(look_for_retry, &waited_ms) > 0);
  return waited_ms;
}

/* ---- a task per request ---- */
static void again(void) {
  begin("retry_load_share = 1\n");
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  atropos_task_t task = cancelled_and_ended(7);
  uint64_t begin_ns = now_ns();
  CHECK_EQ(atropos_retry_wait(task, in_ms(30000)), ATROPOS_RETRY);
  double waited_ms = (double)(now_ns() - begin_ns) / 1e6;
  printf("ran again after %.0f ms\n", waited_ms);
  /* The lock was given back a moment before. */
  CHECK(waited_ms > CALM_MS - 50);
  atropos_task_t retry = atropos_task_create(7);
  CHECK_EQ(atropos_task_set(retry, ATROPOS_TASK_RETRIED, 1), ATROPOS_OK);
  is_left_alone(retry, 7);
  atropos_free_cancel(retry);
  expect_drop(retry, 0, "no cancel");
  expect_drop(task, 0, "no cancel");
  expect_counts(1, 1, 0);
  CHECK_EQ(stat_number("retries_succeeded"), 1);
  CHECK_EQ(stat_number("retries_failed"), 0);
  CHECK(stat_number("retry_waited_ns") >= (CALM_MS - 50) * 1e6);
  CHECK(stat_number("work_wasted_ns") > 0);
  CHECK_EQ(stat_number("cancels_requested"), 1);
  WAIT_FOR(10, recorded_wait_ms() > CALM_MS - 50);
}

/* ---- a session: the task lives on, and the library knows which request is the retry ---- */
static void session(void) {
  begin("retry_load_share = 1\n");
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  atropos_task_t task = atropos_task_create(7);
  atropos_task_request_begin(task, 1);
  atropos_task_get_resource(task, lock, 7, 1);
  victims v = victims_wait(7);
  WAIT_FOR(20, atropos_task_cancel_requested(task));
  expect_drop(task, 0, "in flight");
  atropos_task_request_end(task, -1);
  expect_drop(task, 0, "still holds");
  undo(task);
  victims_go(&v);
  CHECK_EQ(atropos_retry_wait(task, in_ms(30000)), ATROPOS_RETRY);
  atropos_task_request_begin(task, 1);
  is_left_alone(task, 7);
  atropos_task_request_end(task, -1);
  /* The next request is an ordinary one: it is cancelled, and may run again. */
  atropos_task_request_begin(task, 1);
  is_cancelled(task, 7);
  CHECK_EQ(atropos_retry_wait(task, in_ms(30000)), ATROPOS_RETRY);
  atropos_task_request_begin(task, 1);
  atropos_task_request_end(task, 0);
  atropos_free_cancel(task);
  expect_counts(2, 2, 0);
  CHECK_EQ(stat_number("retries_succeeded"), 1);
  CHECK_EQ(stat_number("retries_failed"), 1);
}

/* ---- not under the load in which it was cancelled ---- */
static atomic_int load_stops;
static _Atomic uint64_t load_stopped_ns;

static void *load_main(void *arg) {
  (void)arg;
  while (!atomic_load(&load_stops)) {
    atropos_free_cancel(atropos_task_create(1));
    pause_ms(1);
  }
  atomic_store(&load_stopped_ns, now_ns());
  return NULL;
}

static void busy(void) {
  begin("");
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  pthread_t load;
  CHECK_EQ(pthread_create(&load, NULL, load_main, NULL), 0);
  /* Long enough for an average. */
  double windows = stat_number("windows");
  WAIT_FOR(20, stat_number("windows") > windows + 60);
  atropos_task_t task = cancelled_and_ended(7);
  uint64_t deadline_ns = in_ms(CALM_MS * 4);
  expect_drop(task, deadline_ns, "deadline");
  CHECK(now_ns() >= deadline_ns);
  task = cancelled_and_ended(8);
  CHECK_EQ(atropos_retry_poll(task, in_ms(60000)), ATROPOS_RETRY_LATER);
  for (uint64_t end = in_ms(CALM_MS * 3); now_ns() < end; pause_ms(20))
    CHECK_EQ(atropos_retry_poll(task, 0), ATROPOS_RETRY_LATER);
  atomic_store(&load_stops, 1);
  CHECK_EQ(atropos_retry_wait(task, 0), ATROPOS_RETRY);
  CHECK(atomic_load(&load_stopped_ns) != 0);
  pthread_join(load, NULL);
  expect_counts(2, 1, 1);
}

/* ---- who never gets an answer from a controller gets one all the same ---- */
typedef struct {
  atropos_task_t task;
  int answer;
  uint64_t answered_ns;
  char why[1024];
} waiter;

static void *waiter_main(void *arg) {
  waiter *w = arg;
  w->answer = atropos_retry_wait(w->task, 0);
  w->answered_ns = now_ns();
  snprintf(w->why, sizeof w->why, "%s", last_error());
  return NULL;
}

static pthread_t starts_to_wait(waiter *w, uint64_t key) {
  pthread_t thread;
  w->task = cancelled_and_ended(key);
  double asked = stat_number("retries_asked");
  CHECK_EQ(pthread_create(&thread, NULL, waiter_main, w), 0);
  WAIT_FOR(10, stat_number("retries_asked") > asked);
  return thread;
}

static void is_dropped(pthread_t thread, waiter *w, const char *why) {
  pthread_join(thread, NULL);
  CHECK_EQ(w->answer, ATROPOS_DROP);
  CHECK_HAS(w->why, why);
}

static void nobody_leads(void) {
  expect_drop(7, 0, "not initialised");
  CHECK_EQ(atropos_retry_poll(7, 0), ATROPOS_DROP);
  atropos_retry_give_up(7);
  /* It stays contended as long as the test needs: nobody runs again. */
  begin("retry_load_share = 1\nretry_calm_ms = 600000\n");
  expect_drop(0, 0, "no cancel");
  expect_drop(UINT64_MAX, 0, "no cancel");
  atropos_task_t task = atropos_task_create(5);
  expect_drop(task, 0, "no cancel");
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  /* By hand: whoever asked for it does not want it again. */
  CHECK_EQ(atropos_task_cancel(task, 0, "an operator"), ATROPOS_OK);
  WAIT_FOR(10, atropos_task_cancel_requested(task));
  undo(task);
  expect_drop(task, 0, "no cancel");
  atropos_free_cancel(task);

  waiter w;
  pthread_t thread = starts_to_wait(&w, 7);
  atropos_retry_give_up(w.task);
  is_dropped(thread, &w, "gave it up");
  expect_drop(cancelled_and_ended(8), 1, "deadline");

  thread = starts_to_wait(&w, 9);
  uint64_t begin_ns = now_ns();
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  is_dropped(thread, &w, "no controller");
  printf("no controller: answered after %.0f ms\n", (double)(w.answered_ns - begin_ns) / 1e6);
  CHECK(w.answered_ns - begin_ns < 10 * 1000000000ull);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);

  thread = starts_to_wait(&w, 10);
  atropos_config off = config_of("mode = off");
  CHECK_EQ(atropos_reload(&off), ATROPOS_OK);
  is_dropped(thread, &w, "off");
  atropos_config on = config_of(CONFIG "retry_calm_ms = 600000\n");
  CHECK_EQ(atropos_reload(&on), ATROPOS_OK);

  expect_counts(4, 0, 4);
  thread = starts_to_wait(&w, 11);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  is_dropped(thread, &w, "");
}

/* ---- many processes wait: in turn, one by one, and the dead and the stopped hold up nobody ---- */
enum { CHILDREN = 6, KILLED = 1, STOPPED = 3 };

static void child_main(talk *t, uint64_t key) {
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  atropos_task_t task = atropos_task_create(key);
  CHECK(task != 0);
  atropos_task_get_resource(task, lock, key, 1);
  say(t->to_parent[1], 1);
  WAIT_FOR(60, atropos_task_cancel_requested(task));
  undo(task);
  atropos_free_cancel(task);
  say(t->to_parent[1], 2);
  hear(t->to_child[0]);
  int answer = atropos_retry_wait(task, in_ms(120000));
  say(t->to_parent[1], (uint64_t)answer);
  say(t->to_parent[1], now_ns());
  if (answer == ATROPOS_RETRY) {
    atropos_task_t retry = atropos_task_create(key);
    CHECK_EQ(atropos_task_set(retry, ATROPOS_TASK_RETRIED, 1), ATROPOS_OK);
    atropos_free_cancel(retry);
  }
  hear(t->to_child[0]);
  /* The parent's handles are no concern of a child's. */
  _exit(0);
}

static void in_turn(void) {
  begin("retry_load_share = 1\n");
  talk t[CHILDREN];
  pid_t child[CHILDREN];
  victims v[CHILDREN];
  for (int i = 0; i < CHILDREN; i++) {
    talk_open(&t[i]);
    child[i] = fork();
    CHECK(child[i] >= 0);
    if (child[i] == 0) child_main(&t[i], (uint64_t)i + 10);
    CHECK_EQ(hear(t[i].to_parent[0]), 1);
  }
  /* Somebody who is never cancelled keeps the lock contended until all have asked. */
  atropos_task_t important = atropos_task_create(5);
  CHECK_EQ(atropos_task_set(important, ATROPOS_TASK_PROTECTED, 1), ATROPOS_OK);
  atropos_task_get_resource(important, lock, 5, 1);
  victims of_important = victims_wait(5);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  for (int i = 0; i < CHILDREN; i++) v[i] = victims_wait((uint64_t)i + 10);
  for (int i = 0; i < CHILDREN; i++) {
    CHECK_EQ(hear(t[i].to_parent[0]), 2);
    victims_go(&v[i]);
  }
  for (int i = 0; i < CHILDREN; i++) {
    say(t[i].to_child[1], 1);
    WAIT_FOR(20, stat_number("retries_waiting") == i + 1);
  }
  CHECK(kill(child[KILLED], SIGKILL) == 0);
  CHECK(kill(child[STOPPED], SIGSTOP) == 0);
  /* While it is contended nobody goes, however long they wait. */
  for (uint64_t end = in_ms(CALM_MS * 2); now_ns() < end; pause_ms(20)) CHECK_EQ(stat_number("retried"), 0);
  uint64_t calm_ns = now_ns();
  atropos_task_release_all(important);
  victims_go(&of_important);
  atropos_free_cancel(important);
  int turn = 0;
  for (int i = 0; i < CHILDREN; i++) {
    if (i == KILLED || i == STOPPED) continue;
    CHECK_EQ(hear(t[i].to_parent[0]), ATROPOS_RETRY);
    uint64_t at_ns = hear(t[i].to_parent[0]);
    printf("child %d runs again %.0f ms after it is calm\n", i, (double)(at_ns - calm_ns) / 1e6);
    /* Not before its turn: each release comes a pause after the one before it. */
    CHECK(at_ns > calm_ns + (CALM_MS - 50 + (uint64_t)turn * PAUSE_MS) * 1000000u);
    turn++;
  }
  /* It did not come when it was its turn, and was silent: too late now. */
  WAIT_FOR(20, stat_number("retries_dropped") == 2);
  CHECK(kill(child[STOPPED], SIGCONT) == 0);
  CHECK_EQ(hear(t[STOPPED].to_parent[0]), ATROPOS_DROP);
  for (int i = 0; i < CHILDREN; i++) {
    if (i == KILLED) {
      int status;
      CHECK_EQ(waitpid(child[i], &status, 0), child[i]);
      CHECK(WIFSIGNALED(status));
      continue;
    }
    say(t[i].to_child[1], 1);
    join_child(child[i]);
  }
  expect_counts(CHILDREN, CHILDREN - 2, 2);
  CHECK_EQ(stat_number("retries_succeeded"), CHILDREN - 2);
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*run)(void);
  } SCENARIOS[] = {{"again", again}, {"session", session}, {"busy", busy}, {"nobody_leads", nobody_leads}, {"in_turn", in_turn}};
  CHECK(argc == 2);
  for (size_t i = 0; i < sizeof SCENARIOS / sizeof *SCENARIOS; i++)
    if (strcmp(SCENARIOS[i].name, argv[1]) == 0) {
      SCENARIOS[i].run();
      if (strcmp(argv[1], "nobody_leads") != 0) CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
      return 0;
    }
  fprintf(stderr, "no scenario %s\n", argv[1]);
  return 2;
}
