/* A file system without room, or read-only, below the region or the decision log: said, counted, and the host goes on; as
 * soon as there is room again, so does what needs it. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "fault.h"
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#define REGION "small/region"
static int complaints;

static void log_line(int level, const char *message, void *arg) {
  (void)arg;
  if (level == 1 && strstr(message, "decision_log")) complaints++;
}

static void write_file(const char *path, const char *text) {
  int fd = open(path, O_WRONLY);
  CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) && close(fd) == 0);
}

/* A tmpfs that only this process sees. */
static void mount_small(const char *options) {
  uid_t uid = getuid();
  gid_t gid = getgid();
  if (unshare(CLONE_NEWNS) != 0) {
    char map[64];
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 && errno == EPERM) {
      printf("SKIPPED: a small file system (neither root nor allowed to make user namespaces)\n");
      exit(0);
    }
    write_file("/proc/self/setgroups", "deny");
    snprintf(map, sizeof map, "0 %u 1", (unsigned)uid);
    write_file("/proc/self/uid_map", map);
    snprintf(map, sizeof map, "0 %u 1", (unsigned)gid);
    write_file("/proc/self/gid_map", map);
  }
  CHECK_EQ(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), 0);
  CHECK(mkdir("small", 0700) == 0 || errno == EEXIST);
  CHECK_EQ(mount("tmpfs", "small", "tmpfs", 0, options), 0);
}

static void remount(unsigned long flags, const char *options) {
  CHECK_EQ(mount("tmpfs", "small", "tmpfs", MS_REMOUNT | flags, options), 0);
}

static int init_code(void) {
  atropos_config c = config_of("mode = enforce\nmax_tasks = 64\nmax_workers = 16");
  c.region_path = REGION;
  return atropos_init(&c);
}

/* As without the library: every call is there and does nothing. */
static void host_goes_on(void) {
  CHECK(!atropos_trace_is_on());
  atropos_task_t task = atropos_create_cancel(1);
  CHECK_EQ(task, 0);
  atropos_slow_by_resource(1, 1);
  atropos_get_resource(1, 1);
  atropos_free_resource(1, 1);
  atropos_free_cancel(task);
  CHECK_EQ(atropos_controller_start(), ATROPOS_E_NOT_INIT);
  CHECK_EQ(atropos_shutdown(), ATROPOS_E_NOT_INIT);
}

static unsigned long blocks_used(void) {
  struct statvfs s;
  CHECK_EQ(statvfs("small", &s), 0);
  return s.f_blocks - s.f_bfree;
}

static void refused(int code, const char *why) {
  unsigned long before = blocks_used();
  CHECK_EQ(init_code(), code);
  CHECK_HAS(last_error(), REGION);
  CHECK_HAS(last_error(), why);
  printf("%s\n", last_error());
  CHECK_EQ(blocks_used(), before); /* nothing half-made stays */
  host_goes_on();
}

static void works(void) {
  CHECK_EQ(init_code(), ATROPOS_OK);
  CHECK(atropos_create_cancel(1) != 0);
  CHECK(task_is_listed(1));
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

static void full(void) {
  mount_small("size=64k");
  refused(ATROPOS_E_IO, "No space left");
  refused(ATROPOS_E_IO, "No space left");
  remount(0, "size=32m");
  works();
  /* All of a region is reserved when it is made: that others fill the disk afterwards hurts nobody. */
  CHECK_EQ(init_code(), ATROPOS_OK);
  int fd = open("small/filler", O_CREAT | O_WRONLY, 0600);
  static char block[65536];
  CHECK(fd >= 0);
  while (write(fd, block, sizeof block) > 0) {
  }
  CHECK_EQ(errno, ENOSPC);
  for (uint64_t i = 0; i < 64; i++) CHECK(atropos_task_create(i) != 0);
  CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  close(fd);
}

static void init_and_wait(void *arg) {
  (void)arg;
  CHECK_EQ(init_code(), ATROPOS_OK);
  for (;;) pause();
}

static void readonly(void) {
  mount_small("size=32m");
  works();
  remount(MS_RDONLY, "size=32m");
  refused(ATROPOS_E_IO, "Read-only file system");
  remount(0, "size=32m");
  /* What a killed process left there cannot be replaced either. */
  pid_t child = child_that(init_and_wait, NULL);
  WAIT_FOR(20, access(REGION, F_OK) == 0);
  kill_child(child);
  remount(MS_RDONLY, "size=32m");
  refused(ATROPOS_E_IO, "Read-only file system");
  remount(0, "size=32m");
  works();
}

static int cancels;
static int count_cancel(const atropos_cancel_request *req, void *arg) {
  (void)arg;
  cancels++;
  atropos_task_cancel_acknowledge(req->task, req->scope);
  return 0;
}

static void cancel_one(void) {
  int before = cancels;
  atropos_task_t task = atropos_task_create(7);
  CHECK_EQ(atropos_task_cancel(task, 0, "by the test"), ATROPOS_OK);
  TICK_UNTIL(20, cancels > before);
  atropos_free_cancel(task);
  tick_for_ms(400); /* its end is recorded as well */
}

/* The decision log's disk is full: the cancels go on, the log says so once, and later lines are whole again. */
static void log_full(void) {
  mount_small("size=64k");
  CHECK_EQ(atropos_set_log(log_line, NULL), ATROPOS_OK);
  atropos_config c = config_of("mode = enforce\nslo_ms = 1000");
  c.decision_log = "small/decisions";
  CHECK_EQ(atropos_init(&c), ATROPOS_OK);
  CHECK_EQ(atropos_set_cancel_action(count_cancel, NULL), ATROPOS_OK);
  cancel_one();
  /* All but a part of a line of the rest is taken. */
  int fd = open("small/filler", O_CREAT | O_WRONLY, 0600);
  static char byte[1];
  CHECK(fd >= 0);
  while (write(fd, byte, 1) > 0) {
  }
  while (complaints == 0) cancel_one();
  CHECK(stat_number("logs_failed") >= 1);
  cancel_one();
  cancel_one();
  CHECK_EQ(complaints, 1);
  CHECK(decisions() >= 4); /* kept in memory */
  CHECK_EQ(unlink("small/filler"), 0);
  close(fd);
  double failed = stat_number("logs_failed");
  cancel_one();
  CHECK_EQ(stat_number("logs_failed"), failed);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  FILE *f = fopen("small/decisions", "r");
  CHECK(f != NULL);
  static char line[65536];
  int lines = 0, bad = 0;
  while (fgets(line, sizeof line, f)) {
    size_t length = strlen(line);
    lines++;
    if (line[0] != '{' || length < 3 || strcmp(line + length - 2, "}\n") != 0) bad++, printf("bad line: %s\n", line);
  }
  printf("%d lines, %d cancels\n", lines, cancels);
  CHECK(lines >= 4);
  CHECK_EQ(bad, 0);
  fclose(f);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  if (strcmp(argv[1], "full") == 0) full();
  else if (strcmp(argv[1], "readonly") == 0) readonly();
  else if (strcmp(argv[1], "log") == 0) log_full();
  else CHECK(!"a known mode");
  return 0;
}
