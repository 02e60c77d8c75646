/* Configuration errors name the place, the key and what is allowed, and change nothing. */
#include "check.h"

static void refused(const char *text, const char *place, const char *key, const char *allowed) {
  atropos_config c = config_of(text);
  CHECK_EQ(atropos_init(&c), ATROPOS_E_CONFIG);
  CHECK_HAS(last_error(), place);
  CHECK_HAS(last_error(), key);
  CHECK_HAS(last_error(), allowed);
  CHECK_EQ(atropos_shutdown(), ATROPOS_E_NOT_INIT); /* nothing was begun */
}

static void refused_size(size_t size) {
  char bytes[2 * sizeof(atropos_config)];
  memset(bytes, 0, sizeof bytes);
  memcpy(bytes, &size, sizeof size);
  CHECK_EQ(atropos_init((const atropos_config *)(const void *)bytes), ATROPOS_E_INVALID);
  char number[32];
  snprintf(number, sizeof number, "%zu", size);
  CHECK_HAS(last_error(), number);
  snprintf(number, sizeof number, "%zu", sizeof(atropos_config));
  CHECK_HAS(last_error(), number);
}

static void refused_field(const atropos_config *c, const char *key, const char *allowed) {
  CHECK_EQ(atropos_init(c), ATROPOS_E_CONFIG);
  CHECK_HAS(last_error(), key);
  CHECK_HAS(last_error(), allowed);
}

static void write_file(const char *path, const char *text) {
  FILE *f = fopen(path, "w");
  CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0);
}

/* The mode that file, text and field together give, told by the gate: 1 = on. */
static int gate_with(const char *file, const char *text, uint32_t mode) {
  atropos_config c = config_of(text);
  write_file("some.conf", file);
  c.file = "some.conf";
  c.mode = mode;
  CHECK_EQ(atropos_init(&c), ATROPOS_OK);
  int on = atropos_trace_is_on();
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return on;
}

int main(void) {
  refused("slo_mss = 5", "line 1", "slo_mss", "slo_ms");
  refused("# fine\n\nmode = observe\nspeed = 3\n", "line 4", "speed", "window_ms");
  refused("mode = maybe", "line 1", "mode", "off, observe or enforce");
  refused("mode = OBSERVE", "line 1", "mode", "off, observe or enforce");
  refused("\nwindow_ms = banana", "line 2", "window_ms", "10000");
  refused("window_ms = 5", "line 1", "window_ms", "from 20 to 10000");
  refused("window_ms = 10001", "line 1", "window_ms", "from 20 to 10000");
  refused("window_ms = -100", "line 1", "window_ms", "from 20 to 10000");
  refused("window_ms = 99999999999999999999", "line 1", "window_ms", "from 20 to 10000");
  refused("window_ms = 100 200", "line 1", "window_ms", "from 20 to 10000");
  refused("window_ms =", "line 1", "window_ms", "from 20 to 10000");
  refused("max_tasks = 15", "line 1", "max_tasks", "from 16 to 65536");
  refused("max_workers = 65537", "line 1", "max_workers", "from 16 to 65536");
  refused("trigger_windows = 101", "line 1", "trigger_windows", "from 1 to 100");
  refused("verify_ms = 9", "line 1", "verify_ms", "from 10 to 60000");
  refused("slo_tolerance = nan", "line 1", "slo_tolerance", "from 0.01 to 10");
  refused("slo_tolerance = inf", "line 1", "slo_tolerance", "from 0.01 to 10");
  refused("contention_threshold = 1.5", "line 1", "contention_threshold", "to 1");
  refused("min_relief = -0.1", "line 1", "min_relief", "to 1");
  refused("cancel_share = 2", "line 1", "cancel_share", "to 1");
  refused("mode", "line 1", "mode", "key = value");
  refused("= 5", "line 1", "key", "mode");

  refused_size(0);
  refused_size(8);
  refused_size(sizeof(atropos_config) - 1);
  refused_size(SIZE_MAX);

  atropos_config c = config_of(NULL);
  c.window_ms = 5;
  refused_field(&c, "window_ms", "from 20 to 10000");
  c = config_of(NULL), c.mode = 9;
  refused_field(&c, "mode", "ENFORCE");
  c = config_of(NULL), c.slo_ms = -1;
  refused_field(&c, "slo_ms", "from 0");
  volatile double zero = 0;
  c = config_of(NULL), c.slo_tolerance = zero / zero;
  refused_field(&c, "slo_tolerance", "from 0.01 to 10");
  c = config_of(NULL), c.contention_threshold = 2;
  refused_field(&c, "contention_threshold", "to 1");
  c = config_of("mode = \xff");
  CHECK(atropos_init(&c) == ATROPOS_E_CONFIG || atropos_init(&c) == ATROPOS_E_INVALID);

  /* Files: errors name the file. */
  c = config_of(NULL), c.file = "no such file.conf";
  CHECK(atropos_init(&c) != ATROPOS_OK);
  CHECK_HAS(last_error(), "no such file.conf");
  write_file("bad.conf", "mode = observe\n\n# here\ntypo = 1\n");
  c.file = "bad.conf";
  CHECK_EQ(atropos_init(&c), ATROPOS_E_CONFIG);
  CHECK_HAS(last_error(), "bad.conf");
  CHECK_HAS(last_error(), "line 4");
  CHECK_HAS(last_error(), "typo");

  /* defaults < file < text < fields */
  CHECK_EQ(gate_with("", NULL, 0), 1);
  CHECK_EQ(gate_with("mode = off", NULL, 0), 0);
  CHECK_EQ(gate_with("mode = off", "mode = observe", 0), 1);
  CHECK_EQ(gate_with("mode = enforce", "mode = off", 0), 0);
  CHECK_EQ(gate_with("mode = off", "mode = off", ATROPOS_MODE_OBSERVE), 1);
  CHECK_EQ(gate_with("mode = observe", "mode = enforce", ATROPOS_MODE_OFF), 0);
  CHECK_EQ(gate_with("  mode=off  # comment\r\n\t\n", NULL, 0), 0);

  /* A refused reload leaves everything as it was. */
  init_with("mode = observe\nslo_ms = 50");
  c = config_of("mode = off\nnonsense = 1");
  CHECK_EQ(atropos_reload(&c), ATROPOS_E_CONFIG);
  CHECK_HAS(last_error(), "line 2");
  CHECK(atropos_trace_is_on());
  c = config_of("mode = off");
  c.size--;
  CHECK_EQ(atropos_reload(&c), ATROPOS_E_INVALID);
  CHECK(atropos_trace_is_on());
  c = config_of("region_path = elsewhere");
  CHECK_EQ(atropos_reload(&c), ATROPOS_E_CONFIG);
  CHECK_HAS(last_error(), "region_path");
  CHECK_EQ(atropos_shutdown(), ATROPOS_OK);
  return 0;
}
