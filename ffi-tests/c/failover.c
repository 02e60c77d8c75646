/* Three processes, one leader at a time: the killed leader is replaced within two heartbeats, a leader that shuts down
 * at once. */
#include "check.h"
#include <sys/prctl.h>

/* Two heartbeats of 100 ms each, and what a busy machine may add to a tick of 5 ms. */
#define TAKE_OVER_MS 200
#define SLACK_MS 300

static void candidate(int fd) {
  /* Where this process's parent fails, nobody is to wait for the end of its children's output. */
  CHECK_EQ(prctl(PR_SET_PDEATHSIG, SIGKILL), 0);
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  int code;
  while ((code = atropos_controller_tick()) == ATROPOS_E_NOT_LEADER) pause_ms(5);
  CHECK_EQ(code, ATROPOS_OK);
  say(fd, now_ns());
  for (;;) {
    CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
    pause_ms(5);
  }
}

int main(void) {
  init_with("mode = enforce\nslo_ms = 1000");
  pid_t children[2];
  int leads[2][2];
  int first = -1;
  /* The first one leads before the second begins. */
  for (int i = 0; i < 2; i++) {
    CHECK(pipe(leads[i]) == 0);
    children[i] = fork();
    if (children[i] == 0) candidate(leads[i][1]);
    CHECK(children[i] > 0);
    close(leads[i][1]); /* only the child speaks: if it fails, it is not waited for */
    if (i == 0) hear(leads[0][0]), first = 0;
  }
  CHECK_EQ(first, 0);
  /* The second and this process stand by while the first lives. */
  for (int i = 0; i < 100; i++) {
    CHECK_EQ(atropos_controller_tick(), ATROPOS_E_NOT_LEADER);
    pause_ms(5);
  }
  CHECK_EQ(stat_number("lease_changes"), 1);

  uint64_t killed = now_ns();
  CHECK(kill(children[0], SIGKILL) == 0);
  uint64_t took_over = hear(leads[1][0]);
  double ms = (double)(took_over - killed) / 1e6;
  printf("killed leader replaced after %.1f ms\n", ms);
  CHECK(ms <= TAKE_OVER_MS + SLACK_MS);
  CHECK_EQ(stat_number("lease_changes"), 2);
  CHECK_EQ(atropos_controller_tick(), ATROPOS_E_NOT_LEADER);

  /* A leader that hangs (stopped, not dead) is replaced, too, and steps back when it wakes. */
  CHECK(kill(children[1], SIGSTOP) == 0);
  uint64_t stopped = now_ns();
  while (atropos_controller_tick() != ATROPOS_OK) {
    CHECK(now_ns() < stopped + 10 * 1000000000ull);
    pause_ms(5);
  }
  ms = (double)(now_ns() - stopped) / 1e6;
  printf("stopped leader replaced after %.1f ms\n", ms);
  CHECK(ms <= TAKE_OVER_MS + SLACK_MS);
  CHECK(kill(children[1], SIGCONT) == 0);
  /* It finds that it no longer leads: its own check fails and it ends with 1. This process goes on leading meanwhile: else
   * the lease would be free again once the other one has woken on a slow machine. */
  int status, ended;
  stopped = now_ns();
  while ((ended = waitpid(children[1], &status, WNOHANG)) == 0) {
    CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
    CHECK(now_ns() < stopped + 10 * 1000000000ull);
    pause_ms(5);
  }
  CHECK_EQ(ended, children[1]);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1);
  CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
  CHECK_EQ(waitpid(children[0], &status, 0), children[0]);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
