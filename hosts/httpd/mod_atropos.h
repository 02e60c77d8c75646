/*
 * What mod_atropos offers to other modules of the server, such as an interpreter that knows how to stop a script.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * One optional function of APR gives a table of functions, so nobody links anybody, and both load without the other:
 *
 *     APR_OPTIONAL_FN_TYPE(atropos_httpd) *get = APR_RETRIEVE_OPTIONAL_FN(atropos_httpd);
 *     const atropos_httpd_api *api = get != NULL ? get() : NULL;
 *
 * (APR_RETRIEVE_OPTIONAL_FN is apr_dynamic_fn_retrieve("atropos_httpd"), which a module of a module finds with dlsym.)
 * The table stands until the next restart of the server. Ask from post_config on: in each generation once is enough.
 *
 * A request is named by two things: an opaque pointer, which its own thread may use until the request's pool is
 * destroyed, and a token, which is never used again in this process. The task's handle is for the hot calls only.
 */
#ifndef MOD_ATROPOS_H
#define MOD_ATROPOS_H

#include "httpd.h"
#include "apr_optional.h"

#include "atropos.h"

/* Changes when a member changes its meaning; new members are added at the end and `size` tells. */
#define ATROPOS_HTTPD_API_VERSION 1

typedef struct atropos_request atropos_request;

/*
 * Stops what runs for the request. Called by another thread of the same process, which holds the request's lock: the
 * request cannot end meanwhile, and what `baton` points to must stay valid until leave() has returned. It must be quick
 * and must not block, allocate, or call into the server, this table or the library: set a flag, send a signal to the
 * thread, shut a socket down.
 *
 * rung: 1 = stop the script; 2 = it was told and is still there: end what it does now (its shutdown functions). The
 * same rung may come again: a lost cancel is repeated while the request stands. Returns one of ATROPOS_STOP_*.
 */
#define ATROPOS_STOP_TOLD 0
/* Told, but it is reading from or writing to the client through the server, where a signal does not get it out:
 * mod_atropos shuts that side of the connection down. (A read or write within its filters it knows by itself.) */
#define ATROPOS_STOP_CLIENT_READ 1
#define ATROPOS_STOP_CLIENT_WRITE 2
/* Nothing could be done. */
#define ATROPOS_STOP_CANNOT (-1)

typedef int (*atropos_stop_fn)(void *baton, uint64_t token, int rung);

typedef struct atropos_httpd_api
{
    size_t size;
    int version;

    /* ---- in the request's own thread; r may be a subrequest or an internal redirect ---- */

    /* The request that r belongs to; NULL = untracked (Atropos is off, or the table is full). */
    atropos_request *(*find)(request_rec *r);

    /*
     * From now on `stop` stops this request, instead of an abort of its connection. Returns the token; 0 = somebody
     * else has it (a script within a script), or request is NULL. If a cancel has come before, stop is called at
     * once, from within this call.
     */
    uint64_t (*enter)(atropos_request *request, atropos_stop_fn stop, void *baton);

    /* The end of it. After the return stop neither runs nor will run. A token that is not the present one: nothing. */
    void (*leave)(atropos_request *request, uint64_t token);

    /*
     * Does a cancel stand for this request? 0 = no, else the highest rung so far (1, 2). `why` (or NULL) gets the
     * library's words if its size is set. This is what a flag with many causes must ask before it acts.
     */
    int (*cancelled)(atropos_request *request, uint64_t token, atropos_cancel_info *why);

    /* The script acts on the cancel: the controller stops repeating it and watches for the effect. */
    void (*acknowledge)(atropos_request *request, uint64_t token);

    /*
     * Makes r's answer 503 with Retry-After, if nothing of the response has been sent. 1 = done: send it as any
     * response. 0 = too late, or r is a subrequest: call abort_response.
     */
    int (*refuse)(request_rec *r);

    /* Seconds for Retry-After, as configured (AtroposRetryAfter); 0 = none is sent. */
    int (*retry_after_s)(request_rec *r);

    /* The connection is cut, so that what was sent of the response cannot look complete to the client. */
    void (*abort_response)(request_rec *r);

    /* The task, for the calls below; 0 = untracked. */
    atropos_task_t (*task)(atropos_request *request);

    /* ---- resources: the library's functions of the same meaning; any thread of the process ---- */

    atropos_resource_t (*resource_register)(const char *name, uint32_t kind);
    void (*wait)(atropos_task_t task, atropos_resource_t r, uint64_t instance, uint64_t amount);
    void (*acquired)(atropos_task_t task, atropos_resource_t r, uint64_t instance, uint64_t amount);
    void (*released)(atropos_task_t task, atropos_resource_t r, uint64_t instance, uint64_t amount);
    void (*abandoned)(atropos_task_t task, atropos_resource_t r);
} atropos_httpd_api;

APR_DECLARE_OPTIONAL_FN(const atropos_httpd_api *, atropos_httpd, (void));

#endif /* MOD_ATROPOS_H */
