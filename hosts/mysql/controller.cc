/*
 * The thread that drives the library, and its way to the error log. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A thread of the server's making, since what the library calls back (edges, cancel) takes the server's mutexes. Should
 * it not get to run, nobody is cancelled and nothing else changes.
 */
#include "surface.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <utility>

#include "my_thread.h"
#include "mysql/components/services/log_builtins.h"
#include "mysql/psi/mysql_thread.h"
#include "mysqld_error.h"

SERVICE_TYPE(registry) *reg_srv;
SERVICE_TYPE(log_builtins) *log_bi;
SERVICE_TYPE(log_builtins_string) *log_bs;

/* ---- the error log ---- */

/* The library's messages wait here until its frames are left: writing a log may block on a disk, which must not happen
 * under the library's locks, and an exception must not cross it. */
namespace {
struct Message {
  int level;
  char text[1024];
};
constexpr unsigned kMessages = 32;
std::mutex messages_lock;
Message messages[kMessages];
unsigned first_message, message_count, messages_lost;

bool take_message(Message *message, unsigned *lost) {
  const std::lock_guard<std::mutex> guard(messages_lock);
  *lost = std::exchange(messages_lost, 0);
  if (message_count == 0) return false;
  *message = messages[first_message];
  first_message = (first_message + 1) % kMessages;
  message_count--;
  return true;
}
}  // namespace

static void keep_message(int level, const char *text, void *) {
  const std::lock_guard<std::mutex> guard(messages_lock);
  if (message_count == kMessages) {
    messages_lost++;
    return;
  }
  Message &message = messages[(first_message + message_count++) % kMessages];
  message.level = level;
  snprintf(message.text, sizeof message.text, "%s", text);
}

void atm_log(int level, const char *format, ...) {
  char text[2048];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  /* What was done and why must be in the log whatever log_error_verbosity is, and it is no fault of the server's:
   * that is what the system level is for. */
  const loglevel severity = level <= 1   ? ERROR_LEVEL
                            : level == 2 ? WARNING_LEVEL
                            : level == 3 ? SYSTEM_LEVEL
                                         : INFORMATION_LEVEL;
  LogPluginErrMsg(severity, ER_LOG_PRINTF_MSG, "%s", text);
}

bool atm_log_open() {
  if (init_logging_service_for_plugin(&reg_srv, &log_bi, &log_bs)) return true;
  atropos_set_log(keep_message, nullptr);
  return false;
}

void atm_log_flush() {
  Message message;
  unsigned lost;
  while (take_message(&message, &lost)) atm_log(message.level, "%s", message.text);
  if (lost > 0) atm_log(2, "%u more messages came at once and were dropped", lost);
}

void atm_log_close() {
  atm_log_flush();
  atropos_set_log(nullptr, nullptr);
  deinit_logging_service_for_plugin(&reg_srv, &log_bi, &log_bs);
}

/* ---- the thread ---- */

static constexpr std::chrono::milliseconds kPauseWhileOff{1000};

static PSI_thread_key key_thread_controller;
static PSI_thread_info thread_info[] = {
    {&key_thread_controller, "controller", "atropos", PSI_FLAG_SINGLETON, 0, "Finds the culprits of overloads."}};

/* Not mysql_cond_timedwait: that waits by the wall clock, and a clock that is set back would stop the controller. */
static std::mutex wake_lock;
static std::condition_variable wake;
static bool stop_asked, wake_asked;

static my_thread_handle thread;
static bool thread_runs;

void atm_controller_wake() {
  const std::lock_guard<std::mutex> guard(wake_lock);
  wake_asked = true;
  wake.notify_one();
}

static void *controller_main(void *) {
  if (my_thread_init()) return nullptr;
  int last_rc = ATROPOS_OK;
  std::unique_lock<std::mutex> lock(wake_lock);
  while (!stop_asked) {
    wake_asked = false;
    lock.unlock();
    const int rc = atropos_controller_tick();
    atm_log_flush();
    if (rc != last_rc && rc != ATROPOS_OK && rc != ATROPOS_E_NOT_LEADER) {
      char why[512];
      atm_log(1, "the controller cannot work: %s: %s. The server goes on without protection; SET GLOBAL atropos_mode = off "
                 "silences it", atropos_strerror(rc), atm_last_error(why, sizeof why));
    }
    last_rc = rc;
    const std::chrono::milliseconds pause =
        atm_mode_is_off() ? kPauseWhileOff
                          : std::chrono::milliseconds(std::max(1u, static_cast<unsigned>(atropos_controller_pause_ms())));
    lock.lock();
    wake.wait_for(lock, pause, [] { return stop_asked || wake_asked; });
  }
  lock.unlock();
  my_thread_end();
  return nullptr;
}

int atm_controller_start() {
  mysql_thread_register("atropos", thread_info, 1);
  stop_asked = false;

  /* Inherited by the thread: the server's signals are for its own threads. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  my_thread_attr_t attributes;
  my_thread_attr_init(&attributes);
  my_thread_attr_setdetachstate(&attributes, MY_THREAD_CREATE_JOINABLE);
  const int rc = mysql_thread_create(key_thread_controller, &thread, &attributes, controller_main, nullptr);
  my_thread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  thread_runs = rc == 0;
  return rc;
}

void atm_controller_stop() {
  if (!thread_runs) return;
  {
    const std::lock_guard<std::mutex> guard(wake_lock);
    stop_asked = true;
    wake.notify_one();
  }
  my_thread_join(&thread, nullptr);
  thread_runs = false;
}
