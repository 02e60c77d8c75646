/*
 * Start of the plugin: settings, start and stop. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Loaded only when the server starts (PLUGIN_OPT_NO_INSTALL) and never unloaded while it runs (PLUGIN_OPT_NO_UNINSTALL):
 * sessions are inside its callbacks at any time, and no reference count says when the last one has left. What cannot be
 * uninstalled must not be written into mysql.plugin either, where only a deleted row would get rid of it; so it is the
 * option file alone that says whether the plugin is there.
 */
#include "surface.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "mysql/strings/m_ctype.h"
#include "my_sys.h"
#include "mysql/plugin.h"
#include "mysqld_error.h"
#include "sql/auth/auth_acls.h"
#include "sql/auth/sql_security_ctx.h"
#include "sql/mysqld.h"
#include "sql/sql_class.h"
#include "sql/sql_plugin_var.h"
#include "typelib.h"

/* sql_plugin_var.h bends it for its types of variables. */
#undef MYSQL_SYSVAR_NAME
#define MYSQL_SYSVAR_NAME(name) mysql_sysvar_##name

std::atomic<uint64_t> atm_settings_generation{1};

static bool region_ready;

/* ---- values of the system variables; written under LOCK_global_system_variables ---- */

static unsigned long mode_index; /* ATROPOS_MODE_* - 1 */
static double slo_ms, slo_tolerance, contention_threshold, min_relief, cancel_rate_per_s, cancel_share;
static unsigned window_ms, trigger_windows, verify_ms, cancel_burst, max_tasks;
static char *decision_log, *protect_users, *region_file;
bool atm_terminate_idle_in_transaction; /* read by others without that mutex: one byte, and either value will do */

static std::atomic<bool> mode_off; /* mirror of mode_index, for the controller */
static unsigned tasks_at_start;    /* the region's size, which stays when max_connections changes */

const char *atm_last_error(char *buf, size_t size) {
  if (atropos_last_error(buf, size) == 0) snprintf(buf, size, "no further text");
  return buf;
}

bool atm_region_ready() { return region_ready; }
bool atm_mode_is_off() { return mode_off.load(std::memory_order_relaxed); }

static void fill_config(atropos_config *config) {
  *config = {};
  config->size = sizeof *config;
  config->region_path = region_file != nullptr && region_file[0] != '\0' ? region_file : nullptr;
  config->decision_log = decision_log != nullptr && decision_log[0] != '\0' ? decision_log : nullptr;
  config->mode = mode_index + 1;
  config->max_tasks = tasks_at_start;
  config->window_ms = window_ms;
  config->trigger_windows = trigger_windows;
  config->verify_ms = verify_ms;
  config->slo_ms = slo_ms;
  config->slo_tolerance = slo_tolerance;
  config->contention_threshold = contention_threshold;
  config->min_relief = min_relief;
  config->cancel_rate_per_s = cancel_rate_per_s;
  config->cancel_burst = cancel_burst;
  config->cancel_share = cancel_share;
}

/* ---- SET: refused with the reason, never bent into the range ---- */

static int refuse(SYS_VAR *var, const std::string &value, const char *format, ...) MY_ATTRIBUTE((format(printf, 3, 4)));
static int refuse(SYS_VAR *var, const std::string &value, const char *format, ...) {
  char name[64], reason[256];
  va_list args;
  va_start(args, format);
  vsnprintf(reason, sizeof reason, format, args);
  va_end(args);
  /* The name is without the plugin's prefix while the variable is declared, with it once it is registered. */
  snprintf(name, sizeof name, "%s%s", strncmp(var->name, "atropos_", 8) == 0 ? "" : "atropos_", var->name);
  my_error(ER_WRONG_VALUE_FOR_VAR_PLUS_ACTIONABLE_PART, MYF(0), name, value.c_str(), reason);
  return 1;
}

/* The value as the user wrote it; false for NULL. */
static bool get_text(st_mysql_value *value, std::string *text) {
  char buf[256];
  int length = sizeof buf;
  const char *bytes = value->val_str(value, buf, &length);
  *text = bytes != nullptr ? std::string(bytes, length) : "NULL";
  return bytes != nullptr;
}

static std::string text_of(st_mysql_value *value) {
  std::string text;
  get_text(value, &text);
  return text;
}

static int check_double(THD *, SYS_VAR *var, void *save, st_mysql_value *value) {
  const auto *self = reinterpret_cast<const sysvar_double_t *>(var);
  double number;
  if (value->val_real(value, &number) != 0 || !(number >= self->min_val && number <= self->max_val))
    return refuse(var, text_of(value), "It must be a number from %.10g to %.10g.", self->min_val, self->max_val);
  *static_cast<double *>(save) = number;
  return 0;
}

static int check_unsigned(THD *, SYS_VAR *var, void *save, st_mysql_value *value) {
  const auto *self = reinterpret_cast<const sysvar_uint_t *>(var);
  long long number;
  /* An unsigned value beyond LLONG_MAX looks negative here, and is out of range as well. */
  if (value->val_int(value, &number) != 0 || number < self->min_val || number > self->max_val)
    return refuse(var, text_of(value), "It must be a whole number from %u to %u.", self->min_val, self->max_val);
  *static_cast<unsigned *>(save) = static_cast<unsigned>(number);
  return 0;
}

static const char *mode_names[] = {"off", "observe", "enforce", nullptr};
static TYPELIB modes = {3, "atropos_mode", mode_names, nullptr};

static int check_mode(THD *, SYS_VAR *var, void *save, st_mysql_value *value) {
  if (value->value_type(value) == MYSQL_VALUE_TYPE_STRING) {
    const std::string text = text_of(value);
    /* Whole names only: find_type would take "o" for "off". */
    for (unsigned long i = 0; i < modes.count; i++)
      if (my_strcasecmp(&my_charset_latin1, text.c_str(), mode_names[i]) == 0) {
        *static_cast<unsigned long *>(save) = i;
        return 0;
      }
  }
  return refuse(var, text_of(value), "It must be off, observe or enforce.");
}

/* Gives the library all settings; what it refuses is an error of the statement. */
static bool reload(SYS_VAR *var, const std::string &value) {
  if (!region_ready) return refuse(var, value, "Atropos does not run in this server; the error log tells why."), false;
  atropos_config config;
  fill_config(&config);
  if (const int rc = atropos_reload(&config); rc != ATROPOS_OK) {
    char why[160];
    return refuse(var, value, "Code %d, %s: %s", rc, atropos_strerror(rc), atm_last_error(why, sizeof why)), false;
  }
  mode_off.store(config.mode == ATROPOS_MODE_OFF, std::memory_order_relaxed);
  atm_controller_wake();
  return true;
}

template <typename T>
static void update_number(THD *, SYS_VAR *var, void *target, const void *save) {
  T &value = *static_cast<T *>(target);
  const T before = value;
  value = *static_cast<const T *>(save);
  if (!reload(var, std::to_string(value))) value = before;
}

/* ---- strings: owned here, since a refused value must leave the old one in place ---- */

/* Files that a client may have the server append to: not its option files, not its data. */
static bool is_log_name(std::string_view name) {
  return name.empty() || name.ends_with(".jsonl") || name.ends_with(".log");
}
static constexpr const char *kLogNameRule = "The name must end in .jsonl or .log.";

static int check_decision_log(THD *thd, SYS_VAR *var, void *save, st_mysql_value *value) {
  std::string text;
  if (!get_text(value, &text)) return refuse(var, text, "Empty means none.");
  if (text.size() >= FN_REFLEN) return refuse(var, text, "The name is longer than %d bytes.", FN_REFLEN - 1);
  if (!is_log_name(text)) return refuse(var, text, kLogNameRule);
  if (!text.empty()) {
    /* As the library will open it; it only learns with the first decision that it cannot. */
    const int file = open(text.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0600);
    if (file < 0) return refuse(var, text, "It cannot be opened: %s.", std::system_category().message(errno).c_str());
    close(file);
  }
  *static_cast<const char **>(save) = thd_strmake(thd, text.data(), text.size());
  return 0;
}

/* The current value came from the server (start) or from here; only the latter is ours to free. */
struct OwnedString {
  char *ours = nullptr;
  void replace(char **target, char *value) {
    char *old = std::exchange(ours, value);
    *target = value;
    my_free(old);
  }
};
static OwnedString owned_decision_log, owned_protect_users;

static char *copy_of(const void *save) {
  const char *value = *static_cast<const char *const *>(save);
  return my_strdup(PSI_NOT_INSTRUMENTED, value != nullptr ? value : "", MYF(MY_WME));
}

static void update_decision_log(THD *, SYS_VAR *var, void *target, const void *save) {
  char *const before = decision_log;
  char *const copy = copy_of(save);
  if (copy == nullptr) return;
  decision_log = copy;
  const bool good = reload(var, copy);
  decision_log = before;
  if (good)
    owned_decision_log.replace(static_cast<char **>(target), copy);
  else
    my_free(copy);
}

/* ---- protected accounts ---- */

struct Account {
  std::string user, host;
  bool any_host;
};

static std::mutex protected_lock; /* a leaf: taken at the begin of sessions, whatever they hold */
static std::vector<Account> protected_accounts;
static std::atomic<bool> any_protected{false};

static std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

/* One part of an account: bare, or in quotes of one kind. Moves `text` past it. */
static bool take_part(std::string_view &text, std::string_view stops, std::string *part) {
  if (!text.empty() && (text[0] == '\'' || text[0] == '"' || text[0] == '`')) {
    const auto end = text.find(text[0], 1);
    if (end == std::string_view::npos) return false;
    *part = text.substr(1, end - 1);
    text.remove_prefix(end + 1);
  } else {
    const auto end = std::min(text.find_first_of(stops), text.size());
    *part = trimmed(text.substr(0, end));
    text.remove_prefix(end);
  }
  text = text.substr(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  return true;
}

/* Reads "user, user@host, 'some user'@'10.%'"; `error` says what is wrong with it. */
static bool parse_accounts(const char *list, std::vector<Account> *accounts, std::string *error) {
  std::string_view rest = trimmed(list != nullptr ? list : "");
  while (!rest.empty()) {
    Account account{{}, {}, true};
    bool good = take_part(rest, "@,", &account.user);
    if (good && !rest.empty() && rest[0] == '@') {
      account.any_host = false;
      rest.remove_prefix(1);
      good = take_part(rest, ",", &account.host) && !account.host.empty();
    }
    if (!good || account.user.empty() || (!rest.empty() && rest[0] != ',')) {
      *error = "It must be a list of user or user@host, separated by commas.";
      return false;
    }
    if (!rest.empty()) rest = trimmed(rest.substr(1));
    accounts->push_back(std::move(account));
  }
  return true;
}

static void use_accounts(std::vector<Account> &&accounts) {
  const std::lock_guard<std::mutex> guard(protected_lock);
  any_protected.store(!accounts.empty(), std::memory_order_relaxed);
  protected_accounts = std::move(accounts);
  atm_settings_generation.fetch_add(1, std::memory_order_release);
}

static int check_protect_users(THD *thd, SYS_VAR *var, void *save, st_mysql_value *value) {
  std::string text, error = "Empty means nobody.";
  std::vector<Account> accounts;
  if (!get_text(value, &text) || !parse_accounts(text.c_str(), &accounts, &error)) return refuse(var, text, "%s", error.c_str());
  *static_cast<const char **>(save) = thd_strmake(thd, text.data(), text.size());
  return 0;
}

static void update_protect_users(THD *, SYS_VAR *, void *target, const void *save) {
  char *const copy = copy_of(save);
  std::vector<Account> accounts;
  std::string error;
  if (copy == nullptr) return;
  parse_accounts(copy, &accounts, &error); /* checked before */
  owned_protect_users.replace(static_cast<char **>(target), copy);
  use_accounts(std::move(accounts));
}

bool atm_account_is_protected(THD *thd) {
  if (!any_protected.load(std::memory_order_relaxed)) return false;
  const Security_context *account = thd->security_context();
  const std::string_view user(account->priv_user().str, account->priv_user().length);
  const std::lock_guard<std::mutex> guard(protected_lock);
  return std::any_of(protected_accounts.begin(), protected_accounts.end(), [&](const Account &a) {
    return a.user == user &&
           (a.any_host || my_strcasecmp(system_charset_info, a.host.c_str(), account->priv_host().str) == 0);
  });
}

/* ---- other settings ---- */

/* Importance decides who goes first, so nobody may raise his own. */
static int check_priority(THD *thd, SYS_VAR *var, void *save, st_mysql_value *value) {
  const auto *self = reinterpret_cast<const thdvar_int_t *>(var);
  Security_context *account = thd->security_context();
  if (!account->check_access(SUPER_ACL) && !account->has_global_grant(STRING_WITH_LEN("SYSTEM_VARIABLES_ADMIN")).first &&
      !account->has_global_grant(STRING_WITH_LEN("SESSION_VARIABLES_ADMIN")).first) {
    my_error(ER_SPECIFIC_ACCESS_DENIED_ERROR, MYF(0), "SUPER, SYSTEM_VARIABLES_ADMIN or SESSION_VARIABLES_ADMIN");
    return 1;
  }
  long long number;
  if (value->val_int(value, &number) != 0 || number < self->min_val || number > self->max_val ||
      (number < 0 && value->is_unsigned(value)))
    return refuse(var, text_of(value), "It must be a whole number from %d to %d.", self->min_val, self->max_val);
  *static_cast<int *>(save) = static_cast<int>(number);
  return 0;
}

static void update_priority(THD *, SYS_VAR *, void *target, const void *save) {
  *static_cast<int *>(target) = *static_cast<const int *>(save);
  atm_settings_generation.fetch_add(1, std::memory_order_release);
}

/* ---- the variables ---- */

#define SETTING PLUGIN_VAR_RQCMDARG
#define FIXED (PLUGIN_VAR_RQCMDARG | PLUGIN_VAR_READONLY)

static MYSQL_SYSVAR_ENUM(mode, mode_index, SETTING,
                         "What Atropos does about an overload. off: nothing, and traces nothing. observe: decides and "
                         "records, cancels nobody. enforce: cancels the culprit.",
                         check_mode, update_number<unsigned long>, ATROPOS_MODE_OBSERVE - 1, &modes);
static MYSQL_SYSVAR_DOUBLE(slo_ms, slo_ms, SETTING,
                           "Objective for the 99th percentile of statement latency, in milliseconds; 0 learns it from "
                           "the server's own calm times.",
                           check_double, update_number<double>, 0, 0, 3600000, 0);
static MYSQL_SYSVAR_DOUBLE(slo_tolerance, slo_tolerance, SETTING,
                           "How far latency may rise over the learned baseline, as a share of it. Counts only while "
                           "atropos_slo_ms is 0.",
                           check_double, update_number<double>, 0.20, 0.01, 10, 0);
static MYSQL_SYSVAR_DOUBLE(contention_threshold, contention_threshold, SETTING,
                           "Share of execution time lost to one resource that makes it the cause.", check_double,
                           update_number<double>, 0.30, 0.01, 1, 0);
static MYSQL_SYSVAR_DOUBLE(min_relief, min_relief, SETTING, "Share of execution time that a cancel must give back.",
                           check_double, update_number<double>, 0.25, 0.01, 1, 0);
static MYSQL_SYSVAR_UINT(window_ms, window_ms, SETTING, "Length of one measuring window, in milliseconds.",
                         check_unsigned, update_number<unsigned>, 100, 20, 10000, 1);
static MYSQL_SYSVAR_UINT(trigger_windows, trigger_windows, SETTING,
                         "Windows in a row over the objective that make an overload.", check_unsigned,
                         update_number<unsigned>, 3, 1, 100, 1);
static MYSQL_SYSVAR_UINT(verify_ms, verify_ms, SETTING,
                         "Time in which a cancel must show its effect, in milliseconds.", check_unsigned,
                         update_number<unsigned>, 200, 10, 60000, 1);
static MYSQL_SYSVAR_DOUBLE(cancel_rate_per_s, cancel_rate_per_s, SETTING, "Cancels a second on average, at most.",
                           check_double, update_number<double>, 2, 0.001, 1000, 0);
static MYSQL_SYSVAR_UINT(cancel_burst, cancel_burst, SETTING, "Cancels at once, at most.", check_unsigned,
                         update_number<unsigned>, 4, 1, 1000, 1);
static MYSQL_SYSVAR_DOUBLE(cancel_share, cancel_share, SETTING,
                           "Share of the completed statements that may be cancelled, the burst excepted.", check_double,
                           update_number<double>, 0.01, 0.0001, 1, 0);
static MYSQL_SYSVAR_STR(decision_log, decision_log, SETTING,
                        "File that gets one line of JSON for each decision, relative to the data directory; its name "
                        "ends in .jsonl or .log. Empty writes none.",
                        check_decision_log, update_decision_log, "");
static MYSQL_SYSVAR_STR(protect_users, protect_users, SETTING,
                        "Accounts whose sessions are never cancelled: user or user@host, separated by commas, as "
                        "CURRENT_USER() shows them.",
                        check_protect_users, update_protect_users, "");
static MYSQL_SYSVAR_BOOL(terminate_idle_in_transaction, atm_terminate_idle_in_transaction, PLUGIN_VAR_OPCMDARG,
                         "Ends the session of an idle transaction that is the culprit. No error can reach an idle "
                         "session, so only ending it frees its locks.",
                         nullptr, nullptr, true);
static MYSQL_SYSVAR_UINT(max_tasks, max_tasks, FIXED,
                         "Sessions that can be followed at once; further ones run untracked. 0: max_connections at the "
                         "start and 64 more.",
                         nullptr, nullptr, 0, 0, 65536, 1);
static MYSQL_SYSVAR_STR(region_file, region_file, FIXED,
                        "File, mode 0600, through which other processes may watch; empty: none.", nullptr, nullptr, "");
static MYSQL_THDVAR_INT(priority, PLUGIN_VAR_RQCMDARG,
                        "Importance of this session, higher is more important: of two culprits that count the same, "
                        "the one of lower priority is cancelled.",
                        check_priority, update_priority, 0, -100, 100, 1);

int atm_session_priority(THD *thd) { return THDVAR(thd, priority); }

static SYS_VAR *system_variables[] = {MYSQL_SYSVAR(mode),
                                      MYSQL_SYSVAR(slo_ms),
                                      MYSQL_SYSVAR(slo_tolerance),
                                      MYSQL_SYSVAR(contention_threshold),
                                      MYSQL_SYSVAR(min_relief),
                                      MYSQL_SYSVAR(window_ms),
                                      MYSQL_SYSVAR(trigger_windows),
                                      MYSQL_SYSVAR(verify_ms),
                                      MYSQL_SYSVAR(cancel_rate_per_s),
                                      MYSQL_SYSVAR(cancel_burst),
                                      MYSQL_SYSVAR(cancel_share),
                                      MYSQL_SYSVAR(decision_log),
                                      MYSQL_SYSVAR(protect_users),
                                      MYSQL_SYSVAR(terminate_idle_in_transaction),
                                      MYSQL_SYSVAR(max_tasks),
                                      MYSQL_SYSVAR(region_file),
                                      MYSQL_SYSVAR(priority),
                                      nullptr};

/* ---- start and stop ---- */

static bool trace_runs;

/* Undoes what start() did, however far it came. */
static int stop(void *) {
  atm_functions_unregister();
  atm_controller_stop();
  if (std::exchange(trace_runs, false)) atm_trace_stop();
  if (std::exchange(region_ready, false)) atropos_shutdown();
  atm_log_close();
  return 0;
}

/* True: the server starts without Atropos, and the error log says why. */
static bool failed(const char *format, ...) MY_ATTRIBUTE((format(printf, 1, 2)));
static bool failed(const char *format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  atm_log(1, "the server starts without Atropos: %s", text);
  return true;
}

static bool start_parts() {
  char why[512];
  if (!atm_server_is_patched())
    return failed("this server was built without the tracepoints. Build MySQL with patches/mysql/%d.%d of Atropos, or remove "
                  "atropos.so from plugin_load_add",
                  MYSQL_VERSION_MAJOR, MYSQL_VERSION_MINOR);
  std::vector<Account> accounts;
  std::string error;
  if (!parse_accounts(protect_users, &accounts, &error))
    return failed("atropos_protect_users = %s: %s", protect_users, error.c_str());
  if (decision_log != nullptr && !is_log_name(decision_log))
    return failed("atropos_decision_log = %s: %s", decision_log, kLogNameRule);
  use_accounts(std::move(accounts));

  /* Every connection there may be, and the server's own threads. */
  tasks_at_start = max_tasks > 0 ? std::max(16u, max_tasks) : std::min(65536ul, max_connections + 64);
  atropos_config config;
  fill_config(&config);
  if (const int rc = atropos_init(&config); rc != ATROPOS_OK)
    return failed("atropos_init: code %d, %s: %s", rc, atropos_strerror(rc), atm_last_error(why, sizeof why));
  region_ready = true;
  mode_off.store(config.mode == ATROPOS_MODE_OFF, std::memory_order_relaxed);
  if (!atm_trace_start()) return failed("a resource: %s", atm_last_error(why, sizeof why));
  trace_runs = true;
  atropos_edge_source(atm_edges, nullptr);
  atropos_set_describe(atm_describe, nullptr);
  atropos_set_cancel_action(atm_cancel, nullptr);
  atropos_set_terminate_action(atm_cancel, nullptr, 0);
  atropos_set_rollback_cost(atm_rollback_cost, nullptr);
  atropos_set_progress_source(atm_progress, nullptr);
  if (const int rc = atm_controller_start(); rc != 0) return failed("no thread for the controller: error %d", rc);
  if (atm_functions_register())
    return failed("the functions atropos_scope and atropos_cancel could not be registered; is there another of that name?");
  return false;
}

static int start(void *) {
  if (atm_log_open()) return 1;
  if (start_parts()) {
    stop(nullptr);
    return 1;
  }
  atm_log_flush();
  return 0;
}

/* ---- declaration ---- */

static st_mysql_storage_engine engine_info = {MYSQL_HANDLERTON_INTERFACE_VERSION};
static st_mysql_daemon daemon_info = {MYSQL_DAEMON_INTERFACE_VERSION};
static st_mysql_information_schema table_info = {MYSQL_INFORMATION_SCHEMA_INTERFACE_VERSION};

#define ATROPOS_PLUGIN(type, info, name, text, init, deinit, status, variables)                                    \
  {                                                                                                               \
    type, &(info), name, "The Atropos contributors", text, PLUGIN_LICENSE_BSD, init, nullptr, deinit,      \
        ATROPOS_VERSION_MAJOR << 8 | ATROPOS_VERSION_MINOR, status, variables, nullptr,                           \
        PLUGIN_OPT_NO_INSTALL | PLUGIN_OPT_NO_UNINSTALL                                                           \
  }

/* In the order in which they start. */
mysql_declare_plugin(atropos)
ATROPOS_PLUGIN(MYSQL_STORAGE_ENGINE_PLUGIN, engine_info, "atropos_sessions", "A place for Atropos in each session; stores nothing",
               atm_engine_init, atm_engine_deinit, nullptr, nullptr),
ATROPOS_PLUGIN(MYSQL_DAEMON_PLUGIN, daemon_info, "atropos", "Finds the statement that monopolises a resource and cancels it",
               start, stop, atm_status_variables, system_variables),
ATROPOS_PLUGIN(MYSQL_INFORMATION_SCHEMA_PLUGIN, table_info, "ATROPOS_RESOURCES", "Resources that Atropos watches",
               atm_resources_init, nullptr, nullptr, nullptr),
ATROPOS_PLUGIN(MYSQL_INFORMATION_SCHEMA_PLUGIN, table_info, "ATROPOS_TASKS", "Sessions that Atropos follows",
               atm_tasks_init, nullptr, nullptr, nullptr),
ATROPOS_PLUGIN(MYSQL_INFORMATION_SCHEMA_PLUGIN, table_info, "ATROPOS_DECISIONS", "What Atropos did, or would have done",
               atm_decisions_init, nullptr, nullptr, nullptr)
mysql_declare_plugin_end;
