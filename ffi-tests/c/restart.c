/* A parent that makes a fresh region at each restart, as httpd's does, while children of former generations go on with
 * theirs: it does not grow, and what the children do is theirs alone. */
#include "check.h"
#include <sys/wait.h>

enum { RESTARTS = 100 };

/* Kilobytes of shared memory this process has touched; anonymous regions are all of it. */
static long shared_kb(void) {
  FILE *f = fopen("/proc/self/status", "r");
  CHECK(f != NULL);
  char line[256];
  long kb = -1;
  while (fgets(line, sizeof line, f))
    if (sscanf(line, "RssShmem: %ld kB", &kb) == 1) break;
  fclose(f);
  CHECK(kb >= 0);
  return kb;
}

/* Works in its generation's region after its parent has long gone on to others. */
static int child(int from_parent, int to_parent) {
  CHECK_EQ(atropos_after_fork(), ATROPOS_OK);
  char byte;
  CHECK_EQ(write(to_parent, "r", 1), 1);
  CHECK_EQ(read(from_parent, &byte, 1), 1);
  atropos_task_t task = atropos_create_cancel(7);
  CHECK(task != 0);
  atropos_free_cancel(task);
  char *text = stats();
  /* One resource: the one of its own generation. */
  CHECK(!strstr(text, "\"even\"") != !strstr(text, "\"odd\""));
  free(text);
  return atropos_shutdown();
}

int main(void) {
  int down[2], up[2];
  CHECK_EQ(pipe(down), 0);
  CHECK_EQ(pipe(up), 0);
  pid_t old[2] = {0, 0};
  long first_kb = 0;
  char byte;
  for (int i = 0; i < RESTARTS; i++) {
    init_with("mode = observe\n");
    CHECK(atropos_resource_register(i % 2 ? "odd" : "even", ATROPOS_LOCK) == 1);
    atropos_free_cancel(atropos_create_cancel(1));
    if (i < 2) {
      old[i] = fork();
      CHECK(old[i] >= 0);
      if (old[i] == 0) _exit(child(down[0], up[1]));
      CHECK_EQ(read(up[0], &byte, 1), 1);
    }
    CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
    if (i == 2) first_kb = shared_kb();
  }
  long last_kb = shared_kb();
  printf("shared memory after 3 restarts %ld kB, after %d %ld kB\n", first_kb, RESTARTS, last_kb);
  CHECK(last_kb <= first_kb + 64);
  CHECK_EQ(write(down[1], "gg", 2), 2);
  for (int i = 0; i < 2; i++) {
    int status;
    CHECK_EQ(waitpid(old[i], &status, 0), old[i]);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  return 0;
}
