/* A cancel on its way outlives the leader that sent it: the next one repeats it, and escalates. */
#include "check.h"

static int cancels, terminates;

static int deaf(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  CHECK_EQ(req->rung, 1);
  cancels++;
  return 0;
}

static int terminate(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  CHECK_EQ(req->rung, 2);
  CHECK_HAS(req->reason, "asked for by the test");
  terminates++;
  return 0;
}

static void lead_until_killed(int fd) {
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  int said = 0;
  for (;;) {
    if (atropos_controller_tick() == ATROPOS_OK && !said) say(fd, now_ns()), said = 1;
    pause_ms(5);
  }
}

static void find_taken_over(const char *json, void *arg) { *(int *)arg += strstr(json, "\"taken over\"") != NULL; }

int main(void) {
  /* Long enough that the first leader cannot escalate itself. */
  init_with("mode = enforce\nslo_ms = 1000\nverify_ms = 2000\n");
  CHECK_EQ(atropos_set_cancel_action(deaf, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_set_terminate_action(terminate, NULL, 0), ATROPOS_OK);
  CHECK(atropos_agent_poll() >= 0);
  int leads[2];
  CHECK_EQ(pipe(leads), 0);
  pid_t child = fork();
  if (child == 0) lead_until_killed(leads[1]);
  CHECK(child > 0);
  hear(leads[0]);

  atropos_task_t task = atropos_task_create(7);
  atropos_task_request_begin(task, 0);
  CHECK_EQ(atropos_task_cancel(task, 0, "asked for by the test"), ATROPOS_OK);
  uint64_t deadline = now_ns() + 10 * 1000000000ull;
  while (cancels == 0) {
    CHECK(now_ns() < deadline);
    CHECK(atropos_agent_poll() >= 0);
    pause_ms(1);
  }
  CHECK_EQ(kill(child, SIGKILL), 0);
  CHECK_EQ(waitpid(child, NULL, 0), child);

  int before = cancels;
  while (terminates == 0) {
    CHECK(now_ns() < deadline + 10 * 1000000000ull);
    atropos_controller_tick();
    CHECK(atropos_agent_poll() >= 0);
    pause_ms(2);
  }
  CHECK(cancels > before);
  int taken_over = 0;
  CHECK(atropos_decisions(find_taken_over, &taken_over) >= 1);
  CHECK(taken_over >= 1);
  atropos_task_request_end(task, 1);
  atropos_free_cancel(task);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
