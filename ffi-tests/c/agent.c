/* Culprit and controller in different processes, as in a server of many processes. The controller is driven by tick in
 * the parent; the action runs in the culprit's process (`poll`: from its own loop, `thread`: from the agent's thread)
 * or in the controller's where it says that it may (`anywhere`). */
#include "check.h"
#include <stdatomic.h>

#define CULPRIT_KEY 7777u
/* The action runs in the agent's thread, or `told` is set by a signal. */
static atomic_int told;
static _Atomic uint64_t told_scope;
static atropos_task_t culprit;
static pid_t acting_process;

static int action(const atropos_cancel_request *req, void *arg) {
  CHECK_EQ(req->key, CULPRIT_KEY);
  CHECK_EQ(getpid(), acting_process ? acting_process : getpid());
  told_scope = req->scope;
  told = 1;
  if (arg) CHECK(kill((pid_t)req->owner_pid, SIGUSR1) == 0);
  return 0;
}

static void on_signal(int signal) { (void)signal, told = 1; }

static void culprit_process(const char *how, talk *t) {
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  int anywhere = strcmp(how, "anywhere") == 0;
  acting_process = anywhere ? 0 : getpid();
  if (!anywhere) CHECK_EQ(atropos_set_cancel_action(action, NULL), ATROPOS_OK);
  if (strcmp(how, "thread") == 0) CHECK_EQ(atropos_agent_start(), ATROPOS_OK);
  if (anywhere) signal(SIGUSR1, on_signal);
  culprit = atropos_create_cancel(CULPRIT_KEY);
  CHECK(culprit != 0);
  atropos_resource_t lock = atropos_resource_register("lock", ATROPOS_LOCK);
  atropos_get_resource_on(lock, 1, 1);
  say(t->to_parent[1], getpid());
  int ran = 0;
  while (!told) {
    if (strcmp(how, "poll") == 0) ran += atropos_agent_poll();
    pause_ms(1);
  }
  if (strcmp(how, "poll") == 0) CHECK(ran >= 1);
  if (!anywhere) CHECK_EQ(told_scope, atropos_task_scope(culprit));
  atropos_cancel_info info;
  memset(&info, 0, sizeof info);
  info.size = sizeof info;
  CHECK_EQ(atropos_task_cancel_info(culprit, &info), 1);
  atropos_task_cancel_acknowledge(culprit, info.scope);
  atropos_free_resource_on(lock, 1, 1);
  atropos_free_cancel(culprit);
  _exit(0);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  init_with("mode = enforce\nslo_ms = 20\nwindow_ms = 40\ntrigger_windows = 2\n");
  atropos_resource_t lock = atropos_resource_register("lock", ATROPOS_LOCK);
  int anywhere = strcmp(argv[1], "anywhere") == 0;
  if (anywhere) {
    acting_process = getpid();
    CHECK_EQ(atropos_set_cancel_action_ex(action, &acting_process, ATROPOS_ACTION_ANYWHERE), ATROPOS_OK);
  }
  talk t;
  talk_open(&t);
  pid_t child = fork();
  if (child == 0) culprit_process(argv[1], &t);
  CHECK(child > 0);
  CHECK_EQ(hear(t.to_parent[0]), child);

  /* Victims of this process wait for the child's lock. */
  atropos_task_t victims[4];
  for (uint64_t i = 0; i < 4; i++) {
    victims[i] = atropos_task_create(300 + i);
    atropos_task_request_begin(victims[i], 0);
    atropos_task_slow_by_resource(victims[i], lock, 1, 1);
  }
  uint64_t begin = now_ns(), end = begin + 20 * 1000000000ull;
  int status = 0;
  pid_t ended = 0;
  while (!ended && now_ns() < end) {
    CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
    pause_ms(2);
    ended = waitpid(child, &status, WNOHANG);
  }
  CHECK_EQ(ended, child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  printf("%s: culprit ended after %.1f ms\n", argv[1], (double)(now_ns() - begin) / 1e6);
  CHECK_EQ(told, anywhere);
  for (int i = 0; i < 4; i++) {
    CHECK_EQ(atropos_task_cancel_requested(victims[i]), 0);
    atropos_task_get_resource(victims[i], lock, 1, 1);
    atropos_task_free_resource(victims[i], lock, 1, 1);
    atropos_free_cancel(victims[i]);
  }
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
