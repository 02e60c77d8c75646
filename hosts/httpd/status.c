/*
 * The page /atropos-status, and cancels by hand. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 *   SetHandler atropos-status    HTML; ?auto: a line for each value; ?json
 *   SetHandler atropos-cancel    POST ?task=ID[&scope=N]: cancels exactly that request
 *
 * Both tell what other clients are doing, so they belong behind a Require, like mod_status. Query strings, which may
 * hold secrets, never come in here.
 */
#include "atropos_httpd.h"
#include "json.h"

#include "ap_mpm.h"
#include "apr_strings.h"
#include "mod_status.h"
#include "util_script.h"

#include <inttypes.h>
#include <stdlib.h>

static const char *library_stats(apr_pool_t *p)
{
    size_t size = 16384;

    for (;;) {
        char *buf = apr_palloc(p, size);
        size_t length = atropos_stats(buf, size);

        /* It may have grown between two calls. */
        if (length < size)
            return length > 0 ? buf : "{}";
        size = length + length / 4 + 1;
    }
}

static void collect_decision(const char *json, void *list)
{
    apr_array_header_t *decisions = list;

    APR_ARRAY_PUSH(decisions, const char *) = apr_pstrdup(decisions->pool, json);
}

/* What the module itself counts, summed over the children. */
static const char *server_json(request_rec *r)
{
    ath_row sum = {0};
    uint64_t now_ns = ath_now_ns();
    int children = 0;
    const char *mpm = ap_show_mpm();

    for (uint32_t i = 0; i < ath_shared_memory->rows; i++) {
        const ath_row *row = &ath_shared_memory->row[i];
        uint64_t since = ATH_LOAD(row->shortage_ns);

        sum.accepted += ATH_LOAD(row->accepted);
        sum.dropped += ATH_LOAD(row->dropped);
        sum.shortages += ATH_LOAD(row->shortages);
        sum.short_ns += ATH_LOAD(row->short_ns);
        sum.scripts_told += ATH_LOAD(row->scripts_told);
        sum.reads_cut += ATH_LOAD(row->reads_cut);
        sum.connections_cut += ATH_LOAD(row->connections_cut);
        sum.refused += ATH_LOAD(row->refused);
        sum.not_stopped += ATH_LOAD(row->not_stopped);
        if (ATH_LOAD(row->pid) == 0)
            continue;
        children++;
        sum.parked += ATH_LOAD(row->parked);
        sum.stopping += ATH_LOAD(row->stopping);
        if (since != 0 && since < now_ns)
            sum.short_ns += now_ns - since;
    }
    return apr_psprintf(r->pool,
                        "{\"mpm\":\"%s\",\"generation\":%u,\"children\":%d,\"stopping\":%u,\"pid\":%d,\"leads\":%s,"
                        "\"backlog\":%" APR_UINT64_T_FMT ",\"backlog_oldest_ms\":%" APR_UINT64_T_FMT
                        ",\"backlog_limit\":%" APR_UINT64_T_FMT
                        ",\"all_workers_taken\":%s,\"parked\":%" APR_UINT64_T_FMT
                        ",\"accepted\":%" APR_UINT64_T_FMT ",\"keepalives_dropped\":%" APR_UINT64_T_FMT
                        ",\"shortages\":%" APR_UINT64_T_FMT ",\"shortage_ms\":%" APR_UINT64_T_FMT
                        ",\"scripts_told\":%" APR_UINT64_T_FMT ",\"reads_cut\":%" APR_UINT64_T_FMT
                        ",\"connections_cut\":%" APR_UINT64_T_FMT ",\"answered_503\":%" APR_UINT64_T_FMT
                        ",\"not_stopped\":%" APR_UINT64_T_FMT "}",
                        mpm, ath_shared_memory->generation, children, sum.stopping, (int)getpid(),
                        ath_controller_leads() ? "true" : "false", ATH_LOAD(ath_shared_memory->backlog),
                        ATH_LOAD(ath_shared_memory->backlog_ns) / 1000000, ATH_LOAD(ath_shared_memory->backlog_limit),
                        ATH_LOAD(ath_shared_memory->starved) ? "true" : "false", sum.parked, sum.accepted, sum.dropped,
                        sum.shortages, sum.short_ns / 1000000, sum.scripts_told, sum.reads_cut, sum.connections_cut,
                        sum.refused, sum.not_stopped);
}

static const char *whole_json(request_rec *r)
{
    apr_array_header_t *decisions = apr_array_make(r->pool, 64, sizeof(const char *));

    if (ath_shared_memory == NULL)
        return "{\"server\":{},\"atropos\":{\"mode\":\"off\"},\"decisions\":[]}";
    atropos_decisions(collect_decision, decisions);
    return apr_pstrcat(r->pool, "{\"server\":", server_json(r), ",\"atropos\":", library_stats(r->pool),
                       ",\"decisions\":[", apr_array_pstrcat(r->pool, decisions, ','), "]}", NULL);
}

/* ---- ?auto ---- */

#define DEPTH 34
typedef struct lines
{
    request_rec *r;
    int depth;
    struct
    {
        const char *name; /* of the member that this level is */
        int index;        /* of the next element, in an array; -1 in an object */
    } level[DEPTH];
} lines;

static void line(void *arg, ath_json_event event, const char *key, const char *value)
{
    lines *l = arg;
    const char *name;

    if (event == ATH_JSON_END) {
        l->depth--;
        return;
    }
    if (key != NULL)
        name = apr_pstrcat(l->r->pool, l->level[l->depth].name, l->depth > 1 ? "." : "", key, NULL);
    else if (l->depth > 0)
        name = apr_psprintf(l->r->pool, "%s.%d", l->level[l->depth].name, l->level[l->depth].index++);
    else
        name = "";
    if (event == ATH_JSON_OBJECT || event == ATH_JSON_ARRAY) {
        l->depth++;
        l->level[l->depth].name = name;
        l->level[l->depth].index = event == ATH_JSON_ARRAY ? 0 : -1;
        return;
    }
    ap_rprintf(l->r, "%s: %s\n", name, value);
}

/* ---- HTML ---- */

typedef struct page
{
    request_rec *r;
    int depth, table_depth; /* table_depth: of the array whose elements are rows; 0 = none */
    bool heads_done, in_list;
    apr_array_header_t *heads, *cells; /* of the row: const char *, HTML */
} page;

static void add_to_cell(page *p, const char *text)
{
    const char **cell = &APR_ARRAY_IDX(p->cells, p->cells->nelts - 1, const char *);

    *cell = apr_pstrcat(p->r->pool, *cell, **cell ? " " : "", text, NULL);
}

static void print_row(page *p)
{
    if (!p->heads_done) {
        ap_rputs("<tr>", p->r);
        for (int i = 0; i < p->heads->nelts; i++)
            ap_rprintf(p->r, "<th>%s</th>", APR_ARRAY_IDX(p->heads, i, const char *));
        ap_rputs("</tr>\n", p->r);
        p->heads_done = true;
    }
    ap_rputs("<tr>", p->r);
    for (int i = 0; i < p->cells->nelts; i++)
        ap_rprintf(p->r, "<td>%s</td>", APR_ARRAY_IDX(p->cells, i, const char *));
    ap_rputs("</tr>\n", p->r);
    apr_array_clear(p->heads);
    apr_array_clear(p->cells);
}

static void end_list(page *p)
{
    if (p->in_list)
        ap_rputs("</dl>\n", p->r);
    p->in_list = false;
}

/* Scalars are a list; an array of objects is a table, with what is nested in a row told in its cell. */
static void element(void *arg, ath_json_event event, const char *key, const char *value)
{
    page *p = arg;
    const char *name = key != NULL ? ap_escape_html(p->r->pool, key) : NULL;
    bool in_row = p->table_depth > 0 && p->depth > p->table_depth;

    switch (event) {
    case ATH_JSON_OBJECT:
    case ATH_JSON_ARRAY:
        p->depth++;
        if (in_row) {
            if (p->depth == p->table_depth + 2) { /* a member of the row itself */
                APR_ARRAY_PUSH(p->heads, const char *) = name != NULL ? name : "";
                APR_ARRAY_PUSH(p->cells, const char *) = "";
            }
        }
        else if (p->table_depth == 0) {
            end_list(p);
            if (name != NULL)
                ap_rprintf(p->r, "<h%d>%s</h%d>\n", p->depth, name, p->depth);
            if (event == ATH_JSON_ARRAY) {
                p->table_depth = p->depth;
                p->heads_done = false;
                ap_rputs("<table>\n", p->r);
            }
        }
        break;
    case ATH_JSON_END:
        if (p->table_depth > 0 && p->depth == p->table_depth + 1)
            print_row(p);
        else if (p->depth == p->table_depth) {
            ap_rputs("</table>\n", p->r);
            p->table_depth = 0;
        }
        else if (p->table_depth == 0) {
            end_list(p);
        }
        p->depth--;
        break;
    default:
        value = ap_escape_html(p->r->pool, value);
        if (!in_row && p->table_depth == 0) {
            if (!p->in_list)
                ap_rputs("<dl>\n", p->r);
            p->in_list = true;
            ap_rprintf(p->r, "<dt>%s</dt><dd>%s</dd>\n", name != NULL ? name : "", value);
        }
        else if (p->depth == p->table_depth + 1) {
            APR_ARRAY_PUSH(p->heads, const char *) = name != NULL ? name : "";
            APR_ARRAY_PUSH(p->cells, const char *) = value;
        }
        else if (p->cells->nelts > 0) {
            add_to_cell(p, name != NULL ? apr_pstrcat(p->r->pool, name, "=", value, NULL) : value);
        }
        break;
    }
}

static const char page_head[] =
    "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Atropos status</title><style>\n"
    "body{font-family:sans-serif;margin:2em}dl{display:grid;grid-template-columns:max-content auto;gap:.1em 1em}\n"
    "dd{margin:0}table{border-collapse:collapse;font-size:85%}th,td{border:1px solid #bbb;padding:.2em .5em;"
    "text-align:left;vertical-align:top}\n"
    "</style></head><body>\n<h1>Atropos</h1>\n";

/* ---- handlers ---- */

static int cancel_by_hand(request_rec *r)
{
    apr_table_t *args;
    const char *task, *scope;
    int rc;

    r->allowed = (AP_METHOD_BIT << M_POST);
    if (r->method_number != M_POST)
        return HTTP_METHOD_NOT_ALLOWED;
    /* A browser sends this header across sites only if the server allows it first: no forged cancels. */
    if (apr_table_get(r->headers_in, "X-Atropos-Cancel") == NULL) {
        ap_log_rerror(APLOG_MARK, APLOG_INFO, 0, r, "Atropos: a cancel by hand needs the header X-Atropos-Cancel");
        return HTTP_FORBIDDEN;
    }
    if (ath_shared_memory == NULL)
        return HTTP_NOT_FOUND;
    ap_args_to_table(r, &args);
    task = apr_table_get(args, "task");
    scope = apr_table_get(args, "scope");
    if (task == NULL)
        return HTTP_BAD_REQUEST;
    rc = atropos_task_cancel(strtoull(task, NULL, 10), scope != NULL ? strtoull(scope, NULL, 10) : 0,
                             "asked for on the status page");
    ap_set_content_type(r, "text/plain; charset=utf-8");
    if (rc != ATROPOS_OK) {
        r->status = rc == ATROPOS_E_STALE ? HTTP_NOT_FOUND : HTTP_INTERNAL_SERVER_ERROR;
        ap_rprintf(r, "not cancelled: %s\n", ath_last_error());
    }
    else {
        r->status = HTTP_ACCEPTED;
        ap_rputs("asked to stop\n", r);
    }
    return OK;
}

ATH_SELDOM static int answer(request_rec *r)
{
    struct atropos_request *rec;
    const char *json;

    if (strcmp(r->handler, "atropos-status") && strcmp(r->handler, "atropos-cancel"))
        return DECLINED;
    /* Whoever looks at an overload is not to be taken for its cause. */
    if (ath_child.row != NULL && (rec = ath_find(r)) != NULL)
        atropos_task_set(rec->task, ATROPOS_TASK_PROTECTED, 1);
    apr_table_setn(r->headers_out, "Cache-Control", "no-store");
    if (!strcmp(r->handler, "atropos-cancel"))
        return cancel_by_hand(r);

    r->allowed = (AP_METHOD_BIT << M_GET);
    if (r->method_number != M_GET)
        return HTTP_METHOD_NOT_ALLOWED;
    json = whole_json(r);
    if (r->args != NULL && ap_strstr_c(r->args, "json")) {
        ap_set_content_type(r, "application/json");
        if (!r->header_only)
            ap_rputs(json, r);
    }
    else if (r->args != NULL && ap_strstr_c(r->args, "auto")) {
        lines l = {.r = r};

        ap_set_content_type(r, "text/plain; charset=utf-8");
        if (!r->header_only)
            ath_json_walk(json, line, &l);
    }
    else {
        page p = {.r = r, .heads = apr_array_make(r->pool, 32, sizeof(const char *)),
                  .cells = apr_array_make(r->pool, 32, sizeof(const char *))};

        ap_set_content_type(r, "text/html; charset=utf-8");
        if (!r->header_only) {
            ap_rputs(page_head, r);
            ath_json_walk(json, element, &p);
            ap_rputs("</body></html>\n", r);
        }
    }
    return OK;
}

/* Asked for every request that has a handler. */
ATH_HOT int ath_status_handler(request_rec *r)
{
    return r->handler == NULL || r->handler[0] != 'a' || r->handler[1] != 't' ? DECLINED : answer(r);
}

/* ---- a few lines on mod_status's page ---- */

typedef struct summary
{
    int depth;
    char mode[16], state[16];
} summary;

static void summarise(void *arg, ath_json_event event, const char *key, const char *value)
{
    summary *s = arg;

    if (event == ATH_JSON_OBJECT || event == ATH_JSON_ARRAY)
        s->depth++;
    else if (event == ATH_JSON_END)
        s->depth--;
    else if (key != NULL && s->depth == 1 && !strcmp(key, "mode"))
        apr_cpystrn(s->mode, value, sizeof(s->mode));
    else if (key != NULL && s->depth == 2 && !strcmp(key, "state") && s->state[0] == '\0')
        apr_cpystrn(s->state, value, sizeof(s->state));
}

int ath_status_hook(request_rec *r, int flags)
{
    summary s = {.mode = "off"};

    if (ath_shared_memory != NULL)
        ath_json_walk(library_stats(r->pool), summarise, &s);
    if (flags & AP_STATUS_SHORT)
        ap_rprintf(r, "AtroposMode: %s\nAtroposState: %s\n", s.mode, s.state);
    else
        ap_rprintf(r, "<hr />\n<h1>Atropos</h1>\n<dl><dt>Mode: %s</dt>\n<dt>State: %s</dt></dl>\n", s.mode, s.state);
    return OK;
}
