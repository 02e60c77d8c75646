/* Programs built with an older or a newer header than the library's: version numbers agree, structs may differ in size.
 * (Against a frozen copy of an older header the other programs are run by tests/versions.rs.) */
#include "check.h"
#include <sys/mman.h>

#if ATROPOS_VERSION_NUMBER != ((ATROPOS_VERSION_MAJOR << 16) | (ATROPOS_VERSION_MINOR << 8) | ATROPOS_VERSION_PATCH)
#error version number and parts disagree
#endif

/* What a later header might have. */
typedef struct {
  atropos_config known;
  uint64_t later[4];
} later_config;

typedef struct {
  atropos_cancel_info known;
  uint64_t later[4];
} later_info;

/* `size` bytes that end where nothing can be read or written. */
static void *at_the_edge(size_t size) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (size + page - 1) / page * page;
  char *base = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(base != MAP_FAILED);
  CHECK_EQ(mprotect(base + room, page, PROT_NONE), 0);
  return base + room - size;
}

static void version_numbers(void) {
  char text[32];
  uint32_t v = atropos_version();
  snprintf(text, sizeof text, "%u.%u.%u", v >> 16, v >> 8 & 255, v & 255);
  /* Compiled against this checkout's header they are equal; an older header is of an older or the same version. */
  CHECK(v >= ATROPOS_VERSION_NUMBER);
  if (v == ATROPOS_VERSION_NUMBER) CHECK(strcmp(text, ATROPOS_VERSION_STRING) == 0);
  snprintf(text, sizeof text, "%d.%d.%d", ATROPOS_VERSION_MAJOR, ATROPOS_VERSION_MINOR, ATROPOS_VERSION_PATCH);
  CHECK(strcmp(text, ATROPOS_VERSION_STRING) == 0);
}

static void config_of_exactly_its_size(void) {
  atropos_config *c = at_the_edge(sizeof *c);
  c->size = sizeof *c;
  c->mode = ATROPOS_MODE_OFF;
  CHECK_EQ(atropos_init(c), ATROPOS_OK);
  CHECK(!atropos_trace_is_on());
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

static void config_of_a_later_header(void) {
  later_config *c = at_the_edge(sizeof *c);
  c->known.size = sizeof *c;
  c->known.mode = ATROPOS_MODE_OFF;
  CHECK_EQ(atropos_init(&c->known), ATROPOS_OK);
  CHECK(!atropos_trace_is_on());
  c->known.mode = ATROPOS_MODE_OBSERVE;
  CHECK_EQ(atropos_reload(&c->known), ATROPOS_OK);
  CHECK(atropos_trace_is_on());
  for (int field = 0; field < 4; field++) {
    memset(c->later, 0, sizeof c->later);
    c->later[field] = 1;
    c->known.mode = ATROPOS_MODE_OFF;
    CHECK_EQ(atropos_reload(&c->known), ATROPOS_E_INVALID);
    CHECK_HAS(last_error(), "newer");
    CHECK(atropos_trace_is_on());
  }
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

/* A size that is rubbish must not make the library read on. */
static void absurd_sizes(void) {
  size_t absurd[] = {0, 1, sizeof(size_t), 64, 4097, 65536, SIZE_MAX / 2, SIZE_MAX};
  size_t *size = at_the_edge(sizeof *size);
  for (size_t i = 0; i < sizeof absurd / sizeof *absurd; i++) {
    *size = absurd[i];
    CHECK_EQ(atropos_init((const atropos_config *)(const void *)size), ATROPOS_E_INVALID);
    CHECK_HAS(last_error(), "atropos_config");
  }
}

static void infos_of_each_size(void) {
  init_with("mode = observe");
  atropos_task_t task = atropos_create_cancel(1);
  CHECK_EQ(atropos_task_cancel(task, 0, "asked"), ATROPOS_OK);
  CHECK_EQ(atropos_controller_tick(), ATROPOS_OK);

  atropos_cancel_info *exact = at_the_edge(sizeof *exact);
  exact->size = sizeof *exact;
  CHECK_EQ(atropos_task_cancel_info(task, exact), 1);
  CHECK_EQ(exact->scope, atropos_task_scope(task));
  CHECK_HAS(exact->reason, "asked");

  later_info *later = at_the_edge(sizeof *later);
  memset(later, 0xff, sizeof *later);
  later->known.size = sizeof *later;
  CHECK_EQ(atropos_task_cancel_info(task, &later->known), 1);
  CHECK_EQ(later->known.size, sizeof *later);
  CHECK_EQ(later->known.scope, exact->scope);
  for (int field = 0; field < 4; field++) CHECK_EQ(later->later[field], 0);

  size_t absurd[] = {0, 8, 64, 4097, SIZE_MAX};
  size_t *size = at_the_edge(sizeof *size);
  for (size_t i = 0; i < sizeof absurd / sizeof *absurd; i++) {
    *size = absurd[i];
    CHECK_EQ(atropos_task_cancel_info(task, (atropos_cancel_info *)(void *)size), 0);
    CHECK_HAS(last_error(), "atropos_cancel_info");
    CHECK_EQ(*size, absurd[i]);
  }
  CHECK_EQ(atropos_task_cancel_info(task, NULL), 1);
  atropos_free_cancel(task);
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
}

int main(void) {
  version_numbers();
  config_of_exactly_its_size();
  config_of_a_later_header();
  absurd_sizes();
  infos_of_each_size();
  return 0;
}
