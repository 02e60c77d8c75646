/*
 * The thread that drives the library. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Every child has one; whichever holds the lease in the region leads, the others stand by and take over within two
 * heartbeats when it ends, dies or hangs. It also watches this child's kept-alive connections, and in the leader the
 * backlog: with all workers taken by long requests nothing completes, so that is the only sign of those who wait.
 */
#include "atropos_httpd.h"

#include "ap_mpm.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

/* Candidates share the watch over the leader: each looks the less often the more they are, so that together they look
 * at least every 25 ms, and hundreds of prefork children do not wake up ten times a second each. */
#define STANDBY_MS_EACH 25
#define STANDBY_MIN_MS 100
#define STANDBY_MAX_MS 2000
/* While clients of this child wait for a worker, the leader is told that often. A saturated child has no idle worker
 * thousands of times a second: to look each time would cost more than any request. */
#define WATCH_MS 25

static pthread_t thread;
static bool running;
static int wake_fd = -1; /* an eventfd: written to from signal handlers and under other locks */
static uint32_t stop;
static uint32_t leads;
static uint32_t naps; /* for longer than WATCH_MS: a shortage has to wake the thread */

void ath_library_log(int level, const char *message, void *arg)
{
    static const int levels[] = {APLOG_ERR, APLOG_ERR, APLOG_WARNING, APLOG_NOTICE, APLOG_DEBUG};

    ap_log_error(APLOG_MARK, levels[level < 0 || level > 4 ? 4 : level], 0, ap_server_conf, "Atropos: %s", message);
}

bool ath_controller_leads(void)
{
    return ATH_LOAD(leads) != 0;
}

void ath_controller_wake(void)
{
    uint64_t one = 1;
    int saved = errno;

    if (wake_fd >= 0 && write(wake_fd, &one, sizeof(one)) < 0) {
        /* Full: it has been woken up already. */
    }
    errno = saved;
}

/* On the listener's thread, after the child's row says of the shortage. */
void ath_controller_shortage(void)
{
    /* In the same order as drive() for everybody: either it sees the row, or this the nap. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (ATH_LOAD(naps) != 0 && __atomic_exchange_n(&naps, 0, __ATOMIC_RELAXED) != 0)
        ath_controller_wake();
}

static int standby_ms(void)
{
    int candidates = 1, ms;

    ap_mpm_query(AP_MPMQ_MAX_DAEMON_USED, &candidates);
    ms = candidates * STANDBY_MS_EACH;
    return ms < STANDBY_MIN_MS ? STANDBY_MIN_MS : ms > STANDBY_MAX_MS ? STANDBY_MAX_MS : ms;
}

static void *drive(void *s)
{
    int last_rc = ATROPOS_OK;
    uint64_t seen = 0; /* shortages */

    prctl(PR_SET_NAME, "atropos"); /* as top shows it */
    while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
        struct pollfd pfd = {.fd = wake_fd, .events = POLLIN};
        bool short_of_workers = ath_queue_watch();
        int rc, pause_ms;
        uint64_t shortages, count;

        if (ath_controller_leads())
            ath_queue_sample();
        rc = atropos_controller_tick();
        ATH_STORE(leads, rc == ATROPOS_OK);
        if (rc != last_rc && rc != ATROPOS_OK && rc != ATROPOS_E_NOT_LEADER)
            ap_log_error(APLOG_MARK, APLOG_ERR, 0, s, "Atropos: the controller cannot work: %s (code %d: %s). The "
                         "server goes on without protection; \"Atropos off\" and a restart silence it",
                         ath_last_error(), rc, atropos_strerror(rc));
        last_rc = rc;

        pause_ms = rc == ATROPOS_OK ? (int)atropos_controller_pause_ms() : standby_ms();
        if (pause_ms > WATCH_MS) {
            ATH_STORE(naps, 1);
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
            shortages = ath_queue_shortages();
            if (short_of_workers || shortages != seen) {
                ATH_STORE(naps, 0);
                pause_ms = WATCH_MS;
            }
            seen = shortages;
        }
        if (poll(&pfd, 1, pause_ms > 0 ? pause_ms : 1) > 0 && read(wake_fd, &count, sizeof(count)) < 0) {
            /* EINTR at worst: the next poll returns at once. */
        }
        ATH_STORE(naps, 0);
    }
    return NULL;
}

static apr_status_t stop_thread(void *dummy)
{
    if (!running)
        return APR_SUCCESS;
    running = false;
    __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
    ath_controller_wake();
    pthread_join(thread, NULL);
    ATH_STORE(leads, 0);
    close(wake_fd);
    wake_fd = -1;
    return APR_SUCCESS;
}

/* The process ends at once: the thread is told, and not waited for. */
void ath_controller_abandon(void)
{
    running = false;
    __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
    ath_controller_wake();
}

void ath_controller_start(apr_pool_t *pchild, server_rec *s)
{
    sigset_t all, before;
    int rc;

    stop = leads = 0;
    wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd < 0) {
        ap_log_error(APLOG_MARK, APLOG_ERR, errno, s, "Atropos: this child cannot lead the controller: eventfd");
        return;
    }
    /* Signals are for the MPM's own threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&thread, NULL, drive, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) {
        ap_log_error(APLOG_MARK, APLOG_ERR, rc, s, "Atropos: this child cannot lead the controller: pthread_create");
        close(wake_fd);
        wake_fd = -1;
        return;
    }
    running = true;
    apr_pool_cleanup_register(pchild, NULL, stop_thread, apr_pool_cleanup_null);
}
