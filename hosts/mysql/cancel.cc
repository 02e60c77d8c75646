/*
 * Cancelling exactly the command that was chosen. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The server's own kill: THD::awake, as KILL QUERY calls it, which wakes whatever the session waits in. KILL itself has
 * no addressee but a connection and would hit the command that runs when it arrives. Here the scope that was decided
 * for is compared under LOCK_thd_data, and a session that ends its command meanwhile waits for that mutex (trace.cc): as
 * long as we hold it the command we kill is the one we mean, and a kill flag left over is cleared before the next begins.
 *
 * A kill can be lost: the server forgets the flag after each statement, and a wait may begin between the look at the
 * flag and the sleep. The controller repeats the call while the scope stands; a repeat does the same again, no more.
 * A statement that is already committing ends as done: the server reads the flag no more once a result is set.
 */
#include "atropos_mysql.h"

#include <cinttypes>
#include <cstdio>

#include "mysqld_error.h"
#include "mysql/psi/mysql_mutex.h"
#include "sql/mysqld_thd_manager.h"
#include "sql/derror.h"
#include "sql/sql_class.h"
#include "sql/sql_error.h"

static constexpr auto relaxed = std::memory_order_relaxed;
static constexpr auto acquire = std::memory_order_acquire;
static constexpr auto release = std::memory_order_release;

/* ---- the kill; the controller's thread ---- */

/* What the client will read. The text of the error may have 511 bytes. */
static void write_reason(Atm_session *s, const atropos_cancel_request *request) {
  atropos_cancel_info info{};
  char what[200];

  info.size = sizeof info;
  const bool known = atropos_task_cancel_info(request->task, &info) == 1 && info.scope == request->scope;
  if (request->resource == 0 || !known) {
    snprintf(s->why, sizeof s->why, "Query execution was interrupted by Atropos: %s",
             request->reason != nullptr ? request->reason : "no reason given");
    return;
  }
  /* "rows locked by connection 7" would puzzle connection 7. */
  if (request->resource == atm_row_lock && request->instance == s->id)
    snprintf(what, sizeof what, "rows");
  else if (atm_describe(request->resource, request->instance, what, sizeof what, nullptr) == 0)
    snprintf(what, sizeof what, "a %s", info.resource_name);
  const bool waits = s->wait.load(acquire) != ATM_WAIT_NONE && s->wait_instance.load(relaxed) == request->instance;
  snprintf(s->why, sizeof s->why,
           "Query execution was interrupted by Atropos: it %s %s for %.0f ms while %u others waited (%s). Retry later, "
           "in smaller steps or outside busy hours",
           waits ? "was first in line for" : "held", what, static_cast<double>(info.held_ns) / 1e6, info.victims,
           info.resource_name);
}

/* While it stands a session does not get beyond the end of its command; the caller holds LOCK_thd_data all the time. */
class Cancelling {
 public:
  explicit Cancelling(Atm_session *s) : s_(s) { s_->cancelling.store(true, std::memory_order_seq_cst); }
  ~Cancelling() { s_->cancelling.store(false, release); }
  Cancelling(const Cancelling &) = delete;
  Cancelling &operator=(const Cancelling &) = delete;

 private:
  Atm_session *s_;
};

int atm_cancel(const atropos_cancel_request *request, void *) {
  Find_thd_with_id by_id(static_cast<my_thread_id>(request->key));
  /* Comes back with LOCK_thd_data, which keeps the THD from going away. */
  THD_ptr thd = Global_THD_manager::get_instance()->find_thd(&by_id);
  if (!thd || thd->system_thread != NON_SYSTEM_THREAD || thd->slave_thread) return -1;
  Atm_session *s = atm_session_of(thd.get());
  if (s == nullptr || s->task.load(relaxed) != request->task) return -1;
  if (thd->killed == THD::KILL_CONNECTION) return 0;
  const Cancelling while_we_look(s);

  /* In this order: a scope that is read after "running" is that of the running command, or of one that has ended. */
  const bool running = s->running.load(std::memory_order_seq_cst);
  if (s->scope.load(acquire) != request->scope) return -1;
  if (running) {
    /* A command that does not heed a kill is rolling back or committing; ending its connection would not be faster. */
    if (request->rung > 1) return -1;
    if (s->cancelled.load(relaxed) != request->scope) {
      write_reason(s, request);
      s->cancelled.store(request->scope, release);
    } else if (atm_is_rolling_back(thd.get())) {
      /* It heard us. Undoing takes its time, and a second kill would not shorten it. */
      atropos_task_cancel_acknowledge(request->task, request->scope);
      return 0;
    }
    thd->awake(THD::KILL_QUERY);
    return 0;
  }
  /* No statement to fail. The transaction left open is the culprit: end it as the client's disconnect would. Not if the
     next command has arrived already: then it has ended being idle. */
  if (!s->in_transaction.load(relaxed) || !atm_terminate_idle_in_transaction || !thd->m_server_idle) return -1;
  thd->awake(THD::KILL_CONNECTION);
  atropos_task_cancel_acknowledge(request->task, request->scope);
  return 0;
}

/* ---- the client's error; the session's thread ---- */

/* The number stays 1317, the text becomes ours. Done to the result, once it is decided: hooking the server's error
   handler would miss errors that go around it, and switches an event of the audit interface off. */
void atm_explain_error(Atm_session *s) {
  Diagnostics_area *result = s->thd->get_stmt_da();
  const uint64_t scope = s->scope.load(relaxed);
  /* `why` was written before `cancelled`, and is not written again for this scope. */
  if (!result->is_error() || result->mysql_errno() != ER_QUERY_INTERRUPTED || result->is_sent() ||
      s->cancelled.load(acquire) != scope)
    return;
  result->reset_diagnostics_area();
  result->set_error_status(ER_QUERY_INTERRUPTED, s->why, mysql_errno_to_sqlstate(ER_QUERY_INTERRUPTED));
  atropos_task_cancel_acknowledge(s->task.load(relaxed), scope);
}
