/* A region file is refused unless it is one, of this layout, whole, ours, and closed to others; each refusal says which
 * of these it was and leaves the file alone. */
#include "check.h"
#include <fcntl.h>
#include <sys/stat.h>

#define PATH "region"
static char *valid;
static size_t valid_bytes;

static int init_code(void) {
  atropos_config c = config_of("max_tasks = 16\nmax_workers = 16\nmode = observe");
  c.region_path = PATH;
  return atropos_init(&c);
}

static void write_region(const char *bytes, size_t length, mode_t mode) {
  unlink(PATH);
  int fd = open(PATH, O_CREAT | O_EXCL | O_WRONLY, 0600);
  CHECK(fd >= 0 && write(fd, bytes, length) == (ssize_t)length && fchmod(fd, mode) == 0 && close(fd) == 0);
}

static void refused(const char *because) {
  struct stat before, after;
  CHECK(lstat(PATH, &before) == 0);
  CHECK_EQ(init_code(), ATROPOS_E_REGION);
  CHECK_HAS(last_error(), because);
  CHECK_HAS(last_error(), PATH);
  printf("%s\n", last_error());
  CHECK(!atropos_trace_is_on());
  CHECK_EQ(atropos_shutdown(), ATROPOS_E_NOT_INIT);
  CHECK(lstat(PATH, &after) == 0);
  CHECK(before.st_ino == after.st_ino && before.st_size == after.st_size && before.st_mode == after.st_mode);
}

int main(void) {
  /* A valid one: made with mode 0600 whatever the umask. */
  umask(0);
  CHECK_EQ(init_code(), ATROPOS_OK);
  struct stat st;
  CHECK(stat(PATH, &st) == 0);
  CHECK_EQ(st.st_mode & 07777, 0600);
  valid_bytes = (size_t)st.st_size;
  valid = (char *)malloc(valid_bytes + 4096);
  FILE *f = fopen(PATH, "r");
  CHECK(f != NULL && fread(valid, 1, valid_bytes, f) == valid_bytes && fclose(f) == 0);

  /* Another process joins while this one lives and sees the same tasks. */
  atropos_task_t task = atropos_create_cancel(11);
  talk t;
  talk_open(&t);
  pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "join", "join", (char *)NULL);
    _exit(1);
  }
  join_child(child);
  atropos_free_cancel(task);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);

  /* Left behind by a process that was killed: replaced, and begins empty. */
  child = fork();
  if (child == 0) {
    CHECK_EQ(init_code(), ATROPOS_OK);
    CHECK(atropos_create_cancel(12) != 0);
    kill(getpid(), SIGKILL);
  }
  int status;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFSIGNALED(status));
  CHECK(stat(PATH, &st) == 0);
  CHECK_EQ(init_code(), ATROPOS_OK);
  CHECK(!task_is_listed(12));
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);

  char *bad = (char *)malloc(valid_bytes + 4096);
#define FROM_VALID (memset(bad, 0, valid_bytes + 4096), memcpy(bad, valid, valid_bytes))
  /* The identity block begins with the magic (8 bytes) and the layout version (4 bytes). */
  FROM_VALID, bad[0] ^= 1;
  write_region(bad, valid_bytes, 0600), refused("magic");
  FROM_VALID, bad[8] ^= 0x40;
  write_region(bad, valid_bytes, 0600), refused("version");
  FROM_VALID;
  write_region(bad, valid_bytes - 1, 0600), refused("size");
  write_region(bad, valid_bytes / 2, 0600), refused("size");
  write_region(bad, valid_bytes + 64, 0600), refused("size");
  write_region(bad, 10, 0600), refused("size");
  write_region("", 0, 0600), refused("size");
  write_region(bad, valid_bytes, 0644), refused("mode");
  write_region(bad, valid_bytes, 0660), refused("mode");
  if (geteuid() == 0) {
    write_region(bad, valid_bytes, 0600);
    CHECK(chown(PATH, 65534, 65534) == 0);
    refused("owner");
  } else {
    printf("SKIPPED: a region of another owner (only root can give a file away)\n");
  }
  /* A link is not followed: its target could be anybody's. */
  write_region(bad, valid_bytes, 0600);
  CHECK(rename(PATH, "target") == 0 && symlink("target", PATH) == 0);
  refused(PATH);
  CHECK(unlink(PATH) == 0 && mkdir(PATH, 0700) == 0);
  refused(PATH);
  CHECK(rmdir(PATH) == 0);

  /* Where no file can be made, the system's reason is told. */
  atropos_config c = config_of(NULL);
  c.region_path = "no such folder/region";
  CHECK_EQ(atropos_init(&c), ATROPOS_E_IO);
  CHECK_HAS(last_error(), "no such folder/region");
  free(bad);
  return 0;
}

/* The joining process: runs before main, as the same program with the argument "join". */
__attribute__((constructor)) static void join(int argc, char **argv) {
  if (argc < 2 || strcmp(argv[1], "join") != 0) return;
  CHECK_EQ(init_code(), ATROPOS_OK);
  CHECK(task_is_listed(11));
  CHECK(atropos_create_cancel(13) != 0);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  exit(0);
}
