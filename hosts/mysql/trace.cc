/*
 * What a session tells of itself: the commands it runs, the transaction around them, the locks it holds and waits
 * for. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * One session is one task. A request is one command packet, with all statements in it: the server looks at the kill
 * flag between them and would not forget a kill that was meant for the first, so the packet is what a cancel hits.
 * Between requests the scope stays that of the last one and so do the holdings: that is how an idle transaction can be
 * told from the statement it will send next.
 *
 * A transaction is told as the holder of the rows it locks (instance: its CONNECTION_ID()), from the first table on
 * that it opens to write: InnoDB's lock table is far too busy to be followed lock by lock, and whoever waits for a row
 * waits for the end of the transaction, not of a lock. Readers that lock (LOCK IN SHARE MODE, SERIALIZABLE) are named
 * by edges alone.
 *
 * A THD's session hangs in the slot that the server keeps in each THD for each storage engine: two loads to read, no
 * lock, also from another session's thread (who waits under InnoDB's latches looks up whom it waits for). The slot
 * brings the callback at the end of the connection, and the reference that keeps the plugin loaded as long as a
 * session hangs there. Rejected: THDVAR storage (moves when it grows), the mysql_thd_store service (a hash map, for
 * the owner only), a table of our own by thread id (a lock or a probe for each lock taken). For a plugin to have a
 * slot it must be a storage engine; this one is hidden, has no tables and only the close_connection callback.
 */
#include "atropos_mysql.h"

#include <cinttypes>
#include <cstring>
#include <new>

#include "mysql/components/services/bits/psi_bits.h"
#include "mysql/psi/mysql_mutex.h"
#include "mysql/service_thd_wait.h"
#include "sql/auth/sql_security_ctx.h"
#include "sql/handler.h"
#include "sql/mdl.h"
#include "sql/sql_class.h"
#include "sql/table.h"
#include "task_trace.h"

/* A server without the patches can load the module far enough to be told so. */
#pragma weak task_trace

#define CLASS_CLIENT 0
#define CLASS_SYSTEM 1

std::mutex atm_sessions_lock;
Atm_session *atm_sessions = nullptr;
atropos_resource_t atm_metadata_lock, atm_table_flush, atm_row_lock, atm_user_lock;

static handlerton *engine;
static unsigned slot = HA_SLOT_UNDEF;

static constexpr auto relaxed = std::memory_order_relaxed;
static constexpr auto release = std::memory_order_release;

/* ---- sessions ---- */

Atm_session *atm_session_of(THD *thd) { return static_cast<Atm_session *>(thd->get_ha_data(slot)->ha_ptr); }

/* The session whose command this thread runs. The slots of all engines look empty while the server reads its
   dictionary in an attachable transaction, but the metadata locks of those reads outlive it. */
static thread_local Atm_session *in_command = nullptr;

/* For calls by the session's own thread. */
static Atm_session *session_here(THD *thd) {
  if (Atm_session *s = atm_session_of(thd); s != nullptr) return s;
  return in_command != nullptr && in_command->thd == thd ? in_command : nullptr;
}

Atm_session *atm_session_by_id(uint64_t id) {
  for (Atm_session *s = atm_sessions; s != nullptr; s = s->next)
    if (s->id == id) return s;
  return nullptr;
}

static void apply_settings(Atm_session *s) {
  const atropos_task_t task = s->task.load(relaxed);
  char label[48];

  s->settings_seen = atm_settings_generation.load(std::memory_order_acquire);
  if (s->thd->system_thread != NON_SYSTEM_THREAD) {
    /* The server's own thread: seen as a holder, never cancelled. */
    atropos_task_set(task, ATROPOS_TASK_PROTECTED, 1);
    atropos_task_set(task, ATROPOS_TASK_BACKGROUND, 1);
    snprintf(label, sizeof label, "system thread of type %u", static_cast<unsigned>(s->thd->system_thread));
  } else {
    const LEX_CSTRING user = s->thd->security_context()->user(), host = s->thd->security_context()->host_or_ip();
    atropos_task_set(task, ATROPOS_TASK_PROTECTED, atm_account_is_protected(s->thd));
    atropos_task_set(task, ATROPOS_TASK_PRIORITY, atm_session_priority(s->thd));
    snprintf(label, sizeof label, "%s@%s", user.str != nullptr ? user.str : "", host.str != nullptr ? host.str : "");
  }
  atropos_task_set(task, ATROPOS_TASK_LABEL, static_cast<int64_t>(reinterpret_cast<uintptr_t>(label)));
}

/* Begins to follow a session; in its own thread. NULL: the region is full (the library counts it; the next command
   tries again) or there is no memory. */
static Atm_session *follow(THD *thd) {
  const atropos_task_t task = atropos_task_create(thd->thread_id());
  if (task == 0) return nullptr;
  auto *s = new (std::nothrow) Atm_session;
  if (s == nullptr) {
    atropos_free_cancel(task);
    return nullptr;
  }
  s->thd = thd;
  s->id = thd->thread_id();
  s->task.store(task, relaxed);
  apply_settings(s);
  {
    const std::lock_guard<std::mutex> guard(atm_sessions_lock);
    s->next = atm_sessions;
    if (s->next != nullptr) s->next->previous = s;
    atm_sessions = s;
  }
  thd_set_ha_data(thd, engine, s);
  return s;
}

/* The connection has ended: rolled back, all locks given up. LOCK_thd_data, because cancel.cc finds sessions under
   it. */
static int on_close_connection(handlerton *, THD *thd) {
  Atm_session *s;
  mysql_mutex_lock(&thd->LOCK_thd_data);
  s = atm_session_of(thd);
  thd->get_ha_data(slot)->ha_ptr = nullptr;
  mysql_mutex_unlock(&thd->LOCK_thd_data);
  if (s == nullptr) return 0;
  {
    const std::lock_guard<std::mutex> guard(atm_sessions_lock);
    (s->previous != nullptr ? s->previous->next : atm_sessions) = s->next;
    if (s->next != nullptr) s->next->previous = s->previous;
  }
  atropos_free_cancel(s->task.load(relaxed));
  for (Atm_tickets *t = s->tickets.next.load(relaxed); t != nullptr;) {
    Atm_tickets *gone = t;
    t = t->next.load(relaxed);
    delete gone;
  }
  delete s;
  return 0;
}

int atm_engine_init(void *p) {
  engine = static_cast<handlerton *>(p);
  engine->state = SHOW_OPTION_YES;
  engine->flags = HTON_HIDDEN | HTON_NOT_USER_SELECTABLE;
  engine->close_connection = on_close_connection;
  return 0;
}

int atm_engine_deinit(void *) { return 0; }

/* ---- notes of metadata locks ---- */

static void note_ticket(Atm_session *s, const MDL_ticket *ticket, uint64_t held) {
  Atm_tickets *t = &s->tickets;
  while (t->free == 0) {
    Atm_tickets *next = t->next.load(relaxed);
    if (next == nullptr) {
      next = new (std::nothrow) Atm_tickets;
      if (next == nullptr) return; /* not seen as a holder: fail open */
      t->next.store(next, release);
    }
    t = next;
  }
  Atm_tickets::Entry &entry = t->entries[__builtin_ctzll(t->free)];
  t->free &= t->free - 1;
  entry.ticket = ticket;
  entry.held.store(held, release);
}

/* Sets the type of a noted lock; MDL_TYPE_END removes it. Returns its instance; 0: it is not noted, having been taken
   before the session was followed, or without memory. */
static uint64_t change_ticket(Atm_session *s, const MDL_ticket *ticket, int type) {
  for (Atm_tickets *t = &s->tickets; t != nullptr; t = t->next.load(relaxed))
    for (uint64_t rest = ~t->free; rest != 0; rest &= rest - 1) {
      const int i = __builtin_ctzll(rest);
      Atm_tickets::Entry &entry = t->entries[i];
      if (entry.ticket != ticket) continue;
      const uint64_t instance = entry.held.load(relaxed) & ~ATM_TYPE_MASK;
      entry.held.store(type == MDL_TYPE_END ? 0 : instance | static_cast<uint64_t>(type), release);
      if (type == MDL_TYPE_END) t->free |= UINT64_C(1) << i;
      return instance;
    }
  return 0;
}

/* The session has no metadata lock. A note that is left all the same would be taken for that of a later ticket at its
   address. */
static void forget_tickets(Atm_session *s) {
  for (Atm_tickets *t = &s->tickets; t != nullptr; t = t->next.load(relaxed))
    for (; t->free != ~UINT64_C(0); t->free |= t->free + 1) {
      std::atomic<uint64_t> &held = t->entries[__builtin_ctzll(~t->free)].held;
      atropos_trace_task_free(s->task.load(relaxed), atm_metadata_lock, held.load(relaxed) & ~ATM_TYPE_MASK, 1);
      held.store(0, release);
    }
}

/* ---- commands and transactions ---- */

/* Commands that are no requests: they last as long as somebody else likes. */
static bool is_endless(enum_server_command command) {
  switch (command) {
    case COM_BINLOG_DUMP:
    case COM_BINLOG_DUMP_GTID:
    case COM_CLONE:
    case COM_SUBSCRIBE_GROUP_REPLICATION_STREAM:
    case COM_DAEMON:
      return true;
    default:
      return false;
  }
}

/* A unit of work that outlives a command; where the library is not told of one, it is the command itself. */
static void tell_work(Atm_session *s, bool begins) {
  if (s->told_work == begins) return;
  s->told_work = begins;
  atropos_task_set(s->task.load(relaxed), ATROPOS_TASK_WORK_START, begins);
}

static void tell_closed(Atm_session *s, bool closed) {
  if (s->told_closed == closed) return;
  s->told_closed = closed;
  atropos_task_set(s->task.load(relaxed), ATROPOS_TASK_CANCELLABLE, !closed);
}

static void on_command_begin(THD *thd) {
  if (!atropos_trace_is_on() || is_endless(thd->get_command())) return;
  Atm_session *s = atm_session_of(thd);
  if (s == nullptr && (thd->system_thread != NON_SYSTEM_THREAD || (s = follow(thd)) == nullptr)) return;
  if (s->settings_seen != atm_settings_generation.load(relaxed)) apply_settings(s);

  /* Whoever sees it running sees this scope, or a later one. */
  s->scope.store(atropos_task_enter(s->task.load(relaxed), CLASS_CLIENT, 0), release);
  tell_closed(s, false);
  /* BEGIN is told at its end; without autocommit any statement may begin a transaction and last long. */
  if (thd->variables.option_bits & OPTION_NOT_AUTOCOMMIT) tell_work(s, true);
  s->rows_before.store(atm_rows_read(thd), relaxed);
  s->running.store(true, release);
  in_command = s;
}

static void on_command_end(THD *thd) {
  Atm_session *s = atm_session_of(thd);
  if (s == nullptr || !s->running.load(relaxed)) return;
  in_command = nullptr;
  const atropos_task_t task = s->task.load(relaxed);
  const bool in_transaction = (thd->server_status & SERVER_STATUS_IN_TRANS) != 0;

  /* From here on no cancel of this scope acts. A canceller first says that it is there and then looks whether the command
     still runs, we say that it does not and then look for cancellers, and both in this order for everybody: so it sees
     that it came too late, or we see it and wait for the mutex that it has. */
  s->in_transaction.store(in_transaction, relaxed);
  s->running.exchange(false, std::memory_order_seq_cst);
  if (s->cancelling.load(std::memory_order_seq_cst)) {
    mysql_mutex_lock(&thd->LOCK_thd_data);
    mysql_mutex_unlock(&thd->LOCK_thd_data);
  }
  atm_explain_error(s);
  if (!in_transaction) s->row_epoch.store(s->row_epoch.load(relaxed) + 1, release);

  if (s->holds_rows && !in_transaction) {
    atropos_task_free_resource(task, atm_row_lock, s->id, 1);
    s->holds_rows = false;
  }
  tell_work(s, in_transaction);
  atropos_task_request_end(task, thd->is_error() ? 1 : 0);
  const bool has_locks = thd->mdl_context.has_locks();
  if (!has_locks) forget_tickets(s);
  /* Idle with locks, and nothing may act on a cancel: let the choice fall on somebody else. */
  tell_closed(s, has_locks && !(in_transaction && atm_terminate_idle_in_transaction));
  if (thd->get_command() == COM_CHANGE_USER) s->settings_seen = 0;
}

/* ---- metadata locks ---- */

/* A 64-bit key of the whole name; never 0, and the low four bits are free for a type. */
static uint64_t instance_of(const uchar *name, size_t length) {
  constexpr uint64_t K = 0x9e3779b97f4a7c15;
  uint64_t x = length * K, word;

  for (; length >= sizeof word; name += sizeof word, length -= sizeof word) {
    memcpy(&word, name, sizeof word);
    x = (x ^ word) * K;
    x ^= x >> 29;
  }
  word = 0;
  memcpy(&word, name, length);
  x = (x ^ word) * K;
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  x &= ~ATM_TYPE_MASK;
  return x != 0 ? x : ATM_TYPE_MASK + 1;
}

static_assert(MDL_TYPE_END <= ATM_TYPE_MASK, "a type fits into the low bits of an instance");

static uint64_t instance_of(const MDL_key *key) { return instance_of(key->ptr(), key->length()); }

static atropos_resource_t resource_of(const MDL_key *key) {
  const MDL_key::enum_mdl_namespace space = key->mdl_namespace();
  return space == MDL_key::USER_LEVEL_LOCK || space == MDL_key::LOCKING_SERVICE ? atm_user_lock : atm_metadata_lock;
}

/* NULL: nobody's. The locks of a prepared XA transaction outlive its session in a context of their own. */
static THD *owner_of(const MDL_ticket *ticket) { return ticket->get_ctx()->get_owner()->get_thd(); }

static Atm_session *session_of(const MDL_ticket *ticket) {
  THD *thd = owner_of(ticket);
  return thd != nullptr ? session_here(thd) : nullptr;
}

static void on_mdl_held(const MDL_ticket *ticket) {
  THD *thd = owner_of(ticket);
  if (thd == nullptr) return;
  Atm_session *s = session_here(thd);

  if (s == nullptr) {
    /* The server's own threads run no commands; they are followed from their first lock on. Not within an attachable
       transaction, which closes the "connections" of all engines at its end. */
    if (thd->system_thread == NON_SYSTEM_THREAD || !atropos_trace_is_on() || thd->is_attachable_transaction_active())
      return;
    if ((s = follow(thd)) == nullptr) return;
    atropos_task_request_begin(s->task.load(relaxed), CLASS_SYSTEM);
    atropos_task_request_end(s->task.load(relaxed), 0);
  }
  const MDL_key *key = ticket->get_key();
  const uint64_t instance = instance_of(key);
  const enum_mdl_type type = ticket->get_type();
  const atropos_task_t task = s->task.load(relaxed);
  note_ticket(s, ticket, instance | type);
  atropos_trace_task_get(task, resource_of(key), instance, 1);
  if ((type == MDL_SHARED_WRITE || type == MDL_SHARED_WRITE_LOW_PRIO) && !s->holds_rows && s->running.load(relaxed)) {
    atropos_trace_task_get(task, atm_row_lock, s->id, 1);
    s->holds_rows = true;
  }
}

static void on_mdl_gone(const MDL_ticket *ticket) {
  Atm_session *s = session_of(ticket);
  if (s == nullptr) return;
  const MDL_key *key = ticket->get_key();
  const uint64_t noted = change_ticket(s, ticket, MDL_TYPE_END);
  atropos_trace_task_free(s->task.load(relaxed), resource_of(key), noted != 0 ? noted : instance_of(key), 1);
}

static void on_mdl_retyped(const MDL_ticket *ticket, int new_type) {
  Atm_session *s = session_of(ticket);
  if (s != nullptr) change_ticket(s, ticket, new_type);
}

static void name_key(uint64_t instance, const MDL_key *key) {
  const char *db = key->db_name(), *name = key->name();

  switch (key->mdl_namespace()) {
    case MDL_key::GLOBAL:
      return atm_name_object(instance, "the global read lock");
    case MDL_key::BACKUP_LOCK:
      return atm_name_object(instance, "the backup lock");
    case MDL_key::COMMIT:
      return atm_name_object(instance, "the commit lock");
    case MDL_key::ACL_CACHE:
      return atm_name_object(instance, "the cache of accounts and privileges");
    case MDL_key::SCHEMA:
      return atm_name_object(instance, "schema `%s`", db);
    case MDL_key::TABLESPACE:
      return atm_name_object(instance, "tablespace `%s`", name);
    case MDL_key::TABLE:
      return atm_name_object(instance, "table `%s`.`%s`", db, name);
    case MDL_key::FUNCTION:
      return atm_name_object(instance, "function `%s`.`%s`", db, name);
    case MDL_key::PROCEDURE:
      return atm_name_object(instance, "procedure `%s`.`%s`", db, name);
    case MDL_key::TRIGGER:
      return atm_name_object(instance, "trigger `%s`.`%s`", db, name);
    case MDL_key::EVENT:
      return atm_name_object(instance, "event `%s`.`%s`", db, name);
    case MDL_key::USER_LEVEL_LOCK:
      return atm_name_object(instance, "user lock '%s'", name);
    case MDL_key::LOCKING_SERVICE:
      return atm_name_object(instance, "service lock '%s' of '%s'", name, db);
    default:
      return atm_name_object(instance, "object `%s`.`%s`", db, name);
  }
}

/* ---- waits ---- */

static void begin_wait(Atm_session *s, Atm_wait kind, atropos_resource_t resource, uint64_t instance) {
  s->wait_resource.store(resource, relaxed);
  s->wait_instance.store(instance, relaxed);
  s->wait.store(kind, release);
  atropos_trace_task_wait(s->task.load(relaxed), resource, instance, 1);
}

static void end_wait(Atm_session *s, bool granted) {
  s->wait.store(ATM_WAIT_NONE, release);
  if (!granted) atropos_trace_task_wait_abandoned(s->task.load(relaxed), s->wait_resource.load(relaxed));
}

/* What it waits for and whom it makes wait is asked of the ticket here, in its own thread, once: the tables of the lock
   manager stay the only truth, and the controller needs none of its latches. That the compatibility of granted locks is
   symmetric is so for all of the server's tables of them. */
static void on_mdl_wait_begin(const MDL_ticket *ticket) {
  Atm_session *s = session_of(ticket);
  if (s == nullptr) return;
  const MDL_key *key = ticket->get_key();
  const uint64_t instance = instance_of(key);
  uint32_t conflicts = 0, bars = 0;

  for (int type = 0; type < MDL_TYPE_END; type++) {
    const auto other = static_cast<enum_mdl_type>(type);
    if (ticket->is_incompatible_when_granted(other)) conflicts |= 1u << type;
    if (ticket->is_incompatible_when_waiting(other)) bars |= 1u << type;
  }
  name_key(instance, key);
  s->wait_type.store(ticket->get_type(), relaxed);
  s->wait_conflicts.store(conflicts, relaxed);
  s->wait_bars.store(bars, relaxed);
  begin_wait(s, ATM_WAIT_METADATA, resource_of(key), instance);
}

static void on_mdl_wait_end(const MDL_ticket *ticket, bool granted) {
  Atm_session *s = session_of(ticket);
  if (s != nullptr) end_wait(s, granted);
}

static void on_flush_wait_begin(THD *thd, const TABLE_SHARE *share) {
  Atm_session *s = session_here(thd);
  if (s == nullptr) return;
  const auto *key = reinterpret_cast<const uchar *>(share->table_cache_key.str);
  const uint64_t instance = instance_of(key, share->table_cache_key.length);
  atm_name_object(instance, "table `%s`.`%s`, which is being flushed,", share->db.str, share->table_name.str);
  begin_wait(s, ATM_WAIT_FLUSH, atm_table_flush, instance);
}

/* Nobody gets anything: whoever waited was only to see the last user go. The lock, because edges.cc looks into the
   wait of this THD while it holds it. */
static void on_flush_wait_end(THD *thd) {
  Atm_session *s = session_here(thd);
  if (s == nullptr) return;
  const std::lock_guard<std::mutex> guard(atm_sessions_lock);
  end_wait(s, false);
}

static void on_row_blocked(THD *waiter, THD *blocker) {
  Atm_session *s = waiter != nullptr ? session_here(waiter) : nullptr;
  if (s == nullptr) return;
  const Atm_session *b = blocker != nullptr ? atm_session_of(blocker) : nullptr;
  s->row_blocker_epoch.store(b != nullptr ? b->row_epoch.load(relaxed) : 0, relaxed);
  s->row_blocker_id.store(b != nullptr ? b->id : 0, release);
}

static void on_wait_begin(THD *thd, int wait_type) {
  if (thd == nullptr || (wait_type != THD_WAIT_ROW_LOCK && wait_type != THD_WAIT_TABLE_LOCK)) return;
  if (Atm_session *s = session_here(thd); s != nullptr)
    begin_wait(s, ATM_WAIT_ROW, atm_row_lock, s->row_blocker_id.load(relaxed));
}

/* With the row or without it: its holder is the transaction, which is told as one already. */
static void on_wait_end(THD *thd) {
  Atm_session *s = thd != nullptr ? session_here(thd) : nullptr;
  if (s != nullptr && s->wait.load(relaxed) == ATM_WAIT_ROW) end_wait(s, false);
}

/* ---- start and stop ---- */

static const Task_trace hooks = {
    on_command_begin,  on_command_end,      on_mdl_held,       on_mdl_gone,   on_mdl_retyped, on_mdl_wait_begin,
    on_mdl_wait_end,   on_flush_wait_begin, on_flush_wait_end, on_wait_begin, on_wait_end,    on_row_blocked,
};

bool atm_server_is_patched() { return &task_trace != nullptr; }

bool atm_trace_start() {
  if (!atm_server_is_patched() || engine == nullptr || engine->slot >= PREALLOC_NUM_HA) return false;
  slot = engine->slot;
  atm_metadata_lock = atropos_resource_register("metadata lock", ATROPOS_LOCK);
  atm_table_flush = atropos_resource_register("table flush", ATROPOS_LOCK);
  atm_row_lock = atropos_resource_register("row lock", ATROPOS_LOCK);
  atm_user_lock = atropos_resource_register("user lock", ATROPOS_LOCK);
  if (atm_metadata_lock == 0 || atm_table_flush == 0 || atm_row_lock == 0 || atm_user_lock == 0) return false;
  task_trace.store(&hooks, release);
  return true;
}

void atm_trace_stop() {
  if (atm_server_is_patched()) task_trace.store(nullptr, release);
}
