/* The demonstration: server and load in one process, over a Unix socket. JSON lines on stdout, complaints on stderr.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <getopt.h>
#include <sched.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "atropos.h"
#include "load.h"
#include "server.h"

static const char USAGE[] =
  "usage: atropos-sqlite [options]\n"
  "  --mode clean|off|observe|enforce  clean: no huge request, library off; default enforce\n"
  "  --culprit lock|cpu|io  what the huge request takes, default lock; cpu confines the program to two processors\n"
  "  --seconds N       length of the run, default 12 (1..600)\n"
  "  --onset S         when the huge request comes, default 2\n"
  "  --huge-seconds S  how long it takes if left alone on an idle machine (measured), default 7\n"
  "  --huge-days N     its size instead, to give several runs the same work (1..100000)\n"
  "  --retry-s N       a cancelled STATEMENTS may run again at a quiet time within N s, default 120, 0: never (0..86400)\n"
  "  --slo-ms X        objective for the p99, default 25; with --culprit cpu or io 50\n"
  "  --load X          factor on the load, default 1 (0.01..100)\n"
  "  --seed N          default 1\n"
  "  --dir DIR         where the database and the socket go, default .\n"
  "  --config FILE     Atropos configuration, \"key = value\" lines\n";

static int usage_error(const char *what, const char *value) {
  fprintf(stderr, "%s: %s\n%s", what, value, USAGE);
  return 2;
}

static bool number(const char *text, double least, double most, double *out) {
  char *end;
  *out = strtod(text, &end);
  return end != text && !*end && *out >= least && *out <= most;
}

static void print_string(const char *s) {
  putchar('"');
  for (; *s; s++) {
    if (*s == '"' || *s == '\\') putchar('\\'), putchar(*s);
    else if ((unsigned char)*s < 0x20) printf("\\u%04x", *s);
    else putchar(*s);
  }
  putchar('"');
}

typedef struct decision_list { /* the JSON texts with commas between */
  char *text;
  size_t size;
} decision_list;

static void on_decision(const char *json, void *arg) {
  decision_list *list = arg;
  size_t length = strlen(json);
  list->text = realloc(list->text, list->size + length + 2);
  if (!list->text) abort();
  if (list->size) list->text[list->size++] = ',';
  memcpy(list->text + list->size, json, length + 1);
  list->size += length;
}

static void print_ms(const char *name, bool known, double ms) {
  if (known) printf(",\"%s\":%.1f", name, ms);
  else printf(",\"%s\":null", name);
}

static const char *const CULPRITS[] = {"lock", "cpu", "io"};

/* At most two processors, so that what is plenty for them is plenty on every machine. Before any thread. */
static unsigned confine(void) {
  cpu_set_t allowed, two;
  unsigned cpus = 0;
  CPU_ZERO(&two);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 2;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus < 2; cpu++)
    if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &two), cpus++;
  return sched_setaffinity(0, sizeof two, &two) == 0 ? cpus : 2;
}

/* The library's counters of retries, as it gives them. */
static void print_counters(const char *stats) {
  static const char *const NAMES[] = {"retries_asked", "retried", "retries_succeeded", "retries_failed", "retries_dropped",
                                      "retry_waited_ns", "work_wasted_ns"};
  for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
    char name[40];
    snprintf(name, sizeof name, "\"%s\":", NAMES[i]);
    const char *at = stats ? strstr(stats, name) : NULL;
    printf(",%s%llu", name, at ? strtoull(at + strlen(name), NULL, 10) : 0ull);
  }
}

static char *stats_text(void) {
  size_t room = atropos_stats(NULL, 0) + 4096; /* it may grow meanwhile */
  char *text = calloc(1, room);
  if (text) atropos_stats(text, room);
  return text;
}

static void print_result(const char *mode, const load_options *o, const load_result *r, server_stats s, double slo_ms, bool consistent, const char *decisions, const char *stats) {
  bool told = s.first_cancel_ns != 0 && s.first_cancel_ns >= s.huge_locked_ns;
  printf("{\"type\":\"result\",\"case\":\"sqlite\",\"host\":\"sqlite\",\"host_version\":\"%s\",\"mode\":\"%s\",\"culprit\":\"%s\",\"slo_ms\":%.0f,\"seed\":%llu,\"duration_s\":%.1f",
         sqlite3_libversion(), mode, CULPRITS[o->culprit], slo_ms, (unsigned long long)o->seed, o->seconds);
  printf(",\"tps\":%.1f,\"reads_per_s\":%.1f,\"writes_per_s\":%.1f,\"p99_ms\":%.3f,\"read_p99_ms\":%.3f,\"write_p99_ms\":%.3f",
         r->reads_per_s + r->writes_per_s, r->reads_per_s, r->writes_per_s, r->p99_ms, r->read_p99_ms, r->write_p99_ms);
  printf(",\"stall_s\":%.2f,\"onset_ms\":%.1f,\"onset_ns\":%llu", r->stall_s, r->onset_s * 1e3, (unsigned long long)s.huge_locked_ns);
  print_ms("first_cancel_ms", told, (double)(s.first_cancel_ns - s.huge_locked_ns) / 1e6);
  print_ms("recovered_ms", o->huge, r->recovered_ms);
  printf(",\"cancelled\":%llu,\"false_cancelled\":%llu,\"given_up\":%llu,\"errors\":%llu,\"consistent\":%s",
         (unsigned long long)(r->huge_cancelled + r->victims_cancelled), (unsigned long long)r->victims_cancelled,
         (unsigned long long)r->given_up, (unsigned long long)r->errors, consistent ? "true" : "false");
  printf(",\"huge\":{\"days\":%u,\"rows\":%llu,\"cancelled\":%s,\"finished\":%s,\"ran_s\":%.2f,\"reply\":", r->huge_days,
         (unsigned long long)r->huge_days * DEMO_ACCOUNTS, r->huge_cancelled ? "true" : "false", r->huge_finished ? "true" : "false", r->huge_ran_s);
  print_string(r->huge_reply);
  printf("},\"retry\":{\"ran_after_the_load\":%s", r->huge_retried ? "true" : "false");
  print_ms("began_ms", s.retry_began_ns != 0, r->retry_began_s * 1e3);
  print_ms("ran_ms", s.retry_began_ns != 0, r->retry_ran_s * 1e3);
  print_counters(stats);
  printf("},\"decisions\":[%s],\"bucket_s\":%.1f,\"timeline\":[", decisions ? decisions : "", LOAD_BUCKET_S);
  for (uint32_t b = 0; b < r->buckets; b++) {
    const load_bucket *l = &r->timeline[b];
    printf("%s{\"t_s\":%.1f,\"reads_per_s\":%.0f,\"writes_per_s\":%.0f,\"p50_ms\":%.3f,\"p99_ms\":%.3f,\"waiting_writers\":%u}", b ? "," : "",
           (b + 1) * LOAD_BUCKET_S, l->reads_per_s, l->writes_per_s, l->p50_ms, l->p99_ms, l->waiting_writers);
  }
  printf("]}\n");
}

int main(int argc, char **argv) {
  static const char *const MODES[] = {"clean", "off", "observe", "enforce"};
  static const uint32_t ATROPOS_MODES[] = {ATROPOS_MODE_OFF, ATROPOS_MODE_OFF, ATROPOS_MODE_OBSERVE, ATROPOS_MODE_ENFORCE};
  enum { MODE, CULPRIT, SECONDS, ONSET, HUGE_SECONDS, HUGE_DAYS, RETRY, SLO, LOAD, SEED, DIR, CONFIG, HELP };
  static const struct option OPTIONS[] = {
    {"mode", 1, NULL, MODE}, {"culprit", 1, NULL, CULPRIT}, {"seconds", 1, NULL, SECONDS}, {"onset", 1, NULL, ONSET}, {"huge-seconds", 1, NULL, HUGE_SECONDS},
    {"huge-days", 1, NULL, HUGE_DAYS}, {"retry-s", 1, NULL, RETRY}, {"slo-ms", 1, NULL, SLO}, {"load", 1, NULL, LOAD}, {"seed", 1, NULL, SEED},
    {"dir", 1, NULL, DIR}, {"config", 1, NULL, CONFIG}, {"help", 0, NULL, HELP}, {0}};
  int mode = 3, culprit = CULPRIT_LOCK;
  double seconds = 12, onset = 2, huge_seconds = 7, huge_days = 0, retry_s = 120, slo_ms = 0, load = 1, seed = 1;
  const char *dir = ".", *config = NULL;
  for (int c; (c = getopt_long(argc, argv, "", OPTIONS, NULL)) != -1;) {
    bool ok = true;
    switch (c) {
      case MODE:
        for (mode = 3; mode >= 0 && strcmp(optarg, MODES[mode]) != 0;) mode--;
        ok = mode >= 0;
        break;
      case CULPRIT:
        for (culprit = 2; culprit >= 0 && strcmp(optarg, CULPRITS[culprit]) != 0;) culprit--;
        ok = culprit >= 0;
        break;
      case SECONDS: ok = number(optarg, 1, 600, &seconds); break;
      case ONSET: ok = number(optarg, 0, 600, &onset); break;
      case HUGE_SECONDS: ok = number(optarg, 0.05, 600, &huge_seconds); break;
      case HUGE_DAYS: ok = number(optarg, 1, 100000, &huge_days); break;
      case RETRY: ok = number(optarg, 0, 86400, &retry_s); break;
      case SLO: ok = number(optarg, 0.1, 60000, &slo_ms); break;
      case LOAD: ok = number(optarg, 0.01, 100, &load); break;
      case SEED: ok = number(optarg, 0, 1e15, &seed); break;
      case DIR: dir = optarg; break;
      case CONFIG: config = optarg; break;
      case HELP: fputs(USAGE, stdout); return 0;
      default: return usage_error("unknown or incomplete option", argv[optind - 1]);
    }
    if (!ok) return usage_error("bad value", optarg);
  }
  if (optind < argc) return usage_error("unexpected argument", argv[optind]);
  if (onset >= seconds) return usage_error("--onset must lie before the end of the run", "see --seconds");

  char db_path[480], socket_path[480];
  snprintf(db_path, sizeof db_path, "%s/accounts.db", dir);
  snprintf(socket_path, sizeof socket_path, "%s/accounts.sock", dir);
  if (slo_ms == 0) slo_ms = culprit == CULPRIT_LOCK ? 25 : 50;
  unsigned cpus = culprit == CULPRIT_CPU ? confine() : 2;
  /* The write lock reports itself; the machine's resources the library looks after by itself, if it is told to. */
  const char *const TEXTS[] = {NULL, "system_cpu = on\n", "system_io = on\n"};
  const char *text = TEXTS[culprit];
  server_options server = {socket_path, db_path, (uint64_t)seed, ATROPOS_MODES[mode], slo_ms, config, text};
  load_options o = {.socket_path = socket_path, .seconds = seconds, .onset_s = onset, .huge_seconds = huge_seconds,
                    .huge_days = (uint32_t)huge_days, .culprit = (culprit_kind)culprit, .retry_s = (uint32_t)retry_s, .huge = mode != 0, .readers = 4, .writers = 8,
                    .reads_per_s = 3000 * load, .writes_per_s = 500 * load, .seed = (uint64_t)seed};
  if (culprit == CULPRIT_CPU) o.readers = 0, o.writes_per_s = 60 * cpus * load, o.huge_threads = 24 * cpus;
  if (culprit == CULPRIT_IO) o.readers = 0, o.writes_per_s = 200 * load, o.huge_threads = 32;
  load_result r;
  if (server_start(&server) != 0) return 1;
  if (load_run(&o, stdout, &r) != 0) return 1;
  decision_list decisions = {0};
  atropos_decisions(on_decision, &decisions);
  server_stats seen = server_stats_now();
  char *stats = stats_text();
  bool consistent = server_is_consistent(r.statement_rows);
  server_stop();
  print_result(MODES[mode], &o, &r, seen, slo_ms, consistent, decisions.text, stats);
  free(r.timeline);
  free(decisions.text);
  free(stats);
  return consistent ? 0 : 1;
}
