/* Several hosts on one machine. Two with regions of their own know nothing of each other; a second start on a living
 * host's region joins it, and of many that find a dead host's region one makes the new one.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"
#include "stage.h"
#include <sys/stat.h>

enum { STARTERS = 8 };

static void init_at(const char *path, const char *more) {
  char text[512];
  snprintf(text, sizeof text, "mode = enforce\n" CALM_STAGE_CONFIG "%s", more);
  atropos_config c = config_of(text);
  c.region_path = path;
  CHECK_EQ(atropos_init(&c), ATROPOS_OK);
}

/* A whole host with the same traffic, lock and instance: one of the two has a culprit. */
struct host {
  const char *path;
  int has_culprit;
  talk t;
};

static void host(void *arg) {
  struct host *h = (struct host *)arg;
  init_at(h->path, "");
  CHECK_EQ(atropos_set_cancel_action(cancel_action, &cancels), ATROPOS_OK);
  CHECK_EQ(atropos_controller_start(), ATROPOS_OK);
  CHECK_EQ(atropos_agent_start(), ATROPOS_OK);
  stage_begin();
  say(h->t.to_parent[1], 1);
  hear(h->t.to_child[0]);
  if (h->has_culprit) {
    atropos_task_t culprit = culprit_takes_lock();
    WAIT_FOR(20, atomic_load(&stop_culprit));
    culprit_gives_lock(culprit);
    say(h->t.to_parent[1], 2);
  }
  hear(h->t.to_child[0]);
  stage_end();
  CHECK_EQ(atomic_load(&wrong_cancels), 0);
  if (h->has_culprit) {
    CHECK(atomic_load(&cancels) >= 1);
  } else {
    CHECK_EQ(atomic_load(&cancels), 0);
    CHECK_EQ(stat_number("cancels_requested"), 0);
  }
  CHECK_EQ(stat_number("lease_changes"), 1);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

static void two(void) {
  struct host hosts[4] = {
      {.path = "first", .has_culprit = 1}, {.path = "second"}, {.path = NULL}, {.path = NULL, .has_culprit = 1}};
  for (int pair = 0; pair < 4; pair += 2) {
    pid_t children[2];
    struct host *h = hosts + pair;
    for (int i = 0; i < 2; i++) {
      talk_open(&h[i].t);
      children[i] = child_that(host, &h[i]);
    }
    for (int i = 0; i < 2; i++) hear(h[i].t.to_parent[0]);
    for (int i = 0; i < 2; i++) say(h[i].t.to_child[1], 1);
    for (int i = 0; i < 2; i++)
      if (h[i].has_culprit) CHECK_EQ(hear(h[i].t.to_parent[0]), 2);
    for (int i = 0; i < 2; i++) say(h[i].t.to_child[1], 1);
    for (int i = 0; i < 2; i++) join_child(children[i]);
  }
}

/* Many at once find what a killed host has left: in the end there is one region, and all are in it. */
struct gate {
  atomic_int ready, phase;
};
static struct gate *gate;
static talk starter_talk;

static void wait_for_phase(int phase) {
  atomic_fetch_add(&gate->ready, 1);
  while (atomic_load(&gate->phase) < phase) pause_us(20);
}

static void starter(void *arg) {
  uint64_t key = (uint64_t)(uintptr_t)arg;
  wait_for_phase(1);
  init_at("region", "max_tasks = 64\nmax_workers = 16\n");
  CHECK(atropos_create_cancel(key) != 0);
  wait_for_phase(2);
  for (uint64_t other = 100; other < 100 + STARTERS; other++) CHECK(task_is_listed(other));
  wait_for_phase(3);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

static void lives(void *arg) {
  (void)arg;
  init_at("region", "max_tasks = 64\nmax_workers = 16\n");
  CHECK(atropos_create_cancel(99) != 0);
  say(starter_talk.to_parent[1], 1);
  for (;;) pause();
}

static void dead_region(void) {
  talk_open(&starter_talk);
  gate = (struct gate *)shared_memory(sizeof *gate);
  for (int round = 0; round < 12; round++) {
    pid_t children[STARTERS], before = child_that(lives, NULL);
    hear(starter_talk.to_parent[0]);
    kill_child(before);
    CHECK_EQ(access("region", F_OK), 0);
    atomic_store(&gate->ready, 0);
    atomic_store(&gate->phase, 0);
    for (uintptr_t i = 0; i < STARTERS; i++) children[i] = child_that(starter, (void *)(100 + i));
    for (int phase = 1; phase <= 3; phase++) {
      WAIT_FOR(20, atomic_load(&gate->ready) == phase * STARTERS);
      atomic_store(&gate->phase, phase);
    }
    for (int i = 0; i < STARTERS; i++) join_child(children[i]);
    CHECK(access("region", F_OK) != 0); /* whoever made it took its name along */
  }
}

/* A second start while the first lives. */
static void joins(void *arg) {
  (void)arg;
  /* Its own settings and sizes do not disturb the first. */
  init_at("region", "mode = off\nmax_tasks = 16\nmax_workers = 16\nwindow_ms = 500\n");
  CHECK(task_is_listed(99));
  char *text = stats();
  CHECK_HAS(text, "\"mode\":\"enforce\"");
  CHECK_EQ(json_number(text, "max_tasks"), 64);
  free(text);
  CHECK(atropos_create_cancel(100) != 0);
  say(starter_talk.to_parent[1], 1);
  hear(starter_talk.to_child[0]);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

static void living_region(void) {
  talk_open(&starter_talk);
  init_at("region", "max_tasks = 64\nmax_workers = 16\n");
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  struct stat first, now;
  pid_t host = child_that(lives, NULL);
  hear(starter_talk.to_parent[0]);
  CHECK_EQ(stat("region", &first), 0);
  pid_t second = child_that(joins, NULL);
  hear(starter_talk.to_parent[0]);
  CHECK(stat("region", &now) == 0 && now.st_ino == first.st_ino);
  say(starter_talk.to_child[1], 1);
  join_child(second);
  /* Its end takes neither the file nor the name. */
  CHECK(stat("region", &now) == 0 && now.st_ino == first.st_ino);
  kill_child(host);
  init_at("region", "max_tasks = 64\nmax_workers = 16\n");
  CHECK(!task_is_listed(99) && !task_is_listed(100));
  CHECK(stat("region", &now) == 0 && now.st_ino != first.st_ino);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  CHECK(stat("region", &now) != 0 && errno == ENOENT);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  if (strcmp(argv[1], "two") == 0) two();
  else if (strcmp(argv[1], "dead-region") == 0) dead_region();
  else if (strcmp(argv[1], "living-region") == 0) living_region();
  else CHECK(!"a known mode");
  return 0;
}
