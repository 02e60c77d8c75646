/* Clients with a schedule. Latency counts from when a request was due, not from when it could be sent: a stalled
 * server must not look better because its clients wait politely (coordinated omission). A user gives up a request
 * that could not even be sent within a second; that counts as a failed request of that latency.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "load.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "server.h"
#include "wire.h"

#define GIVE_UP_NS 1000000000u

typedef struct event {
  uint64_t due_ns, done_ns;
  bool ok;
} event;

typedef struct client {
  pthread_t thread;
  const load_options *options;
  wire wire;
  bool writes;
  double interval_ns;
  uint64_t random, start_ns, end_ns;
  _Atomic uint64_t answered;
  uint64_t given_up, cancelled, errors;
  size_t count, room;
  event *events;
} client;

typedef struct culprit {
  pthread_t thread;
  wire wire;
  uint64_t send_ns, done_ns;
  const char *command;
  atomic_bool done;
  char reply[sizeof((wire *)0)->in];
} culprit;

static uint64_t next_random(uint64_t *state) { /* xorshift64 */
  uint64_t x = *state;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return *state = x;
}

static void sleep_until(uint64_t ns) {
  struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {}
}

static int connect_to(const char *path, wire *w) {
  struct sockaddr_un address;
  *w = (wire){.fd = -1};
  if (!wire_address(&address, path)) return -1;
  w->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (w->fd >= 0 && connect(w->fd, (struct sockaddr *)&address, sizeof address) == 0) return 0;
  fprintf(stderr, "cannot connect to %s: %s\n", path, strerror(errno));
  return -1;
}

static void record(client *c, uint64_t due_ns, uint64_t done_ns, bool ok) {
  if (c->count == c->room) {
    c->room = c->room ? c->room * 2 : 4096;
    c->events = realloc(c->events, c->room * sizeof *c->events);
    if (!c->events) abort();
  }
  c->events[c->count++] = (event){due_ns, done_ns, ok};
}

static void *client_main(void *arg) {
  client *c = arg;
  char line[sizeof c->wire.in];
  double due = (double)c->start_ns + c->interval_ns * (double)(next_random(&c->random) % 1000) / 1000;
  for (;; due += c->interval_ns * (0.5 + (double)(next_random(&c->random) % 1000) / 1000)) {
    uint64_t due_ns = (uint64_t)due;
    if (due_ns >= c->end_ns) return NULL;
    uint64_t now = now_ns();
    if (now < due_ns) {
      sleep_until(due_ns);
    } else if (now - due_ns > GIVE_UP_NS) {
      c->given_up++;
      record(c, due_ns, now, false);
      continue;
    }
    unsigned account = (unsigned)(next_random(&c->random) % DEMO_ACCOUNTS) + 1;
    int amount = (int)(next_random(&c->random) % 201) - 100;
    bool sent = !c->writes ? wire_send(&c->wire, "READ %u", account)
              : c->options->culprit == CULPRIT_CPU ? wire_send(&c->wire, "BRANCH %u", account)
              : c->options->culprit == CULPRIT_IO ? wire_send(&c->wire, "DURABLE %u %d", account, amount)
                                                  : wire_send(&c->wire, "WRITE %u %d", account, amount);
    if (!sent || !wire_recv(&c->wire, line)) {
      fprintf(stderr, "the server closed a client's connection\n");
      c->errors++;
      return NULL;
    }
    bool ok = strncmp(line, "OK ", 3) == 0;
    uint64_t done = now_ns();
    record(c, due_ns, done, ok);
    if (ok) {
      atomic_fetch_add_explicit(&c->answered, 1, memory_order_relaxed);
    } else if (strncmp(line, "ERR cancelled ", 14) == 0) {
      c->cancelled++;
    } else if (done < c->end_ns) { /* after the end the server may say "stopping" */
      if (c->errors++ == 0) fprintf(stderr, "a client was answered: %s\n", line);
    }
  }
}

static void *culprit_main(void *arg) {
  culprit *c = arg;
  sleep_until(c->send_ns);
  if (!wire_send(&c->wire, "%s", c->command) || !wire_recv(&c->wire, c->reply))
    strcpy(c->reply, "ERR connection closed");
  c->done_ns = now_ns();
  atomic_store(&c->done, true);
  return NULL;
}

/* How many days take `seconds`? Asked of the server before the load starts. In CPU time of this process, which holds
 * the server too: a neighbour on the machine must not make the huge request look slow and hence come out small. */
static double cpu_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int measure_days(const char *socket_path, double seconds, uint32_t *days, uint64_t *rows) {
  enum { SAMPLE_DAYS = 60 };
  wire w;
  char reply[sizeof w.in];
  if (connect_to(socket_path, &w) != 0) return -1;
  double before_s = cpu_s();
  bool ok = wire_send(&w, "STATEMENTS %d", SAMPLE_DAYS) && wire_recv(&w, reply) && sscanf(reply, "OK %lu", rows) == 1;
  double took_s = cpu_s() - before_s;
  close(w.fd);
  if (!ok) {
    fprintf(stderr, "the trial of the huge request failed: %s\n", reply);
    return -1;
  }
  *days = (uint32_t)fmin(100000, fmax(1, SAMPLE_DAYS * seconds / took_s));
  return 0;
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Sorts `v`. Nearest rank; 0 when there is nothing. */
static double percentile(double *v, size_t n, double p) {
  if (n == 0) return 0;
  qsort(v, n, sizeof *v, by_size);
  size_t rank = (size_t)ceil(p * (double)n);
  return v[rank ? rank - 1 : 0];
}

typedef struct samples {
  double *v;
  size_t n;
} samples;

/* Latencies in ms of requests that ended in [from, to); with `ages` also how long those wait that are open at `to`. */
static samples collect(const client *clients, uint32_t n, int writes, uint64_t from, uint64_t to, bool ages) {
  size_t room = 1;
  for (uint32_t i = 0; i < n; i++) room += clients[i].count;
  samples s = {malloc(room * sizeof *s.v), 0};
  if (!s.v) abort();
  for (uint32_t i = 0; i < n; i++) {
    if (writes >= 0 && clients[i].writes != (bool)writes) continue;
    for (size_t k = 0; k < clients[i].count; k++) {
      const event *e = &clients[i].events[k];
      if (e->done_ns >= from && e->done_ns < to) s.v[s.n++] = (double)(e->done_ns - e->due_ns) / 1e6;
      else if (ages && e->due_ns < to && e->done_ns >= to) s.v[s.n++] = (double)(to - e->due_ns) / 1e6;
    }
  }
  return s;
}

static double rate(const client *clients, uint32_t n, bool writes, uint64_t from, uint64_t to) {
  uint64_t count = 0;
  for (uint32_t i = 0; i < n; i++)
    for (size_t k = 0; clients[i].writes == writes && k < clients[i].count; k++) {
      const event *e = &clients[i].events[k];
      count += e->ok && e->done_ns >= from && e->done_ns < to;
    }
  return to > from ? (double)count * 1e9 / (double)(to - from) : 0;
}

static double p99_ms(const client *clients, uint32_t n, int writes, uint64_t from, uint64_t to) {
  samples s = collect(clients, n, writes, from, to, true);
  double p = percentile(s.v, s.n, 0.99);
  free(s.v);
  return p;
}

static void evaluate(const client *clients, uint32_t n, uint64_t start, uint64_t onset, uint64_t end, load_result *r) {
  const uint64_t step = (uint64_t)(LOAD_BUCKET_S * 1e9);
  r->reads_per_s = rate(clients, n, false, onset, end);
  r->writes_per_s = rate(clients, n, true, onset, end);
  r->p99_ms = p99_ms(clients, n, -1, onset, end);
  r->read_p99_ms = p99_ms(clients, n, 0, onset, end);
  r->write_p99_ms = p99_ms(clients, n, 1, onset, end);
  /* The first half second warms the caches. */
  double before = rate(clients, n, true, start + (onset - start > 1000000000u ? 500000000u : 0), onset);
  for (uint32_t b = 0; b < r->buckets; b++) {
    uint64_t from = start + b * step, to = from + step;
    load_bucket *line = &r->timeline[b];
    samples s = collect(clients, n, -1, from, to, true);
    line->reads_per_s = rate(clients, n, false, from, to);
    line->writes_per_s = rate(clients, n, true, from, to);
    line->p50_ms = percentile(s.v, s.n, 0.50);
    line->p99_ms = percentile(s.v, s.n, 0.99);
    free(s.v);
    if (to > onset && line->writes_per_s < before / 2) {
      r->stall_s += (double)(to - (from > onset ? from : onset)) / 1e9;
      r->recovered_ms = (double)(to - onset) / 1e6;
    }
  }
}

static void tick(FILE *out, const client *clients, uint32_t n, double t_s, uint32_t waiting, const char *culprit) {
  uint64_t answered[2] = {0, 0};
  for (uint32_t i = 0; i < n; i++) answered[clients[i].writes] += atomic_load_explicit(&clients[i].answered, memory_order_relaxed);
  fprintf(out, "{\"type\":\"tick\",\"t_s\":%.1f,\"reads\":%llu,\"writes\":%llu,\"waiting_writers\":%u,\"culprit\":\"%s\"}\n", t_s,
          (unsigned long long)answered[0], (unsigned long long)answered[1], waiting, culprit);
  fflush(out);
}

static const char *huge_state(culprit *c) {
  server_stats s = server_stats_now();
  if (!atomic_load(&c->done)) return s.retry_waits ? "waits" : s.retry_began_ns ? "runs again" : "running";
  return strncmp(c->reply, "OK ", 3) == 0 ? "finished" : "cancelled";
}

int load_run(const load_options *o, FILE *progress, load_result *r) {
  *r = (load_result){.huge_days = o->huge_days, .buckets = (uint32_t)(o->seconds / LOAD_BUCKET_S)};
  bool writes_rows = o->culprit == CULPRIT_LOCK;
  if (writes_rows && r->huge_days == 0 && measure_days(o->socket_path, o->huge_seconds, &r->huge_days, &r->statement_rows) != 0) return -1;
  uint32_t n = o->readers + o->writers, connected = 0;
  client *clients = calloc(n, sizeof *clients);
  r->timeline = calloc(r->buckets ? r->buckets : 1, sizeof *r->timeline);
  char command[64];
  if (writes_rows) snprintf(command, sizeof command, "STATEMENTS %u %u", r->huge_days, o->retry_s);
  else snprintf(command, sizeof command, "%s 1000000 %u", o->culprit == CULPRIT_CPU ? "RANK" : "EXPORT", o->huge_threads);
  culprit bad = {.command = command, .wire = {.fd = -1}};
  if (!clients || !r->timeline) abort();
  while (connected < n && connect_to(o->socket_path, &clients[connected].wire) == 0) connected++;
  int rc = connected == n && (!o->huge || connect_to(o->socket_path, &bad.wire) == 0) ? 0 : -1;
  if (rc == 0) {
    uint64_t start = now_ns() + 50000000u, end = start + (uint64_t)(o->seconds * 1e9);
    bad.send_ns = start + (uint64_t)(o->onset_s * 1e9);
    for (uint32_t i = 0; i < n; i++) {
      client *c = &clients[i];
      c->options = o;
      c->writes = i >= o->readers;
      c->interval_ns = c->writes ? o->writers * 1e9 / o->writes_per_s : o->readers * 1e9 / o->reads_per_s;
      c->random = (o->seed + 1) * 0x9E3779B97F4A7C15u + (uint64_t)i * 0xD1B54A32D192ED03u + 1;
      c->start_ns = start, c->end_ns = end;
      if (pthread_create(&c->thread, NULL, client_main, c) != 0) abort();
    }
    if (o->huge && pthread_create(&bad.thread, NULL, culprit_main, &bad) != 0) abort();
    for (uint32_t b = 0; b < r->buckets; b++) {
      sleep_until(start + (uint64_t)((b + 1) * LOAD_BUCKET_S * 1e9));
      r->timeline[b].waiting_writers = server_stats_now().waiting_writers;
      const char *state = !o->huge ? "none" : now_ns() < bad.send_ns ? "to come" : huge_state(&bad);
      if (progress) tick(progress, clients, n, (b + 1) * LOAD_BUCKET_S, r->timeline[b].waiting_writers, state);
    }
    sleep_until(end);
    /* What still runs now would keep the clients beyond the end; but who waits for a quiet time shall see it come. */
    bool retry_waits = server_stats_now().retry_waits;
    if (!retry_waits) server_interrupt_all();
    for (uint32_t i = 0; i < n; i++) {
      pthread_join(clients[i].thread, NULL);
      r->given_up += clients[i].given_up;
      r->victims_cancelled += clients[i].cancelled;
      r->errors += clients[i].errors;
    }
    uint64_t onset = bad.send_ns;
    if (o->huge) {
      for (uint64_t next = end; retry_waits && !atomic_load(&bad.done);) {
        sleep_until(next += (uint64_t)(LOAD_BUCKET_S * 1e9));
        if (progress) tick(progress, clients, n, (double)(next - start) / 1e9, 0, huge_state(&bad));
      }
      pthread_join(bad.thread, NULL);
      server_stats s = server_stats_now();
      if (s.huge_locked_ns >= bad.send_ns) onset = s.huge_locked_ns;
      uint64_t rows = 0;
      strcpy(r->huge_reply, bad.reply);
      r->huge_finished = sscanf(bad.reply, "OK %lu", &rows) == 1;
      bool told_so = strncmp(bad.reply, "ERR cancelled ", 14) == 0;
      r->huge_cancelled = told_so || s.huge_cancelled_ns >= onset;
      r->huge_ran_s = (double)((s.huge_cancelled_ns >= onset ? s.huge_cancelled_ns : bad.done_ns) - onset) / 1e9;
      r->huge_retried = s.retry_began_ns > end;
      if (s.retry_began_ns) {
        r->retry_began_s = (double)(s.retry_began_ns - onset) / 1e9;
        r->retry_ran_s = (double)(bad.done_ns - s.retry_began_ns) / 1e9;
      }
      if (writes_rows) r->statement_rows += rows;
    }
    r->onset_s = (double)(onset - start) / 1e9;
    evaluate(clients, n, start, onset, end, r);
  }
  for (uint32_t i = 0; i < connected; i++) close(clients[i].wire.fd), free(clients[i].events);
  if (bad.wire.fd >= 0) close(bad.wire.fd);
  free(clients);
  return rc;
}
