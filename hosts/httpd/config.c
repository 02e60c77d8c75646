/*
 * Directives. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Errors come out as "Syntax error on line N of FILE: ..." by httpd, so each says what was given and what is allowed.
 */
#include "atropos_httpd.h"

#include "apr_lib.h"
#include "apr_strings.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

/* The numbers of AtroposSet. The library checks the same ranges; here the line of the file is still known. */
static const struct
{
    const char *name;
    double low, high;
    bool whole; /* uint32_t, else double */
    size_t offset;
} numbers[] = {
    {"slo_tolerance", 0.01, 10, false, offsetof(atropos_config, slo_tolerance)},
    {"contention_threshold", 0.01, 1, false, offsetof(atropos_config, contention_threshold)},
    {"min_relief", 0.01, 1, false, offsetof(atropos_config, min_relief)},
    {"cancel_rate_per_s", 0.001, 1000, false, offsetof(atropos_config, cancel_rate_per_s)},
    {"cancel_share", 0.0001, 1, false, offsetof(atropos_config, cancel_share)},
    {"cancel_burst", 1, 1000, true, offsetof(atropos_config, cancel_burst)},
    {"window_ms", 20, 10000, true, offsetof(atropos_config, window_ms)},
    {"trigger_windows", 1, 100, true, offsetof(atropos_config, trigger_windows)},
    {"verify_ms", 10, 60000, true, offsetof(atropos_config, verify_ms)},
    {"max_tasks", 16, 65536, true, offsetof(atropos_config, max_tasks)},
};

#define SLO_MAX_MS 3600000

void *ath_create_server_config(apr_pool_t *p, server_rec *s)
{
    ath_server_config *cfg = apr_pcalloc(p, sizeof(*cfg));

    cfg->library.size = sizeof(cfg->library);
    cfg->library.mode = ATROPOS_MODE_OBSERVE;
    return cfg;
}

void *ath_create_dir_config(apr_pool_t *p, char *dir)
{
    ath_dir_config *cfg = apr_pcalloc(p, sizeof(*cfg));

    cfg->retry_after_s = ATH_RETRY_AFTER_S;
    return cfg;
}

void *ath_merge_dir_config(apr_pool_t *p, void *base_, void *add_)
{
    const ath_dir_config *base = base_, *add = add_;
    ath_dir_config *cfg = apr_pmemdup(p, base, sizeof(*cfg));

#define MERGE(member, set) \
    if (add->set) {        \
        cfg->member = add->member; \
        cfg->set = true;   \
    }
    MERGE(request_class, class_set)
    MERGE(priority, priority_set)
    MERGE(retry_after_s, retry_after_set)
    MERGE(protect, protect_set)
    MERGE(background, background_set)
#undef MERGE
    return cfg;
}

int ath_retry_after_s(request_rec *r)
{
    const ath_dir_config *cfg = ap_get_module_config(r->per_dir_config, &atropos_module);

    return cfg->retry_after_s;
}

static ath_server_config *server_config(cmd_parms *cmd)
{
    return ap_get_module_config(cmd->server->module_config, &atropos_module);
}

/* A whole number within a range, or an error in words. */
static const char *whole(cmd_parms *cmd, const char *arg, int low, int high, int *value)
{
    char *end;
    long n;

    errno = 0;
    n = strtol(arg, &end, 10);
    if (errno != 0 || end == arg || *end != '\0' || n < low || n > high)
        return apr_psprintf(cmd->pool, "%s: bad value \"%s\"; a whole number from %d to %d is allowed", cmd->cmd->name,
                            arg, low, high);
    *value = (int)n;
    return NULL;
}

static const char *set_mode(cmd_parms *cmd, void *dummy, const char *arg)
{
    ath_server_config *cfg = server_config(cmd);
    const char *err = ap_check_cmd_context(cmd, GLOBAL_ONLY);

    if (err != NULL)
        return err;
    if (!strcasecmp(arg, "off"))
        cfg->library.mode = ATROPOS_MODE_OFF;
    else if (!strcasecmp(arg, "observe"))
        cfg->library.mode = ATROPOS_MODE_OBSERVE;
    else if (!strcasecmp(arg, "enforce"))
        cfg->library.mode = ATROPOS_MODE_ENFORCE;
    else
        return apr_psprintf(cmd->pool, "Atropos: bad value \"%s\"; off, observe and enforce are allowed", arg);
    cfg->mode_set = true;
    return NULL;
}

/* "250", "250ms", "1.5s": milliseconds, or -1. httpd's own parser takes "soon" for 0 seconds. */
static double milliseconds(const char *arg)
{
    static const struct
    {
        const char *unit;
        double ms;
    } units[] = {{"", 1}, {"ms", 1}, {"s", 1000}, {"mi", 60000}, {"min", 60000}, {"h", 3600000}};
    char *end;
    double value;

    if (!apr_isdigit(*arg))
        return -1;
    value = strtod(arg, &end);
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++)
        if (!strcasecmp(end, units[i].unit))
            return value * units[i].ms;
    return -1;
}

static const char *set_slo(cmd_parms *cmd, void *dummy, const char *arg)
{
    const char *err = ap_check_cmd_context(cmd, GLOBAL_ONLY);
    double slo_ms = milliseconds(arg);

    if (err != NULL)
        return err;
    if (!(slo_ms >= 0 && slo_ms <= SLO_MAX_MS))
        return apr_psprintf(cmd->pool, "AtroposSLO: bad value \"%s\"; a time from 0 (learn it) to 1h is allowed, in "
                            "milliseconds or with a unit (ms, s, min, h)", arg);
    server_config(cmd)->library.slo_ms = slo_ms;
    return NULL;
}

static const char *set_number(cmd_parms *cmd, void *dummy, const char *name, const char *arg)
{
    ath_server_config *cfg = server_config(cmd);
    const char *err = ap_check_cmd_context(cmd, GLOBAL_ONLY), *names = "";

    if (err != NULL)
        return err;
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        char *end;
        double value;

        names = apr_pstrcat(cmd->temp_pool, names, i > 0 ? ", " : "", numbers[i].name, NULL);
        if (strcasecmp(name, numbers[i].name) != 0)
            continue;
        errno = 0;
        value = strtod(arg, &end);
        if (errno != 0 || end == arg || *end != '\0' || !(value >= numbers[i].low && value <= numbers[i].high) ||
            (numbers[i].whole && value != floor(value)))
            return apr_psprintf(cmd->pool, "AtroposSet %s: bad value \"%s\"; a %snumber from %g to %g is allowed", name,
                                arg, numbers[i].whole ? "whole " : "", numbers[i].low, numbers[i].high);
        if (numbers[i].whole)
            *(uint32_t *)((char *)&cfg->library + numbers[i].offset) = (uint32_t)value;
        else
            *(double *)((char *)&cfg->library + numbers[i].offset) = value;
        return NULL;
    }
    return apr_psprintf(cmd->pool, "AtroposSet: unknown setting \"%s\"; there are %s", name, names);
}

static const char *set_path(cmd_parms *cmd, void *dummy, const char *arg)
{
    ath_server_config *cfg = server_config(cmd);
    const char *err = ap_check_cmd_context(cmd, GLOBAL_ONLY), *path;

    if (err != NULL)
        return err;
    path = ap_server_root_relative(cmd->pool, arg);
    if (path == NULL)
        return apr_psprintf(cmd->pool, "%s: bad path \"%s\"", cmd->cmd->name, arg);
    *(const char **)((char *)cfg + (size_t)cmd->info) = path;
    return NULL;
}

/* Whether any of the directives below stands anywhere: else no request's sections need to be looked at. Kept over restarts,
 * where it may be true for nothing. */
static bool sections_tell;

bool ath_sections_tell(void)
{
    return sections_tell;
}

static const char *set_class(cmd_parms *cmd, void *cfg_, const char *arg)
{
    ath_dir_config *cfg = cfg_;

    sections_tell = cfg->class_set = true;
    return whole(cmd, arg, 0, 15, &cfg->request_class);
}

static const char *set_priority(cmd_parms *cmd, void *cfg_, const char *arg)
{
    ath_dir_config *cfg = cfg_;

    sections_tell = cfg->priority_set = true;
    return whole(cmd, arg, -100, 100, &cfg->priority);
}

static const char *set_retry_after(cmd_parms *cmd, void *cfg_, const char *arg)
{
    ath_dir_config *cfg = cfg_;

    cfg->retry_after_set = true;
    return whole(cmd, arg, 0, 86400, &cfg->retry_after_s);
}

static const char *set_protect(cmd_parms *cmd, void *cfg_, int on)
{
    ath_dir_config *cfg = cfg_;

    sections_tell = cfg->protect_set = true;
    cfg->protect = on;
    return NULL;
}

static const char *set_background(cmd_parms *cmd, void *cfg_, int on)
{
    ath_dir_config *cfg = cfg_;

    sections_tell = cfg->background_set = true;
    cfg->background = on;
    return NULL;
}

/* Per-directory ones not in .htaccess: whoever writes there could exempt his own scripts. */
#define SECTION (RSRC_CONF | ACCESS_CONF)

const command_rec ath_commands[] = {
    AP_INIT_TAKE1("Atropos", set_mode, NULL, RSRC_CONF,
                  "off; observe (the default): decide and record, cancel nobody; enforce: cancel the culprit"),
    AP_INIT_TAKE1("AtroposSLO", set_slo, NULL, RSRC_CONF,
                  "objective for the 99th percentile of latency, e.g. 200ms; 0 (the default): learn it in calm times"),
    AP_INIT_TAKE2("AtroposSet", set_number, NULL, RSRC_CONF, "NAME VALUE: one of the library's other settings"),
    AP_INIT_TAKE1("AtroposDecisionLog", set_path, (void *)offsetof(ath_server_config, decision_log), RSRC_CONF,
                  "file that gets one line of JSON for each decision"),
    AP_INIT_TAKE1("AtroposRegion", set_path, (void *)offsetof(ath_server_config, region_path), RSRC_CONF,
                  "file behind the shared memory (mode 0600), for watchers; without it the memory has no name"),
    AP_INIT_TAKE1("AtroposClass", set_class, NULL, SECTION,
                  "request class, 0 (the default) to 15: each has a latency baseline of its own"),
    AP_INIT_TAKE1("AtroposPriority", set_priority, NULL, SECTION,
                  "-100 to 100, default 0: of culprits that count the same, the lower goes"),
    AP_INIT_FLAG("AtroposProtect", set_protect, NULL, SECTION, "On: these requests are never cancelled"),
    AP_INIT_FLAG("AtroposBackground", set_background, NULL, SECTION,
                 "On: these requests are long by nature, their latency does not count"),
    AP_INIT_TAKE1("AtroposRetryAfter", set_retry_after, NULL, SECTION,
                  "seconds in the Retry-After of a cancelled request, 0 (none) to 86400; default 5"),
    {NULL},
};
