/*
 * How far a session is, and what undoing its work would cost. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Asked by the controller for candidates only, so nothing of this costs a session anything. Both read counters that the
 * session's thread goes on changing; a value that is old by a row is as good.
 */
#include "atropos_mysql.h"

#include <algorithm>

#include "sql/handler.h"
#include "sql/mysqld.h"
#include "sql/mysqld_thd_manager.h"
#include "sql/opt_explain.h"
#include "sql/sql_class.h"
#include "sql/sql_lex.h"
#include "sql/sql_optimizer.h"
#include "sql/sql_select.h"

#include "sess0sess.h"
#include "trx0trx.h"

/* InnoDB undoes rows one by one. 3.5 to 8 us each were measured with all pages in memory (deletes, updates without and
   with an indexed column); many times more when they must be read. For comparing candidates, not a promise. */
static constexpr uint64_t ROLLBACK_NS_PER_UNDO_RECORD = 5000;

uint64_t atm_rows_read(const THD *thd) {
  const System_status_var &v = thd->status_var;
  return v.ha_read_first_count + v.ha_read_last_count + v.ha_read_key_count + v.ha_read_next_count +
         v.ha_read_prev_count + v.ha_read_rnd_count + v.ha_read_rnd_next_count;
}

/* Rows that the plan of a query block expects to read: those of each table, as often as those before it lead there. */
static double rows_expected(const JOIN *join) {
  double rows = 0, before = 1;
  for (uint i = 0; i < join->primary_tables; i++) {
    const POSITION &p = join->best_positions[i];
    rows += before * std::max(p.rows_fetched, 1.0);
    before = p.prefix_rowcount;
  }
  return rows;
}

/* What EXPLAIN FOR CONNECTION would explain, under the mutex it takes. 0: unknown. */
static double rows_expected(const THD *thd) {
  const THD::Query_plan &plan = thd->query_plan;
  if (plan.get_command() == SQLCOM_END || plan.get_lex() == nullptr) return 0;
  if (const Modification_plan *change = plan.get_modification_plan()) {
    if (change->zero_result) return 0;
    return static_cast<double>(std::min<ha_rows>(change->examined_rows, change->limit));
  }
  const LEX *lex = plan.get_lex();
  if (plan.is_ps_query() || lex->is_explain() || lex->sphead != nullptr || lex->unit == nullptr ||
      (lex->m_sql_cmd != nullptr && !lex->m_sql_cmd->is_prepared()) || !lex->unit->is_simple())
    return 0;
  const JOIN *join = lex->unit->first_query_block()->join;
  if (join == nullptr || join->get_plan_state() != JOIN::PLAN_READY || join->best_positions == nullptr) return 0;
  return rows_expected(join);
}

int atm_progress(atropos_task_t task, uint64_t key, uint64_t *done, uint64_t *total, void *) {
  /* While this is held the session stays in the list, and its THD with it. */
  const std::lock_guard<std::mutex> guard(atm_sessions_lock);
  const Atm_session *s = atm_session_by_id(key);
  if (s == nullptr || s->task.load() != task || !s->running.load()) return 0;
  THD *thd = s->thd;
  /* It keeps its rows until the log is on the disk, and heeds no kill: when the disk stands still for a moment all who
     commit look like monopolists of what they have changed. Set by ha_commit_trans() and left with the next stage. */
  if (thd->proc_info() == stage_waiting_for_handler_commit.m_name) return -1;
  thd->lock_query_plan();
  const double expected = rows_expected(thd);
  thd->unlock_query_plan();

  const uint64_t now = atm_rows_read(thd), before = s->rows_before.load(std::memory_order_relaxed);
  if (expected < 1 || now < before) return 0; /* FLUSH STATUS sets them back */
  *done = now - before;
  *total = static_cast<uint64_t>(std::min(expected, 1e18));
  return 1;
}

/* The caller holds LOCK_thd_data: a THD whose transaction object goes away has been marked under it before. */
static const trx_t *transaction_of(THD *thd) {
  const auto *session = static_cast<const innodb_session_t *>(thd->get_ha_data(innodb_hton->slot)->ha_ptr);
  return session != nullptr ? session->m_trx : nullptr;
}

bool atm_is_rolling_back(THD *thd) {
  const trx_t *trx = transaction_of(thd);
  return trx != nullptr && trx->lock.que_state == TRX_QUE_ROLLING_BACK;
}

uint64_t atm_rollback_cost(atropos_task_t task, uint64_t key, void *) {
  Find_thd_with_id by_id(static_cast<my_thread_id>(key));
  THD_ptr thd = Global_THD_manager::get_instance()->find_thd(&by_id);
  if (!thd) return 0;
  const Atm_session *s = atm_session_of(thd.get());
  if (s == nullptr || s->task.load() != task) return 0;
  const trx_t *trx = transaction_of(thd.get());
  if (trx == nullptr) return 0;
  /* A command within a transaction loses its own part only; an idle one loses all. */
  const undo_no_t from = s->running.load() && s->in_transaction.load() ? trx->last_sql_stat_start.least_undo_no : 0;
  const undo_no_t records = trx->undo_no;
  return records > from ? (records - from) * ROLLBACK_NS_PER_UNDO_RECORD : 0;
}
