/* The program whose instructions callgrind counts: `cargo xtask instructions`.
 *
 *     count calls CONFIGURATION            each loop of the hot calls
 *     count ticks CONFIGURATION STALLED    steps of the controller with 1,000 tasks
 *
 * What is counted stands between two switches and is dumped under its name; a dump begins again from 0.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "host.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

enum { ROUNDS = 1000, WARM = 16, TICKS = 40 };

static int calls(void) {
  for (const bench_loop *l = bench_loops; l->name; l++) {
    if (strcmp(l->group, "hot") != 0) continue;
    l->run(WARM);
    CALLGRIND_TOGGLE_COLLECT;
    l->run(ROUNDS);
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_DUMP_STATS_AT(l->name);
    printf("%s %u\n", l->name, (unsigned)(ROUNDS * l->calls));
  }
  return 0;
}

static int ticks(int stalled) {
  if (crowd_begin(1000, 30, 8, stalled) == 0) return 3;
  for (int i = 0; i < TICKS; i++) {
    usleep(6000); /* until the next step is due */
    CALLGRIND_TOGGLE_COLLECT;
    int code = bench_tick();
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_DUMP_STATS_AT("tick");
    if (code) return 4;
    printf("tick 1\n");
  }
  crowd_end();
  return 0;
}

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  if (bench_init(argv[2]) || bench_tick()) return 1;
  int code = strcmp(argv[1], "calls") == 0 ? calls() : ticks(argc > 3 && argv[3][0] == '1');
  return bench_shutdown() || code ? code + 10 : 0;
}
