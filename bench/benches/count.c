/* The program whose instructions callgrind counts: `cargo xtask instructions` gives it a configuration.
 *
 * What is counted stands between two switches and is dumped under its name; a dump begins again from 0.
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "host.h"
#include <stdio.h>
#include <string.h>
#include <valgrind/callgrind.h>

enum { ROUNDS = 1000, WARM = 16 };

int main(int argc, char **argv) {
  if (argc != 2 || bench_init(argv[1]) || bench_tick()) return 1;
  for (const bench_loop *l = bench_loops; l->name; l++) {
    if (strcmp(l->group, "hot") != 0) continue;
    l->run(WARM);
    CALLGRIND_TOGGLE_COLLECT;
    l->run(ROUNDS);
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_DUMP_STATS_AT(l->name);
    printf("%s %u\n", l->name, (unsigned)(ROUNDS * l->calls));
  }
  return bench_shutdown() ? 1 : 0;
}
