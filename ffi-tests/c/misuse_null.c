/* NULL and out-of-range arguments: a code and a text, never a crash, never a change. */
#include "check.h"

static atropos_task_t task;

#define REFUSED(call, code)                                  \
  do {                                                       \
    CHECK_EQ(call, code);                                    \
    CHECK(last_error()[0] != 0);                             \
  } while (0)

int main(void) {
  CHECK_EQ(atropos_init(NULL), ATROPOS_OK); /* all defaults */
  CHECK(atropos_trace_is_on());

  CHECK_EQ(atropos_resource_register(NULL, ATROPOS_LOCK), 0);
  CHECK(last_error()[0] != 0);
  CHECK_EQ(atropos_resource_register("", ATROPOS_LOCK), 0);
  CHECK_EQ(atropos_resource_register("a", 0), 0);
  CHECK_EQ(atropos_resource_register("a", 99), 0);
  CHECK(last_error()[0] != 0);
  CHECK_EQ(atropos_resource_register("\xff\xfe not UTF-8", ATROPOS_LOCK), 0);
  CHECK_EQ(atropos_resource_register("a name that is much too long for the place it is kept in", ATROPOS_LOCK), 0);
  CHECK_HAS(last_error(), "31");
  CHECK(atropos_resource_register("a", ATROPOS_LOCK) != 0);
  CHECK_EQ(atropos_resource_register("a", ATROPOS_QUEUE), 0);
  CHECK_HAS(last_error(), "registered");

  task = atropos_create_cancel(0); /* 0 is a key like any other */
  CHECK(task != 0);
  REFUSED(atropos_task_set(task, 0, 1), ATROPOS_E_INVALID);
  REFUSED(atropos_task_set(task, 999, 1), ATROPOS_E_INVALID);
  REFUSED(atropos_task_set(task, ATROPOS_TASK_CLASS, 16), ATROPOS_E_INVALID);
  CHECK_HAS(last_error(), "15");
  REFUSED(atropos_task_set(task, ATROPOS_TASK_CLASS, -1), ATROPOS_E_INVALID);
  REFUSED(atropos_task_set(task, ATROPOS_TASK_PRIORITY, 101), ATROPOS_E_INVALID);
  REFUSED(atropos_task_set(task, ATROPOS_TASK_PRIORITY, -101), ATROPOS_E_INVALID);
  CHECK_HAS(last_error(), "100");
  REFUSED(atropos_task_set(task, ATROPOS_TASK_BACKGROUND, 2), ATROPOS_E_INVALID);
  REFUSED(atropos_task_set(task, ATROPOS_TASK_PROTECTED, INT64_MAX), ATROPOS_E_INVALID);
  REFUSED(atropos_task_set(task, ATROPOS_TASK_CANCELLABLE, INT64_MIN), ATROPOS_E_INVALID);
  CHECK_EQ(atropos_task_set(task, ATROPOS_TASK_LABEL, 0), ATROPOS_OK); /* NULL: no label */

  CHECK_EQ(atropos_task_cancel_info(task, NULL), 0);
  atropos_cancel_info info;
  memset(&info, 0, sizeof info);
  CHECK_EQ(atropos_task_cancel_info(task, &info), 0); /* size 0 */
  REFUSED(atropos_decisions(NULL, NULL), ATROPOS_E_INVALID);

  /* NULL takes a callback away. */
  CHECK_EQ(atropos_set_log(NULL, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_set_cancel_action(NULL, NULL), ATROPOS_OK);
  CHECK_EQ(setCancelAction(NULL, NULL), ATROPOS_OK);
  CHECK_EQ(atropos_set_terminate_action(NULL, NULL, 0), ATROPOS_OK);
  CHECK_EQ(atropos_edge_source(NULL, NULL), ATROPOS_OK);
  REFUSED(atropos_set_cancel_action_ex(NULL, NULL, 0xffff0000u), ATROPOS_E_INVALID); /* unknown flags */

  /* Texts into no place, a small place, and a place of exactly one byte. */
  REFUSED(atropos_task_set(task, 999, 1), ATROPOS_E_INVALID);
  size_t length = atropos_last_error(NULL, 0);
  char small[8] = "1234567", one[1] = {'x'};
  CHECK(length > sizeof small);
  CHECK_EQ(atropos_last_error(small, sizeof small), length);
  CHECK_EQ(strlen(small), sizeof small - 1);
  CHECK_EQ(atropos_last_error(one, 1), length);
  CHECK_EQ(one[0], 0);
  CHECK(atropos_stats(NULL, 0) > 2);
  CHECK(atropos_stats(NULL, 4096) > 2); /* no place, whatever its size */
  CHECK(atropos_stats(small, sizeof small) > sizeof small);
  CHECK_EQ(strlen(small), sizeof small - 1);

  /* The task went through all that unharmed. */
  CHECK_EQ(atropos_current_task(), task);
  CHECK(task_is_listed(0));
  atropos_free_cancel(task);
  CHECK_EQ(atropos_reload(NULL), ATROPOS_OK); /* all defaults again */
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
