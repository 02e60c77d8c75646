/*
 * Atropos in MySQL: what the parts of the plugin share.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 *   plugin.cc      declaration, system and status variables, functions for SQL, start and stop
 *   trace.cc       what a session tells of itself: commands, transactions, locks and waits
 *   edges.cc       who blocks whom, and words for what is locked
 *   cancel.cc      what happens to a session that was chosen, and what its client reads
 *   work.cc        how far a session is, and what undoing its work would cost
 *   controller.cc  the thread that drives the library, and the error log
 *   tables.cc      tables of INFORMATION_SCHEMA
 *
 * Rules that stand over all of them:
 * - A session is a THD, never a thread: threads are reused, and a thread pool would move sessions between them.
 * - Hooks of the server (task_trace.h) run under latches of InnoDB or inside the lock manager: no error, no
 *   logging, no mutex of the server in them; what they tell another thread goes through atomics.
 * - Lock order: atm_sessions_lock, then whatever the server has. Nobody takes it while holding a server's mutex.
 */
#ifndef ATROPOS_MYSQL_H
#define ATROPOS_MYSQL_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "atropos_trace.h"

class MDL_ticket;
class THD;
struct handlerton;

/* The granted metadata locks of one session. Its thread alone writes; the controller reads meanwhile. An entry never
   moves, so a lock that stays held is never overlooked. */
struct alignas(64) Atm_tickets {
  static constexpr int SIZE = 64;
  struct Entry {
    std::atomic<uint64_t> held{0};      /* instance | enum_mdl_type; 0: free */
    const MDL_ticket *ticket = nullptr; /* the session's thread only */
  };
  uint64_t free = ~uint64_t{0};             /* a bit for each free entry */
  std::atomic<Atm_tickets *> next{nullptr}; /* the rest, if there are more; never taken away while the session lives */
  Entry entries[SIZE];
};

/* The bits of an instance of a metadata lock that hold a type in Atm_tickets, and are 0 elsewhere. */
constexpr uint64_t ATM_TYPE_MASK = 15;

enum Atm_wait : uint32_t { ATM_WAIT_NONE, ATM_WAIT_METADATA, ATM_WAIT_FLUSH, ATM_WAIT_ROW };

/* One session that is followed. Lives from its first command to the end of its connection, in the list below. What each
   command reads and writes is the first line of the cache. */
struct alignas(64) Atm_session {
  /* Set before it is in the list. */
  THD *thd;
  uint64_t id; /* CONNECTION_ID(), the key of the task */

  /* Written by the session's thread. */
  std::atomic<atropos_task_t> task{0}; /* 0: untracked, the region was full */
  std::atomic<uint64_t> scope{0};      /* scope sequence of the present, or last, command */
  std::atomic<uint64_t> rows_before{0}; /* handler reads of the session when the command began */
  /* Counts the ends of commands that left no transaction open, and so no locked row. */
  std::atomic<uint64_t> row_epoch{0};
  uint64_t settings_seen = 0;          /* the session's thread only, as the three below */
  std::atomic<bool> running{false};    /* inside a command; see trace.cc for how it ends */
  std::atomic<bool> in_transaction{false}; /* as of the end of the last command */
  bool told_work = false;   /* the library was told that a transaction began */
  bool told_closed = false; /* the library was told that it cannot be cancelled now */
  bool holds_rows = false;  /* the library was told of its transaction as a holder of rows */
  /* Written by the controller's thread under THD::LOCK_thd_data: it may be about to kill the command. */
  std::atomic<bool> cancelling{false};

  Atm_tickets tickets;

  /* The running wait: the kind is stored last and cleared first; a flush wait ends under atm_sessions_lock only. */
  std::atomic<uint32_t> wait{ATM_WAIT_NONE};
  std::atomic<atropos_resource_t> wait_resource{0};
  std::atomic<uint64_t> wait_instance{0};
  std::atomic<uint32_t> wait_type{0};      /* metadata: enum_mdl_type that is asked for */
  std::atomic<uint32_t> wait_conflicts{0}; /* metadata: bit set of granted types it waits for */
  std::atomic<uint32_t> wait_bars{0};      /* metadata: bit set of requested types that its request makes wait */
  /* Rows: which session holds them, and its row_epoch then. Also written by the thread that passes a lock on. */
  std::atomic<uint64_t> row_blocker_id{0}; /* 0: one that is not followed */
  std::atomic<uint64_t> row_blocker_epoch{0};

  /* Written by the controller's thread under THD::LOCK_thd_data; `why` before `cancelled`, once for each scope. */
  std::atomic<uint64_t> cancelled{0}; /* the scope that was told to stop; 0: none */
  char why[400] = "";

  Atm_session *previous = nullptr, *next = nullptr;
};

/* ---- plugin.cc ---- */
extern bool atm_terminate_idle_in_transaction;
extern std::atomic<uint64_t> atm_settings_generation; /* from 1; changes with atropos_protect_users, atropos_priority */
bool atm_account_is_protected(THD *thd);
int atm_session_priority(THD *thd);

/* ---- trace.cc ---- */
extern std::mutex atm_sessions_lock; /* over the list, and over the life of what is in it */
extern Atm_session *atm_sessions;

/* False on a server without patches/mysql: nothing can be traced there. */
bool atm_server_is_patched();
/* Init and deinit of the (hidden) storage engine plugin that gives each THD a place for its session; init gets the
   handlerton. Declare it before the plugin that calls atm_trace_start. */
int atm_engine_init(void *handlerton);
int atm_engine_deinit(void *);
/* After atropos_init: registers the resources and installs the hooks of the server. False: a resource could not be
   registered (atropos_last_error says why). */
bool atm_trace_start();
/* Takes the hooks away; threads may still be inside one, so the code must stay mapped (-z nodelete). */
void atm_trace_stop();
/* The caller's thread runs `thd`, or holds its LOCK_thd_data, or latches that keep its transaction from ending.
   NULL: not followed. */
Atm_session *atm_session_of(THD *thd);
/* By CONNECTION_ID(); the caller holds atm_sessions_lock. */
Atm_session *atm_session_by_id(uint64_t id);
extern atropos_resource_t atm_metadata_lock, atm_table_flush, atm_row_lock, atm_user_lock;

/* ---- edges.cc: for atropos_edge_source and atropos_set_describe ---- */
size_t atm_edges(atropos_edge *edges, size_t max, void *);
size_t atm_describe(atropos_resource_t resource, uint64_t instance, char *buf, size_t size, void *);
/* Keeps words for an object somebody begins to wait for; called by the waiter. */
void atm_name_object(uint64_t instance, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- cancel.cc ---- */
/* For atropos_set_cancel_action (rung 1) and atropos_set_terminate_action (rung 2). */
int atm_cancel(const atropos_cancel_request *request, void *);
/* A command's result is decided: if it is the error of a cancel, the client shall read who cancelled it and why. */
void atm_explain_error(Atm_session *s);

/* ---- work.cc ---- */
/* For atropos_set_rollback_cost; ns. */
uint64_t atm_rollback_cost(atropos_task_t task, uint64_t key, void *);
/* For atropos_set_progress_source: rows read of rows expected; 0 = unknown; -1 = it commits. */
int atm_progress(atropos_task_t task, uint64_t key, uint64_t *done, uint64_t *total, void *);
/* Its transaction, or the last statement of it, is being undone now; the caller holds LOCK_thd_data. */
bool atm_is_rolling_back(THD *thd);
/* Rows that a session has read from storage engines so far; any thread while the THD exists. */
uint64_t atm_rows_read(const THD *thd);

#endif /* ATROPOS_MYSQL_H */
