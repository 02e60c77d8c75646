/* kill -9 of a process of the region, wherever it is: nobody is cancelled for what it did, what it had comes back, and
 * nobody waits for what it had begun. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"
#include <dirent.h>

enum { TASKS = 16, WORKERS = 16 };
static atropos_resource_t lock;
static atomic_int acts, acts_on_the_dead, is_dead;
static talk line;

static int action(const atropos_cancel_request *req, void *arg) {
  (void)req, (void)arg;
  atomic_fetch_add(&acts, 1);
  if (atomic_load(&is_dead)) atomic_fetch_add(&acts_on_the_dead, 1);
  return 0;
}

static void join_region(void) { CHECK_EQ(atropos_after_fork(), ATROPOS_OK); }

static void until_killed(void) {
  say(line.to_parent[1], 1);
  for (;;) pause();
}

/* All places of both tables can be had. */
static int all_places_are_free(void) {
  atropos_task_t tasks[TASKS];
  atropos_worker_t workers[WORKERS];
  int n = 0, w = 0;
  while (n < TASKS && (tasks[n] = atropos_task_create(1000 + (uint64_t)n)) != 0) n++;
  while (n > 0 && w < WORKERS && (workers[w] = atropos_task_attach(tasks[0])) != 0) w++;
  for (int i = 0; i < w; i++) atropos_task_detach(workers[i]);
  for (int i = 0; i < n; i++) atropos_free_cancel(tasks[i]);
  return n == TASKS && w == WORKERS;
}

/* Dead while it waits: whoever holds what it waited for is not cancelled for the sake of a dead one. */
static void waits(void *arg) {
  (void)arg;
  join_region();
  for (uint64_t i = 0; i < 4; i++) {
    atropos_task_t task = atropos_task_create(500 + i);
    CHECK(task != 0);
    atropos_task_slow_by_resource(task, lock, 1, 1);
  }
  until_killed();
}

static void waiting(void) {
  atropos_task_t holder = atropos_task_create(1);
  atropos_task_get_resource(holder, lock, 1, 1);
  pid_t child = child_that(waits, NULL);
  hear(line.to_parent[0]);
  kill_child(child);
  tick_for_ms(2500);
  CHECK_EQ(atomic_load(&acts), 0);
  for (uint64_t i = 0; i < 4; i++) CHECK(!task_is_listed(500 + i));
  CHECK(task_holds(1, "lock"));
  atropos_free_cancel(holder);
}

/* Dead while it holds what others wait for: neither is it acted on any more nor is another one in its place. */
static void holds(void *arg) {
  (void)arg;
  join_region();
  atropos_task_t task = atropos_create_cancel(500);
  CHECK(task != 0);
  atropos_get_resource_on(lock, 1, 1);
  until_killed();
}

static void holding(void) {
  pid_t child = child_that(holds, NULL);
  hear(line.to_parent[0]);
  atropos_task_t victims[4];
  for (uint64_t i = 0; i < 4; i++) {
    victims[i] = atropos_task_create(300 + i);
    atropos_task_slow_by_resource(victims[i], lock, 1, 1);
  }
  /* It is told to stop while it lives, and told again. */
  TICK_UNTIL(20, atomic_load(&acts) >= 2);
  kill_child(child);
  atomic_store(&is_dead, 1);
  TICK_UNTIL(15, !task_is_listed(500));
  tick_for_ms(1500);
  CHECK_EQ(atomic_load(&acts_on_the_dead), 0);
  for (int i = 0; i < 4; i++) {
    CHECK_EQ(atropos_task_cancel_requested(victims[i]), 0);
    atropos_task_get_resource(victims[i], lock, 1, 1);
    atropos_free_cancel(victims[i]);
  }
}

/* Dead at any point of what it does again and again. */
static void begins(void *arg) {
  (void)arg;
  join_region();
  for (uint64_t i = 0;; i++) {
    atropos_task_t task = atropos_create_cancel(i);
    atropos_get_resource_on(lock, i, 1);
    if (i % 2) atropos_free_resource_on(lock, i, 1);
    atropos_free_cancel(task);
  }
}

static void attaches(void *arg) {
  atropos_task_t task = *(atropos_task_t *)arg;
  join_region();
  for (;;) {
    atropos_worker_t worker = atropos_task_attach(task);
    atropos_get_resource(lock, 1);
    atropos_task_detach(worker);
  }
}

static void killed_at_random(void (*body)(void *), int rounds) {
  atropos_task_t task = atropos_task_create(1);
  for (int i = 0; i < rounds; i++) {
    pid_t child = child_that(body, &task);
    pause_us(500 + random_below(3000));
    kill_child(child);
    /* A table full of the dead would let nobody in to die inside begin. */
    if (i % 8 == 7) tick_for_ms(600);
  }
  atropos_free_cancel(task);
  TICK_UNTIL(15, all_places_are_free());
  printf("%.0f slots taken back\n", stat_number("slots_reaped"));
}

/* Dead while it changes the settings: the next one who does is not held up. */
static void reloads(void *arg) {
  (void)arg;
  join_region();
  for (int i = 0;; i++) {
    atropos_config c = config_of(i % 2 ? "mode = enforce\nwindow_ms = 50" : "mode = observe\nwindow_ms = 70");
    CHECK_EQ(atropos_reload(&c), ATROPOS_OK);
  }
}

static void reload(void) {
  atropos_config c = config_of("mode = enforce\nmax_tasks = 16\nmax_workers = 16\nslo_ms = 20");
  for (int i = 0; i < 60; i++) {
    pid_t child = child_that(reloads, NULL);
    pause_us(500 + random_below(3000));
    kill_child(child);
    uint64_t begin = now_ns();
    CHECK_EQ(atropos_reload(&c), ATROPOS_OK);
    CHECK(now_ns() - begin < 2000000000u);
    tick_for_ms(5);
    char *text = stats();
    CHECK_HAS(text, "\"mode\":\"enforce\"");
    free(text);
  }
}

/* Dead while it registers a resource: the name can be had. */
static void registers(void *arg) {
  join_region();
  for (;;) atropos_resource_register((const char *)arg, ATROPOS_LOCK);
}

static void registering(void) {
  char name[16];
  for (int i = 0; i < 28; i++) {
    snprintf(name, sizeof name, "name %d", i);
    pid_t child = child_that(registers, name);
    pause_us(random_below(2000));
    kill_child(child);
    CHECK_EQ(atropos_resource_register(name, ATROPOS_LOCK), lock + 1 + (atropos_resource_t)i);
  }
}

/* Dead while it makes a named region, or leaves it: the next start finds or makes a good one, and nothing is left over. */
static void starts(void *arg) {
  (void)arg;
  atropos_config c = config_of("max_tasks = 16\nmax_workers = 16");
  c.region_path = "region";
  for (;;) {
    CHECK_EQ(atropos_init(&c), ATROPOS_OK);
    CHECK(atropos_create_cancel(1) != 0);
    CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  }
}

static int files(void) {
  DIR *dir = opendir(".");
  CHECK(dir != NULL);
  int n = 0;
  for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
    int ours = strncmp(entry->d_name, "region", 6) == 0;
    if (ours) printf("%s\n", entry->d_name);
    n += ours;
  }
  closedir(dir);
  return n;
}

static void starting(void) {
  atropos_config c = config_of("max_tasks = 16\nmax_workers = 16");
  c.region_path = "region";
  for (int i = 0; i < 60; i++) {
    pid_t child = child_that(starts, NULL);
    pause_us(random_below(30000));
    kill_child(child);
    if (i % 4) continue;
    CHECK_EQ(atropos_init(&c), ATROPOS_OK);
    CHECK(!task_is_listed(1));
    CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  }
  CHECK_EQ(atropos_init(&c), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  CHECK_EQ(files(), 0);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  talk_open(&line);
  if (strcmp(argv[1], "init") == 0) return starting(), 0;
  init_with("mode = enforce\nslo_ms = 20\nwindow_ms = 40\ntrigger_windows = 2\nmax_tasks = 16\nmax_workers = 16");
  lock = atropos_resource_register("lock", ATROPOS_LOCK);
  CHECK_EQ(atropos_set_cancel_action_ex(action, NULL, ATROPOS_ACTION_ANYWHERE), ATROPOS_OK);
  tick_for_ms(100);
  if (strcmp(argv[1], "waiting") == 0) waiting();
  else if (strcmp(argv[1], "holding") == 0) holding();
  else if (strcmp(argv[1], "begin") == 0) killed_at_random(begins, 80);
  else if (strcmp(argv[1], "attach") == 0) killed_at_random(attaches, 80);
  else if (strcmp(argv[1], "reload") == 0) reload();
  else if (strcmp(argv[1], "register") == 0) registering();
  else CHECK(!"a known mode");
  CHECK(strcmp(argv[1], "waiting") && strcmp(argv[1], "holding") ? 1 : all_places_are_free());
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
