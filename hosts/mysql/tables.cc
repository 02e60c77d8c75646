/*
 * What SQL sees: tables, status variables, functions. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * All of it is read from the library's own JSON texts, so that tables, decision log and other hosts say the same.
 */
#include "surface.h"

#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "my_rapidjson_size_t.h"

#include <rapidjson/document.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include "my_time.h"
#include "mysql/components/my_service.h"
#include "mysql/components/services/udf_registration.h"
#include "mysql/service_plugin_registry.h"
#include "mysqld_error.h"
#include "sql/auth/auth_acls.h"
#include "sql/auth/sql_security_ctx.h"
#include "sql/field.h"
#include "sql/sql_class.h"
#include "sql/sql_show.h"
#include "sql/table.h"
#include "sql/tztime.h"

using Value = rapidjson::Value;

/* ---- reading the library's JSON ---- */

static std::string stats_text() {
  std::string text;
  size_t full = atropos_stats(nullptr, 0);
  do {
    text.resize(full + 1024); /* it grows with each task that begins meanwhile */
    full = atropos_stats(text.data(), text.size());
  } while (full >= text.size());
  text.resize(full);
  return text;
}

/* A member, or null where there is none: a table must not fail over a member that another version lacks. */
static const Value &member(const Value &object, const char *name) {
  static const Value null;
  if (!object.IsObject()) return null;
  const auto found = object.FindMember(name);
  return found == object.MemberEnd() ? null : found->value;
}

static std::string_view text_of(const Value &value) {
  return value.IsString() ? std::string_view(value.GetString(), value.GetStringLength()) : std::string_view();
}

static std::string json_of(const Value &value) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  value.Accept(writer);
  return {buffer.GetString(), buffer.GetSize()};
}

/* Raises the error and returns true where there is nothing to read. */
static bool not_running() {
  if (atm_region_ready()) return false;
  my_printf_error(ER_UNKNOWN_ERROR, "Atropos does not run in this server; the error log tells why", MYF(0));
  return true;
}

static bool parsed(rapidjson::Document *document, const std::string &text) {
  document->Parse(text.c_str(), text.size());
  if (!document->HasParseError()) return true;
  my_printf_error(ER_UNKNOWN_ERROR, "Atropos: cannot read the library's report at byte %zu", MYF(0),
                  static_cast<size_t>(document->GetErrorOffset()));
  return false;
}

/* ---- whose rows a session may see: its own user's, and all of them with PROCESS, as in PROCESSLIST ---- */

static bool may_see(THD *thd, std::string_view label) {
  Security_context *account = thd->security_context();
  if (account->check_access(PROCESS_ACL)) return true;
  /* The label is user@host and may have been cut: then nobody knows where the user's name ends. */
  const auto at = label.rfind('@');
  return at != std::string_view::npos && label.size() < ATM_LABEL_BYTES &&
         label.substr(0, at) == std::string_view(account->user().str, account->user().length);
}

/* ---- rows ---- */

/* One row under construction, column after column in the order of the fields. */
class Row {
 public:
  explicit Row(TABLE *table) : table_(table) { restore_record(table, s->default_values); }

  Row &text(std::string_view value) {
    next()->store(value.data(), value.size(), system_charset_info);
    return *this;
  }
  Row &optional_text(std::string_view value) {
    if (value.empty()) return null();
    table_->field[column_]->set_notnull();
    return text(value);
  }
  Row &integer(const Value &value) {
    if (value.IsUint64()) next()->store(static_cast<longlong>(value.GetUint64()), true);
    else next()->store(value.IsInt64() ? value.GetInt64() : 0, false);
    return *this;
  }
  Row &real(const Value &value) {
    if (!value.IsNumber()) return null();
    table_->field[column_]->set_notnull();
    next()->store(rounded(value.GetDouble()));
    return *this;
  }
  /* For columns that cannot be NULL. */
  Row &real(const Value &value, double unit) {
    next()->store(value.IsNumber() ? rounded(value.GetDouble() / unit) : 0);
    return *this;
  }
  Row &yes_no(const Value &value) { return text(value.IsTrue() ? "YES" : "NO"); }
  Row &wall_time(THD *thd, const Value &wall_ms) {
    MYSQL_TIME time;
    const double ms = wall_ms.IsNumber() ? wall_ms.GetDouble() : 0;
    thd->time_zone()->gmt_sec_to_TIME(&time, static_cast<my_time_t>(ms / 1000));
    time.second_part = static_cast<unsigned long>(std::fmod(ms, 1000)) * 1000;
    next()->store_time(&time, 3);
    return *this;
  }
  bool store(THD *thd) { return schema_table_store_record(thd, table_); }

 private:
  Field *next() { return table_->field[column_++]; }
  /* What is shown are milliseconds and shares: three digits behind the point say it all. */
  static double rounded(double value) { return std::round(value * 1000) / 1000; }
  Row &null() {
    next()->set_null();
    return *this;
  }
  TABLE *table_;
  unsigned column_ = 0;
};

#define TEXT(name, characters) {name, characters, MYSQL_TYPE_STRING, 0, 0, "", 0}
#define TEXT_OR_NULL(name, characters) {name, characters, MYSQL_TYPE_STRING, 0, MY_I_S_MAYBE_NULL, "", 0}
#define UNSIGNED(name) {name, MY_INT64_NUM_DECIMAL_DIGITS, MYSQL_TYPE_LONGLONG, 0, MY_I_S_UNSIGNED, "", 0}
#define SIGNED(name) {name, MY_INT32_NUM_DECIMAL_DIGITS, MYSQL_TYPE_LONG, 0, 0, "", 0}
#define REAL(name) {name, MAX_DOUBLE_STR_LENGTH, MYSQL_TYPE_DOUBLE, 0, 0, "", 0}
#define REAL_OR_NULL(name) {name, MAX_DOUBLE_STR_LENGTH, MYSQL_TYPE_DOUBLE, 0, MY_I_S_MAYBE_NULL, "", 0}
#define MOMENT(name) {name, 3, MYSQL_TYPE_DATETIME, 0, 0, "", 0}
#define END {nullptr, 0, MYSQL_TYPE_NULL, 0, 0, nullptr, 0}

static constexpr unsigned kJsonCharacters = 16384;

/* ---- ATROPOS_RESOURCES ---- */

static ST_FIELD_INFO resource_fields[] = {
    UNSIGNED("ID"),      TEXT("NAME", 31),      TEXT("TYPE", 8),    REAL("WAIT_MS"),           REAL("HOLD_MS"),
    UNSIGNED("ACQUIRED"), UNSIGNED("EVICTED"), UNSIGNED("HOLDERS"), UNSIGNED("WAITERS"), UNSIGNED("QUEUE_WAITING"),
    END};

static int fill_resources(THD *thd, Table_ref *tables, Item *) {
  rapidjson::Document stats;
  if (not_running() || !parsed(&stats, stats_text())) return 1;
  const Value &resources = member(stats, "resources");
  if (!resources.IsArray()) return 0;
  for (const Value &r : resources.GetArray()) {
    Row row(tables->table);
    row.integer(member(r, "id")).text(text_of(member(r, "name"))).text(text_of(member(r, "type")));
    row.real(member(r, "wait_ms"), 1).real(member(r, "hold_ms"), 1);
    for (const char *count : {"acquired", "evicted", "holders", "waiters", "queue_waiting"}) row.integer(member(r, count));
    if (row.store(thd)) return 1;
  }
  return 0;
}

/* ---- ATROPOS_TASKS ---- */

static ST_FIELD_INFO task_fields[] = {
    UNSIGNED("ID"),           TEXT("ACCOUNT", 47),   REAL_OR_NULL("STATEMENT_MS"), UNSIGNED("SCOPE"),
    SIGNED("PRIORITY"),       TEXT("BACKGROUND", 3), TEXT("PROTECTED", 3),         TEXT("CANCELLABLE", 3),
    TEXT("CANCEL_ASKED", 3), UNSIGNED("ROWS_DONE"), UNSIGNED("ROWS_EXPECTED"),
    TEXT("HOLDS", kJsonCharacters), TEXT("WAITS", kJsonCharacters), END};

static int fill_tasks(THD *thd, Table_ref *tables, Item *) {
  rapidjson::Document stats;
  if (not_running() || !parsed(&stats, stats_text())) return 1;
  const Value &tasks = member(stats, "tasks");
  if (!tasks.IsArray()) return 0;
  for (const Value &t : tasks.GetArray()) {
    const auto label = text_of(member(t, "label"));
    if (!may_see(thd, label)) continue;
    Row row(tables->table);
    row.integer(member(t, "key")).text(label).real(member(t, "age_ms")).integer(member(t, "scope"));
    row.integer(member(t, "priority"));
    for (const char *flag : {"background", "protected", "cancellable", "cancel_standing"}) row.yes_no(member(t, flag));
    row.integer(member(t, "progress_done")).integer(member(t, "progress_total"));
    row.text(json_of(member(t, "holds"))).text(json_of(member(t, "waits")));
    if (row.store(thd)) return 1;
  }
  return 0;
}

/* ---- ATROPOS_DECISIONS ---- */

static ST_FIELD_INFO decision_fields[] = {UNSIGNED("ID"),
                                          MOMENT("DECIDED_AT"),
                                          TEXT("MODE", 8),
                                          TEXT("RESULT", 16),
                                          UNSIGNED("CONNECTION_ID"),
                                          TEXT("ACCOUNT", 47),
                                          UNSIGNED("SCOPE"),
                                          TEXT_OR_NULL("RESOURCE", 31),
                                          TEXT_OR_NULL("OBJECT", 256),
                                          TEXT("REASON", 512),
                                          TEXT_OR_NULL("WOULD_HAVE", 512),
                                          REAL("P99_MS"),
                                          REAL("SLO_MS"),
                                          REAL_OR_NULL("SUSPECTED_AFTER_MS"),
                                          REAL_OR_NULL("ACKNOWLEDGED_MS"),
                                          REAL_OR_NULL("ENDED_MS"),
                                          REAL_OR_NULL("CONTENTION_AFTER"),
                                          TEXT("EVIDENCE", kJsonCharacters),
                                          END};

/* Called through frames of the library, which no exception may cross. */
static void keep_decision(const char *json, void *arg) noexcept {
  try {
    static_cast<std::vector<std::string> *>(arg)->emplace_back(json);
  } catch (...) {
    /* out of memory: the row is missing */
  }
}

static int fill_decisions(THD *thd, Table_ref *tables, Item *) {
  if (not_running()) return 1;
  std::vector<std::string> decisions;
  if (const int rc = atropos_decisions(keep_decision, &decisions); rc < 0) {
    my_printf_error(ER_UNKNOWN_ERROR, "Atropos: cannot read the decisions: %s", MYF(0), atropos_strerror(rc));
    return 1;
  }
  for (const std::string &text : decisions) {
    rapidjson::Document d;
    if (!parsed(&d, text)) return 1;
    const Value &task = member(d, "task"), &resource = member(d, "resource"), &signal = member(d, "signal");
    const auto label = text_of(member(task, "label"));
    if (!may_see(thd, label)) continue;
    Row row(tables->table);
    row.integer(member(d, "id")).wall_time(thd, member(d, "wall_ms"));
    row.text(text_of(member(d, "mode"))).text(text_of(member(d, "result")));
    row.integer(member(task, "key")).text(label).integer(member(task, "scope"));
    row.optional_text(text_of(member(resource, "name"))).optional_text(text_of(member(resource, "words")));
    row.text(text_of(member(d, "reason"))).optional_text(text_of(member(d, "would_have")));
    row.real(member(signal, "p99_ns"), 1e6).real(member(signal, "slo_ns"), 1e6);
    for (const char *ms : {"suspected_after_ms", "acknowledged_ms", "ended_ms", "contention_after"})
      row.real(member(d, ms));
    row.text(text);
    if (row.store(thd)) return 1;
  }
  return 0;
}

template <ST_FIELD_INFO *fields, int (*fill)(THD *, Table_ref *, Item *)>
static int init_table(void *plugin) {
  auto *table = static_cast<ST_SCHEMA_TABLE *>(plugin);
  table->fields_info = fields;
  table->fill_table = fill;
  return 0;
}

int atm_resources_init(void *plugin) { return init_table<resource_fields, fill_resources>(plugin); }
int atm_tasks_init(void *plugin) { return init_table<task_fields, fill_tasks>(plugin); }
int atm_decisions_init(void *plugin) { return init_table<decision_fields, fill_decisions>(plugin); }

/* ---- status variables ---- */

namespace {
struct StatusVariable {
  const char *name;
  enum enum_mysql_show_type type;
  /* Where it stands in the report; no section: at the top. */
  const char *section, *member;
};
}  // namespace

static constexpr double kHeartbeatAliveMs = 3000; /* it beats every second even while off */

static const StatusVariable status_variables[] = {
    {"version", SHOW_CHAR, nullptr, "version"},
    {"mode", SHOW_CHAR, nullptr, "mode"},
    {"state", SHOW_CHAR, "controller", "state"},
    {"controller_alive", SHOW_BOOL, "controller", "heartbeat_age_ms"},
    {"p99_ms", SHOW_DOUBLE, "controller", "p99_ms"},
    {"slo_ms", SHOW_DOUBLE, "controller", "slo_ms"},
    {"throughput_per_s", SHOW_DOUBLE, "controller", "throughput_per_s"},
    {"suspected", SHOW_LONGLONG, "counters", "suspected"},
    {"overloads_resource", SHOW_LONGLONG, "counters", "overloads_resource"},
    {"overloads_regular", SHOW_LONGLONG, "counters", "overloads_regular"},
    {"decisions", SHOW_LONGLONG, "counters", "decisions"},
    {"would_cancel", SHOW_LONGLONG, "counters", "would_cancel"},
    {"cancels_requested", SHOW_LONGLONG, "counters", "cancels_requested"},
    {"cancels_acknowledged", SHOW_LONGLONG, "counters", "cancels_acknowledged"},
    {"cancels_escalated", SHOW_LONGLONG, "counters", "cancels_escalated"},
    {"cancels_unresponsive", SHOW_LONGLONG, "counters", "cancels_unresponsive"},
    {"cancels_over_budget", SHOW_LONGLONG, "counters", "cancels_over_budget"},
    {"actions_failed", SHOW_LONGLONG, "counters", "actions_failed"},
    {"tasks", SHOW_LONGLONG, "tasks", nullptr},
    {"tasks_max", SHOW_LONGLONG, nullptr, "max_tasks"},
    {"tasks_untracked", SHOW_LONGLONG, "counters", "tasks_untracked"},
    {"holdings_lost", SHOW_LONGLONG, nullptr, "holdings_lost"},
    {"releases_unmatched", SHOW_LONGLONG, nullptr, "releases_unmatched"},
    {"resources_refused", SHOW_LONGLONG, "counters", "resources_refused"},
    {"unstable_reads", SHOW_LONGLONG, "counters", "unstable_reads"},
    {"edges_truncated", SHOW_LONGLONG, "counters", "edges_truncated"},
    {"logs_failed", SHOW_LONGLONG, "counters", "logs_failed"},
    {"windows", SHOW_LONGLONG, "counters", "windows"},
};

/* All of them from one report, so that they fit together; the memory is the statement's. */
static int show_status(THD *thd, SHOW_VAR *var, char *) {
  constexpr size_t count = std::size(status_variables);
  struct Snapshot {
    SHOW_VAR vars[count + 1];
    union {
      ulonglong integer;
      double real;
      bool flag;
      char text[32];
    } values[count];
  };
  var->type = SHOW_UNDEF;
  rapidjson::Document stats;
  auto *snapshot = static_cast<Snapshot *>(thd->mem_calloc(sizeof(Snapshot)));
  if (snapshot == nullptr || !atm_region_ready()) return 1;
  const std::string text = stats_text();
  if (stats.Parse(text.c_str(), text.size()).HasParseError()) return 1;
  for (size_t i = 0; i < count; i++) {
    const StatusVariable &v = status_variables[i];
    const Value &section = v.section != nullptr ? member(stats, v.section) : static_cast<const Value &>(stats);
    const Value &value = v.member != nullptr ? member(section, v.member) : section;
    auto &out = snapshot->values[i];
    switch (v.type) {
      case SHOW_CHAR:
        snprintf(out.text, sizeof out.text, "%.*s", static_cast<int>(text_of(value).size()), text_of(value).data());
        break;
      case SHOW_BOOL:
        out.flag = value.IsNumber() && value.GetDouble() < kHeartbeatAliveMs;
        break;
      case SHOW_DOUBLE:
        out.real = value.IsNumber() ? value.GetDouble() : 0;
        break;
      default:
        out.integer = value.IsUint64() ? value.GetUint64() : value.IsArray() ? value.Size() : 0;
    }
    snapshot->vars[i] = {v.name, reinterpret_cast<char *>(&out), v.type, SHOW_SCOPE_GLOBAL};
  }
  snapshot->vars[count] = {nullptr, nullptr, SHOW_UNDEF, SHOW_SCOPE_UNDEF};
  var->type = SHOW_ARRAY;
  var->value = reinterpret_cast<char *>(snapshot->vars);
  return 0;
}

SHOW_VAR atm_status_variables[] = {
    {"Atropos", reinterpret_cast<char *>(show_status), SHOW_FUNC, SHOW_SCOPE_GLOBAL},
    {nullptr, nullptr, SHOW_UNDEF, SHOW_SCOPE_UNDEF}};

/* ---- functions ---- */

static bool has_privilege(THD *thd, std::string_view privilege) {
  Security_context *account = thd->security_context();
  return account->check_access(SUPER_ACL) || account->has_global_grant(privilege.data(), privilege.size()).first;
}

static bool complain(char *message, const char *text) {
  snprintf(message, MYSQL_ERRMSG_SIZE, "%s", text);
  return true;
}

/* atropos_scope([connection id]): number of the present, or last, command of a session; its own without an argument. */
static bool scope_init(UDF_INIT *init, UDF_ARGS *args, char *message) {
  if (!atm_region_ready()) return complain(message, "Atropos does not run in this server");
  if (args->arg_count > 1) return complain(message, "it takes a connection id, or nothing");
  if (args->arg_count == 1) {
    args->arg_type[0] = INT_RESULT;
    if (!current_thd->security_context()->check_access(PROCESS_ACL))
      return complain(message, "another session's needs the PROCESS privilege");
  }
  init->maybe_null = true;
  init->const_item = false; /* each call looks anew */
  return false;
}

static long long scope(UDF_INIT *, UDF_ARGS *args, unsigned char *is_null, unsigned char *) {
  uint64_t scope = 0;
  if (args->arg_count == 0) {
    if (const Atm_session *session = atm_session_of(current_thd)) scope = atropos_task_scope(session->task);
  } else if (args->args[0] != nullptr) {
    const std::lock_guard<std::mutex> guard(atm_sessions_lock);
    const Atm_session *session = atm_session_by_id(*reinterpret_cast<long long *>(args->args[0]));
    if (session != nullptr) scope = atropos_task_scope(session->task);
  }
  *is_null = scope == 0;
  return static_cast<long long>(scope);
}

/* atropos_cancel(connection id, scope): 1 = asked for; 0 = that command has passed, or nobody is followed under the id. */
static bool cancel_init(UDF_INIT *init, UDF_ARGS *args, char *message) {
  if (!atm_region_ready()) return complain(message, "Atropos does not run in this server");
  if (args->arg_count != 2) return complain(message, "it takes a connection id and a scope (0: its present command)");
  if (!has_privilege(current_thd, "CONNECTION_ADMIN"))
    return complain(message, "it needs the CONNECTION_ADMIN privilege");
  args->arg_type[0] = args->arg_type[1] = INT_RESULT;
  init->maybe_null = true;
  init->const_item = false;
  return false;
}

static long long cancel(UDF_INIT *, UDF_ARGS *args, unsigned char *is_null, unsigned char *error) {
  if (args->args[0] == nullptr || args->args[1] == nullptr) {
    *is_null = 1;
    return 0;
  }
  const uint64_t id = *reinterpret_cast<long long *>(args->args[0]);
  const uint64_t scope = *reinterpret_cast<long long *>(args->args[1]);
  atropos_task_t task = 0;
  {
    const std::lock_guard<std::mutex> guard(atm_sessions_lock);
    if (const Atm_session *session = atm_session_by_id(id)) {
      /* As for KILL. */
      if (session->thd->is_system_user() && !current_thd->is_system_user()) {
        my_error(ER_SPECIFIC_ACCESS_DENIED_ERROR, MYF(0), "SYSTEM_USER");
        *error = 1;
        return 0;
      }
      task = session->task;
    }
  }
  if (task == 0) return 0;
  char reason[64];
  snprintf(reason, sizeof reason, "asked for by connection %u", current_thd->thread_id());
  const int rc = atropos_task_cancel(task, scope, reason); /* a task that has ended meanwhile is stale to it */
  if (rc != ATROPOS_OK && rc != ATROPOS_E_STALE) {
    my_printf_error(ER_UNKNOWN_ERROR, "atropos_cancel: code %d, %s", MYF(0), rc, atropos_strerror(rc));
    *error = 1;
  }
  return rc == ATROPOS_OK;
}

static unsigned functions_registered;

bool atm_functions_register() {
  SERVICE_TYPE(registry) *registry = mysql_plugin_registry_acquire();
  if (registry == nullptr) return true;
  bool failed = true;
  {
    my_service<SERVICE_TYPE(udf_registration)> service("udf_registration", registry);
    if (service.is_valid()) {
      failed = service->udf_register("atropos_scope", INT_RESULT, reinterpret_cast<Udf_func_any>(scope), scope_init, nullptr);
      functions_registered += !failed;
      failed = failed || service->udf_register("atropos_cancel", INT_RESULT, reinterpret_cast<Udf_func_any>(cancel), cancel_init,
                                               nullptr);
      functions_registered += !failed;
    }
  }
  mysql_plugin_registry_release(registry);
  return failed;
}

void atm_functions_unregister() {
  if (functions_registered == 0) return;
  SERVICE_TYPE(registry) *registry = mysql_plugin_registry_acquire();
  if (registry == nullptr) return;
  {
    my_service<SERVICE_TYPE(udf_registration)> service("udf_registration", registry);
    int present;
    if (service.is_valid() && functions_registered > 0) service->udf_unregister("atropos_scope", &present);
    if (service.is_valid() && functions_registered > 1) service->udf_unregister("atropos_cancel", &present);
  }
  functions_registered = 0;
  mysql_plugin_registry_release(registry);
}
