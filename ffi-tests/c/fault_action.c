/* Cancel actions that go wrong: one that fails, one that blocks, one that ends the thread that serves the request.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"
#include "stage.h"

static atomic_int refusals, warnings, terminates, entered, release_action;

static int culprit_gone(void) { return atomic_load(&stop_culprit); }

static void log_line(int level, const char *message, void *arg) {
  (void)arg;
  if (level == 2 && strstr(message, "answered -7")) atomic_fetch_add(&warnings, 1);
}

/* Fails: counted, said, repeated, and the next rung is tried. */
static int refuses(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  record_request(req);
  atomic_fetch_add(&refusals, 1);
  return -7;
}

static int terminate(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  CHECK_EQ(req->rung, 2);
  record_request(req);
  atomic_fetch_add(&terminates, 1);
  atomic_store(&stop_culprit, 1);
  return 0;
}

static void fails(void) {
  CHECK_EQ(atropos_set_log(log_line, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_set_cancel_action(refuses, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_set_terminate_action(terminate, NULL, 0), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  stage_begin();
  atropos_task_t culprit = culprit_takes_lock();
  WAIT_FOR(20, culprit_gone());
  culprit_gives_lock(culprit);
  stage_end();
  CHECK(atomic_load(&refusals) >= 2);
  CHECK_EQ(stat_number("actions_failed"), atomic_load(&refusals));
  CHECK_EQ(atomic_load(&warnings), atomic_load(&refusals));
  CHECK(atomic_load(&terminates) >= 1);
}

/* Blocks the controller: the host's threads are not held up by it, another process takes the lead, and the one that was
 * blocked stands by when its action has returned. */
static int blocks(const atropos_cancel_request *req, void *arg) {
  (void)req, (void)arg;
  atomic_fetch_add(&entered, 1);
  while (!atomic_load(&release_action)) pause_ms(1);
  return 0;
}

static void stands_by(void *arg) {
  talk *t = (talk *)arg;
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  while (atropos_controller_tick() != ATROPOS_OK) pause_ms(2);
  say(t->to_parent[1], now_ns());
  for (;;) {
    atropos_controller_tick();
    pause_ms(2);
  }
}

static void blocked(void) {
  talk t;
  talk_open(&t);
  CHECK_EQ(atropos_set_cancel_action(blocks, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  stage_begin();
  pid_t child = child_that(stands_by, &t);
  atropos_task_t asked = atropos_task_create(1);
  CHECK_EQ(atropos_task_cancel(asked, 0, "by the test"), ATROPOS_OK);
  WAIT_FOR(20, atomic_load(&entered) == 1);
  uint64_t since = now_ns();
  /* Nothing of this waits for the action. */
  long served = atomic_load(&stage_served);
  CHECK(atropos_controller_pause_ms() > 0);
  CHECK(atropos_controller_tick() != ATROPOS_E_INVALID);
  free(stats());
  atropos_config c = config_of("mode = enforce\n" CALM_STAGE_CONFIG);
  CHECK_EQ(atropos_reload(&c), ATROPOS_OK);
  atropos_free_cancel(atropos_create_cancel(2));
  WAIT_FOR(20, atomic_load(&stage_served) > served + 50);
  double ms = (double)(hear(t.to_parent[0]) - since) / 1e6;
  printf("a blocked leader replaced after %.1f ms\n", ms);
  CHECK(ms < 2200);
  atomic_store(&release_action, 1);
  double ticks = stat_number("ticks");
  WAIT_FOR(20, stat_number("ticks") > ticks + 50);
  CHECK_EQ(atomic_load(&entered), 1);
  kill_child(child);
  /* And leads again when the other one is gone. */
  WAIT_FOR(20, stat_number("pid") == getpid());
  atropos_free_cancel(asked);
  stage_end();
}

/* Ends the thread that serves the request: what its clean-up gives back is back, and what a careless one leaves behind
 * another thread can end. */
static pthread_t culprit_thread;
static int careless;

static void clean_up(void *task) {
  atropos_task_t t = *(atropos_task_t *)task;
  if (careless) pthread_mutex_unlock(&stage_mutex);
  else culprit_gives_lock(t);
}

static void *culprit_body(void *arg) {
  (void)arg;
  static atropos_task_t task;
  task = culprit_takes_lock();
  pthread_cleanup_push(clean_up, &task);
  for (;;) pause();
  pthread_cleanup_pop(0);
  return NULL;
}

static int ends_thread(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  record_request(req);
  if (atomic_exchange(&stop_culprit, 1) == 0) CHECK_EQ(pthread_cancel(culprit_thread), 0);
  return 0;
}

static void crashes(void) {
  CHECK_EQ(atropos_set_cancel_action(ends_thread, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  stage_begin();
  for (careless = 0; careless < 2; careless++) {
    atomic_store(&stop_culprit, 0);
    CHECK_EQ(pthread_create(&culprit_thread, NULL, culprit_body, NULL), 0);
    void *end;
    CHECK_EQ(pthread_join(culprit_thread, &end), 0);
    CHECK(end == PTHREAD_CANCELED && atomic_load(&stop_culprit));
    CHECK_EQ(task_is_listed(CULPRIT_KEY), careless);
    atropos_free_cancel(atomic_load(&culprit_task));
    CHECK(!task_is_listed(CULPRIT_KEY));
    long served = atomic_load(&stage_served);
    WAIT_FOR(20, atomic_load(&stage_served) > served + 50);
  }
  stage_end();
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  init_with("mode = enforce\nverify_ms = 100\ncancel_rate_per_s = 100\n" CALM_STAGE_CONFIG);
  if (strcmp(argv[1], "fails") == 0) fails();
  else if (strcmp(argv[1], "blocks") == 0) blocked();
  else if (strcmp(argv[1], "crashes") == 0) crashes();
  else CHECK(!"a known mode");
  CHECK_EQ(atomic_load(&wrong_cancels), 0);
  CHECK_EQ(atropos_controller_stop(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
