/*
 * How a request is stopped. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The library calls ath_cancel in the process that owns the request, on its agent's or controller's thread. From there
 * only little is safe: a flag, shutdown() of a socket that is open for sure, an interpreter's own stop. The rest the
 * request's thread does by itself when it comes by: in its filters, or in what the interpreter calls.
 *
 * A late cancel can hit nobody else: the record's request is compared by its task's scope, which never repeats, and its end
 * waits for whoever may just have found it the right one (request_gone).
 */
#include "atropos_httpd.h"

#include "apr_strings.h"
#include "util_filter.h"

#include <sys/socket.h>

/* ---- the ladder ---- */

/* The steps in the order in which they are tried: the first that fits the request is taken. The flag that the first
 * step goes by is set in any case. */
typedef enum ath_step
{
    ATH_STEP_COOPERATE, /* the request's thread looks at the flag: an answer of 503 is still possible */
    ATH_STEP_READ,      /* it reads the body: end of input wakes it up, and it can still answer */
    ATH_STEP_WRITE,     /* it writes, or nothing milder is left: the connection is cut */
    ATH_STEP_PROXY,     /* it waits for a backend: not taken yet */
    ATH_STEP_CGI,       /* it waits for a script's process: not taken yet */
    ATH_STEP_SCRIPT,    /* an interpreter runs it, and stops it by itself */
    ATH_STEP_THREAD,    /* it sleeps in C, so its thread would have to be cancelled: not taken yet */
    ATH_STEP_NONE
} ath_step;

static void cut_reading(struct atropos_request *rec)
{
    if (rec->fd >= 0 && shutdown(rec->fd, SHUT_RD) == 0)
        ATH_ADD(ath_child.row->reads_cut, 1);
}

static void cut_connection(struct atropos_request *rec)
{
    struct linger reset = {.l_onoff = 1, .l_linger = 0};

    if (rec->fd < 0)
        return;
    /* httpd's own word for it, which it only ever sets, and looks at before each write. */
    ATH_STORE(rec->conn->c->aborted, 1);
    /* Closed with a reset: an answer that ends with the connection must not look complete. */
    setsockopt(rec->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    if (shutdown(rec->fd, SHUT_RDWR) == 0)
        ATH_ADD(ath_child.row->connections_cut, 1);
}

/*
 * Under the record's lock. `first`: no cancel came before this one. Repeats may come while the 503 is being written, which
 * takes long where a filter or the client is slow: it stays whole until somebody says that it takes too long.
 */
static ath_step climb(struct atropos_request *rec, int rung, bool first)
{
    ath_phase phase = ATH_LOAD(rec->marks.phase);
    bool answered = ATH_LOAD(rec->marks.answered);

    if (rec->stop != NULL) {
        int told = rec->stop(rec->baton, rec->token, rung);

        if (told == ATROPOS_STOP_CLIENT_READ || (phase == ATH_PHASE_READING && !answered))
            cut_reading(rec);
        else if (told == ATROPOS_STOP_CLIENT_WRITE || (phase == ATH_PHASE_WRITING && !answered))
            cut_connection(rec);
        if (told != ATROPOS_STOP_CANNOT)
            ATH_ADD(ath_child.row->scripts_told, 1);
        return told != ATROPOS_STOP_CANNOT ? ATH_STEP_SCRIPT : ATH_STEP_NONE;
    }
    if (answered && rung == 1)
        return ATH_STEP_COOPERATE;
    if (phase == ATH_PHASE_READING && rung == 1) {
        cut_reading(rec);
        return ATH_STEP_READ;
    }
    /* Before its filters and its interpreter are there, a request may be about to see the flag: it gets the time until
     * the cancel is repeated. */
    if (phase == ATH_PHASE_RUNNING && (ATH_LOAD(rec->marks.filtered) || first) && rung == 1)
        return ATH_STEP_COOPERATE;
    if (rec->fd >= 0) {
        cut_connection(rec);
        return ATH_STEP_WRITE;
    }
    if (rec->conn->c->master != NULL)
        return ATH_STEP_COOPERATE; /* a stream of HTTP/2 has no socket of its own */
    return ATH_STEP_NONE; /* no worker has it: nothing is held that anybody waits for */
}

/* The cancel action (rung 1) and the terminate action (rung 2). */
int ath_cancel(const atropos_cancel_request *request, void *arg)
{
    struct atropos_request *rec = ath_record(request->key);
    ath_step step = ATH_STEP_NONE;

    if (rec == NULL)
        return -1;
    pthread_mutex_lock(&rec->lock);
    __atomic_store_n(&rec->cancelling, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&rec->token, __ATOMIC_SEQ_CST) != 0 && rec->task == request->task &&
        rec->scope == request->scope) {
        bool first = rec->marks.rung == 0;

        if ((int)request->rung > rec->marks.rung)
            ATH_STORE(rec->marks.rung, (uint8_t)request->rung);
        step = climb(rec, (int)request->rung, first);
        if (step == ATH_STEP_NONE)
            ATH_ADD(ath_child.row->not_stopped, 1);
    }
    __atomic_store_n(&rec->cancelling, 0, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&rec->lock);
    return step == ATH_STEP_NONE ? -1 : 0;
}

/* ---- in the request's own thread ---- */

static void acknowledge(struct atropos_request *rec)
{
    atropos_task_cancel_acknowledge(rec->task, atropos_task_scope(rec->task));
}

/* Claims the answer for a 503, if nothing of another one has been passed on. */
static bool claim_refusal(struct atropos_request *rec, request_rec *r)
{
    int seconds = ath_retry_after_s(r);

    if (rec->marks.started || rec->marks.answered || r->main != NULL || r->connection->aborted)
        return false;
    ATH_STORE(rec->marks.answered, true);
    if (seconds > 0)
        apr_table_setn(r->err_headers_out, "Retry-After", apr_itoa(r->pool, seconds));
    ATH_ADD(ath_child.row->refused, 1);
    return true;
}

/* The header filter takes the error for the answer and sends its page. */
static void insert_refusal(apr_bucket_brigade *bb, request_rec *r)
{
    apr_bucket *error = ap_bucket_error_create(HTTP_SERVICE_UNAVAILABLE, NULL, r->pool, bb->bucket_alloc);

    APR_BRIGADE_INSERT_TAIL(bb, error);
    APR_BRIGADE_INSERT_TAIL(bb, apr_bucket_eos_create(bb->bucket_alloc));
}

static void abort_response(request_rec *r)
{
    struct atropos_request *rec = ath_find(r);
    struct linger reset = {.l_onoff = 1, .l_linger = 0};
    conn_rec *c = r->connection;

    if (c->master != NULL && !c->aborted) {
        /* A stream of HTTP/2: the error makes mod_http2 reset it, where a mere end would look like the end of the page. */
        apr_bucket_brigade *bb = apr_brigade_create(r->pool, c->bucket_alloc);

        APR_BRIGADE_INSERT_TAIL(bb, ap_bucket_error_create(HTTP_BAD_GATEWAY, NULL, r->pool, c->bucket_alloc));
        ap_pass_brigade(c->output_filters, bb);
    }
    /* Not shut down here: that would send the end of a response which has no length. The close that follows resets. */
    ATH_STORE(c->aborted, 1);
    if (rec != NULL && rec->fd >= 0)
        setsockopt(rec->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    ATH_ADD(ath_child.row->connections_cut, 1);
}

/* Interpreters that answer for themselves, also before they have entered: they read the body first. */
static bool answers_itself(const request_rec *r)
{
    return r->handler != NULL &&
           (!strncmp(r->handler, "application/x-httpd-php", 23) || !strcmp(r->handler, "php-script"));
}

static apr_status_t output_filter(ap_filter_t *f, apr_bucket_brigade *bb)
{
    struct atropos_request *rec = f->ctx;
    apr_status_t rv;

    if (ATH_LOAD(rec->marks.rung) != 0 && !rec->marks.scripted && !rec->marks.answered) {
        request_rec *r = f->r;

        acknowledge(rec);
        apr_brigade_cleanup(bb);
        if (claim_refusal(rec, r)) {
            insert_refusal(bb, r);
            ap_remove_output_filter(f);
            return ap_pass_brigade(f->next, bb);
        }
        abort_response(r);
        return APR_ECONNABORTED;
    }
    if (APR_BRIGADE_EMPTY(bb))
        return APR_SUCCESS;
    rec->marks.started = true;
    /* What the client takes to read is its time. */
    atropos_task_client_wait(rec->task, 1);
    ATH_STORE(rec->marks.phase, ATH_PHASE_WRITING);
    rv = ap_pass_brigade(f->next, bb);
    ATH_STORE(rec->marks.phase, ATH_PHASE_RUNNING);
    atropos_task_client_wait(rec->task, 0);
    if (ATH_LOAD(rec->marks.rung) != 0 && !rec->marks.scripted)
        acknowledge(rec);
    return rv;
}

static apr_status_t input_filter(ap_filter_t *f, apr_bucket_brigade *bb, ap_input_mode_t mode, apr_read_type_e block,
                                 apr_off_t bytes)
{
    struct atropos_request *rec = f->ctx;
    request_rec *r = f->r;
    apr_status_t rv = APR_ECONNABORTED;

    if (ATH_LOAD(rec->marks.rung) == 0) {
        atropos_task_client_wait(rec->task, 1);
        ATH_STORE(rec->marks.phase, ATH_PHASE_READING);
        /* Once more: a cancel in between saw the phase before, and cut nothing. */
        if (ATH_LOAD(rec->marks.rung) == 0)
            rv = ap_get_brigade(f->next, bb, mode, block, bytes);
        ATH_STORE(rec->marks.phase, ATH_PHASE_RUNNING);
        atropos_task_client_wait(rec->task, 0);
    }
    if (ATH_LOAD(rec->marks.rung) == 0 || rec->marks.scripted || answers_itself(r))
        return rv;
    acknowledge(rec);
    apr_brigade_cleanup(bb);
    if (claim_refusal(rec, r)) {
        apr_bucket_brigade *answer = apr_brigade_create(r->pool, bb->bucket_alloc);

        insert_refusal(answer, r);
        ap_pass_brigade(r->output_filters, answer);
    }
    return AP_FILTER_ERROR;
}

static ap_filter_rec_t *output_handle, *input_handle;

void ath_register_filters(void)
{
    /* Next to the filter that makes the headers: what has passed here has been sent, as far as httpd is concerned. */
    output_handle = ap_register_output_filter("ATROPOS_OUT", output_filter, NULL, AP_FTYPE_PROTOCOL - 1);
    input_handle = ap_register_input_filter("ATROPOS_IN", input_filter, NULL, AP_FTYPE_PROTOCOL - 1);
}

ATH_SELDOM static void add_filters(request_rec *r)
{
    struct atropos_request *rec = ath_find(r);

    if (rec == NULL)
        return;
    ath_label(rec);
    ATH_STORE(rec->marks.filtered, true);
    ap_add_output_filter_handle(output_handle, rec, r, r->connection);
    if (r->method_number != M_GET)
        ap_add_input_filter_handle(input_handle, rec, r, r->connection);
}

ATH_HOT void ath_insert_filter(request_rec *r)
{
    if (r->main == NULL && !ath_is_small_file(r) && ath_child.row != NULL)
        add_filters(r);
}

/* ---- for other modules (mod_atropos.h) ---- */

static uint64_t api_enter(atropos_request *rec, atropos_stop_fn stop, void *baton)
{
    uint64_t token = 0;

    if (rec == NULL || stop == NULL)
        return 0;
    pthread_mutex_lock(&rec->lock);
    if (rec->stop == NULL && rec->token != 0) {
        rec->stop = stop;
        rec->baton = baton;
        rec->marks.scripted = true;
        token = rec->token;
        if (rec->marks.rung > 0)
            stop(baton, token, rec->marks.rung);
    }
    pthread_mutex_unlock(&rec->lock);
    return token;
}

static void api_leave(atropos_request *rec, uint64_t token)
{
    if (rec == NULL || token == 0)
        return;
    pthread_mutex_lock(&rec->lock);
    if (rec->token == token)
        rec->stop = NULL;
    pthread_mutex_unlock(&rec->lock);
}

static int api_cancelled(atropos_request *rec, uint64_t token, atropos_cancel_info *why)
{
    int rung = 0;

    if (rec != NULL && token != 0 && rec->token == token)
        rung = ATH_LOAD(rec->marks.rung);
    if (rung > 0 && why != NULL && atropos_task_cancel_info(rec->task, why) != 1 && why->size == sizeof(*why))
        *why = (atropos_cancel_info){.size = sizeof(*why)};
    return rung;
}

static void api_acknowledge(atropos_request *rec, uint64_t token)
{
    if (rec != NULL && token != 0 && rec->token == token)
        acknowledge(rec);
}

static int api_refuse(request_rec *r)
{
    struct atropos_request *rec = ath_find(r);

    if (rec == NULL || !claim_refusal(rec, r))
        return 0;
    r->status = HTTP_SERVICE_UNAVAILABLE;
    r->status_line = NULL;
    return 1;
}

static atropos_task_t api_task(atropos_request *rec)
{
    return rec != NULL ? rec->task : 0;
}

const atropos_httpd_api *atropos_httpd(void)
{
    static const atropos_httpd_api api = {
        .size = sizeof(api),
        .version = ATROPOS_HTTPD_API_VERSION,
        .find = ath_find,
        .enter = api_enter,
        .leave = api_leave,
        .cancelled = api_cancelled,
        .acknowledge = api_acknowledge,
        .refuse = api_refuse,
        .retry_after_s = ath_retry_after_s,
        .abort_response = abort_response,
        .task = api_task,
        .resource_register = atropos_resource_register,
        .wait = atropos_task_slow_by_resource,
        .acquired = atropos_task_get_resource,
        .released = atropos_task_free_resource,
        .abandoned = atropos_task_wait_abandoned,
    };

    return &api;
}
