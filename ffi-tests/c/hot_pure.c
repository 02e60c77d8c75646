/* What hot calls must not do: a system call, a lock, an allocation. Shown instruction by instruction.
 *
 * A child makes each hot call once while this process steps it with ptrace and looks at every instruction it executes:
 * - none lies outside the library and this program, so there is no call into the allocator, the C library or the kernel's
 *   page of fast calls; but for the two in the loader by which a thread finds its own storage (`mov 8(%rax), %rax; ret`),
 *   and what copies or clears memory, which a debug build of the library calls where a release build has a few moves;
 * - none enters the kernel;
 * - none is an atomic read-modify-write, but for those that begin or end something: their number is bounded below.
 * Four calls that do what is forbidden show that the test would see it. */
#include "check.h"
#include <dlfcn.h>
#include <link.h>
#include <sys/ptrace.h>
#include <sys/user.h>

#if !defined __x86_64__ || defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
int main(void) {
  puts("SKIPPED: instructions are read on x86-64 only, and not under a sanitizer, whose code stands between ours");
  return 0;
}
#else

static atropos_task_t task;
static atropos_resource_t r;
static volatile int word;

typedef struct {
  const char *name;
  void (*run)(void);
  unsigned locked_most; /* atomic read-modify-writes that it may make */
} call;

#define CALL(name, expression) \
  static void do_##name(void) { (void)(expression); }
CALL(get, atropos_get_resource(r, 1))
CALL(free, atropos_free_resource(r, 1))
CALL(wait, atropos_slow_by_resource(r, 1))
CALL(get_on, atropos_get_resource_on(r, 7, 1))
CALL(free_on, atropos_free_resource_on(r, 7, 1))
CALL(wait_on, atropos_slow_by_resource_on(r, 7, 1))
CALL(blocked_by, atropos_blocked_by(r, task))
CALL(abandoned, atropos_wait_abandoned(r))
CALL(evicted, atropos_evicted(r, 1))
CALL(progress, atropos_progress(1, 2))
CALL(requested, atropos_cancel_requested())
CALL(current, atropos_current_task())
CALL(request_begin, atropos_request_begin(0))
CALL(request_end, atropos_request_end(0))
CALL(task_wait, atropos_task_slow_by_resource(task, r, 8, 1))
CALL(task_blocked_by, atropos_task_blocked_by(task, r, task))
CALL(task_get, atropos_task_get_resource(task, r, 8, 1))
CALL(task_free, atropos_task_free_resource(task, r, 8, 1))
CALL(task_abandoned, atropos_task_wait_abandoned(task, r))
CALL(task_progress, atropos_task_progress(task, 1, 2))
CALL(task_requested, atropos_task_cancel_requested(task))
CALL(task_scope, atropos_task_scope(task))
CALL(client_wait, atropos_task_client_wait(task, 1))
CALL(client_back, atropos_task_client_wait(task, 0))
CALL(task_request_begin, atropos_task_request_begin(task, 1))
CALL(task_request_end, atropos_task_request_end(task, 1))
CALL(gate_wait, atropos_trace_wait(r, 1))
CALL(gate_get, atropos_trace_get(r, 1))
CALL(gate_free, atropos_trace_free(r, 1))
CALL(release_all, atropos_task_release_all(task))
CALL(end, atropos_free_cancel(task))
CALL(begin, task = atropos_create_cancel(5))
CALL(end_again, atropos_free_cancel(task))
CALL(task_begin, task = atropos_task_create(6))
CALL(last_end, atropos_free_cancel(task))

/* The forbidden things. */
CALL(bad_syscall, getppid())
CALL(bad_lock, __atomic_fetch_add(&word, 1, __ATOMIC_SEQ_CST))
CALL(bad_swap, __atomic_exchange_n(&word, 1, __ATOMIC_SEQ_CST))
static void do_bad_malloc(void) {
  void *volatile p = malloc(100);
  free(p);
}

/* In this order: what one begins another ends. Of a request's end: its class's first completion, and the histogram. */
static const call CALLS[] = {
#define HOT(name) {#name, do_##name, 0}
    HOT(wait), HOT(blocked_by), HOT(get), HOT(free), HOT(wait_on), HOT(get_on), HOT(get_on), HOT(free_on), HOT(free_on),
    HOT(free_on), HOT(wait), HOT(abandoned), HOT(evicted), HOT(progress), HOT(requested), HOT(current),
    {"request_begin", do_request_begin, 2}, {"request_end", do_request_end, 2}, HOT(task_wait), HOT(task_blocked_by),
    HOT(task_get), HOT(task_free), HOT(task_wait), HOT(task_abandoned), HOT(task_progress), HOT(task_requested),
    HOT(task_scope), {"task_request_begin", do_task_request_begin, 2}, HOT(client_wait), HOT(client_back),
    {"task_request_end", do_task_request_end, 2}, HOT(gate_wait), HOT(gate_get), HOT(gate_free), HOT(get), HOT(get_on),
    HOT(release_all), {"end", do_end, 3}, {"begin", do_begin, 1}, {"end_again", do_end_again, 3},
    {"task_begin", do_task_begin, 1}, {"last_end", do_last_end, 3},
};
static const call FORBIDDEN[] = {
    {"system call", do_bad_syscall, 0}, {"locked add", do_bad_lock, 0}, {"swap", do_bad_swap, 0}, {"malloc", do_bad_malloc, 0}};

typedef struct {
  unsigned instructions, locked, system_calls, outside, copies;
  char where[128]; /* the first instruction outside */
} seen;

/* ---- the child ---- */

__attribute__((noinline)) static void now_comes(long n) { __asm__ volatile("" ::"r"(n) : "memory"); }

static void make_calls(const call *calls, size_t n) {
  for (size_t i = 0; i < n; i++) {
    now_comes((long)i);
    calls[i].run();
  }
  now_comes(-1);
}

/* `held`: things held all the while, which take the longer ways. */
static void set_up(const char *config, int held) {
  if (!config) return;
  init_with(config);
  r = atropos_resource_register("lock", ATROPOS_LOCK);
  task = atropos_create_cancel(1);
  CHECK(r != 0);
  for (int i = 0; i < held; i++) atropos_get_resource_on(r, 100 + (uint64_t)i, 1);
}

/* ---- the parent ---- */

static struct {
  uintptr_t begin, end;
} ours[16];
static size_t ours_n;

static int find_code(struct dl_phdr_info *info, size_t size, void *arg) {
  (void)size, (void)arg;
  /* The program comes first, under an empty name. */
  if (info->dlpi_name[0] && !strstr(info->dlpi_name, "libatropos")) return 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *p = &info->dlpi_phdr[i];
    if (p->p_type != PT_LOAD || !(p->p_flags & PF_X)) continue;
    CHECK(ours_n < sizeof ours / sizeof *ours);
    ours[ours_n].begin = info->dlpi_addr + p->p_vaddr;
    ours[ours_n++].end = info->dlpi_addr + p->p_vaddr + p->p_memsz;
  }
  return 0;
}

static int is_ours(uintptr_t at) {
  for (size_t i = 0; i < ours_n; i++)
    if (at >= ours[i].begin && at < ours[i].end) return 1;
  return 0;
}

/* Does one of the C library's functions begin here that only copy, clear or compare memory? */
static int copies_memory(uintptr_t at) {
  static const char *const names[] = {"memcpy", "memmove", "memset", "memcmp", "bcmp"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if ((uintptr_t)dlsym(RTLD_DEFAULT, names[i]) == at) return 1;
  return 0;
}

/* One instruction, by its first bytes. The code is mapped alike here and in the child. */
static void look(uintptr_t at, seen *s) {
  const uint8_t *code = (const uint8_t *)at;
  int locked = 0;
  for (;; code++) {
    if (*code == 0xf0) locked = 1;
    else if (!memchr("\x66\x67\xf2\xf3\x2e\x36\x3e\x26\x64\x65", *code, 10)) break;
  }
  if ((*code & 0xf0) == 0x40) code++; /* REX */
  if ((code[0] == 0x86 || code[0] == 0x87) && code[1] < 0xc0) locked = 1; /* xchg with memory locks by itself */
  s->instructions++;
  s->locked += (unsigned)locked;
  s->system_calls += (code[0] == 0x0f && (code[1] == 0x05 || code[1] == 0x34)) || (code[0] == 0xcd && code[1] == 0x80);
  if (is_ours(at)) {
    s->copies = 0;
    return;
  }
  s->copies |= copies_memory(at);
  if (s->copies) return;
  static const char descriptor[] = "\x48\x8b\x40\x08\xc3";
  if (memcmp((void *)at, descriptor, 5) == 0 || memcmp((void *)(at - 4), descriptor, 5) == 0) return;
  Dl_info info;
  int known = dladdr((void *)at, &info) != 0;
  const char *name = known && info.dli_sname ? info.dli_sname : "?", *file = known ? info.dli_fname : "?";
  if (!s->outside++) snprintf(s->where, sizeof s->where, "%s in %s", name, file);
}

static void step_through(const char *config, int held, const call *calls, size_t n, seen *found) {
  memset(found, 0, n * sizeof *found);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    set_up(config, held);
    make_calls(calls, n); /* once before: what is bound lazily is bound then */
    if (config) task = atropos_create_cancel(1);
    for (int i = 0; i < held; i++) atropos_get_resource_on(r, 100 + (uint64_t)i, 1);
    CHECK(ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0);
    raise(SIGSTOP);
    make_calls(calls, n);
    _exit(1); /* not reached */
  }
  int status;
  CHECK_EQ(waitpid(child, &status, 0), child);
  if (!WIFSTOPPED(status)) fprintf(stderr, "  the child ended before it was traced: wait status %#x\n", status);
  CHECK(WIFSTOPPED(status));
  for (long current = -2;;) {
    CHECK(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP);
    struct user_regs_struct regs;
    CHECK(ptrace(PTRACE_GETREGS, child, NULL, &regs) == 0);
    if (regs.rip == (uintptr_t)now_comes) {
      current = (long)regs.rdi;
      if (current == -1) break;
    } else if (current >= 0) {
      look(regs.rip, &found[current]);
    }
  }
  kill(child, SIGKILL);
  CHECK_EQ(waitpid(child, &status, 0), child);
}

static void check_calls(const char *what, const char *config, int held) {
  enum { N = sizeof CALLS / sizeof *CALLS };
  seen found[N];
  step_through(config, held, CALLS, N, found);
  int bad = 0;
  for (size_t i = 0; i < N; i++) {
    const seen *s = &found[i];
    int this_bad = s->system_calls || s->outside || s->locked > CALLS[i].locked_most;
    bad += this_bad;
    printf("%-14s %-20s %4u instructions, %u atomic\n", what, CALLS[i].name, s->instructions, s->locked);
    if (this_bad)
      fprintf(stderr, "  %s, %s: %u system calls, %u instructions outside (first: %s), %u atomic of %u allowed\n", what,
              CALLS[i].name, s->system_calls, s->outside, s->where, s->locked, CALLS[i].locked_most);
  }
  CHECK_EQ(bad, 0);
}

int main(void) {
  dl_iterate_phdr(find_code, NULL);
  CHECK(ours_n > 0);

  enum { BAD = sizeof FORBIDDEN / sizeof *FORBIDDEN };
  seen found[BAD];
  step_through(NULL, 0, FORBIDDEN, BAD, found);
  CHECK(found[0].outside > 0 && found[0].system_calls == 1);
  CHECK_EQ(found[1].locked, 1);
  CHECK_EQ(found[2].locked, 1);
  CHECK(found[3].outside > 0);

  check_calls("not started", NULL, 0);
  check_calls("off", "mode = off", 0);
  check_calls("coarse", "clock = coarse", 0);
  check_calls("coarse, 10 held", "clock = coarse", 10);
  /* Where the kernel does not trust the processor's counter, precise times come from the C library. */
  char source[32] = "";
  FILE *f = fopen("/sys/devices/system/clocksource/clocksource0/current_clocksource", "r");
  if (f && fgets(source, sizeof source, f) && strcmp(source, "tsc\n") == 0) {
    check_calls("precise", "clock = precise", 0);
    check_calls("precise, 10 held", "clock = precise", 10);
  } else {
    puts("SKIPPED precise: the kernel does not use the time stamp counter here");
  }
  if (f) fclose(f);
  return 0;
}
#endif
