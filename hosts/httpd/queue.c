/*
 * Who waits for a worker. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A listener reserves a worker before it accepts, so httpd has no queue of its own. Requests without a worker are
 *  - in the backlog of the listening sockets, where the kernel keeps them: the leader asks for their number, and
 *    backlog.c infers for how long;
 *  - under event, on kept-alive connections: when no worker is idle the listener gives such a connection up, and even
 *    its close waits for a worker. Until then its client waits, in no queue at all. Its child sees unread bytes on it.
 * When the wait has ended, the first request of a connection knows by itself what it was (the time since its bytes
 * came).
 */
#include "atropos_httpd.h"
#include "backlog.h"

#include "ap_listen.h"
#include "ap_mpm.h"
#include "apr_portable.h"
#include "mpm_common.h"
#include "scoreboard.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>

/* The kernel counts in jiffies of up to 10 ms: below that it is rounding. */
#define BACKLOG_NOISE_MS 12

static ath_conn *connections; /* of this child */
static pthread_mutex_t connections_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t served_drops; /* drops after which nobody waited any more */
static int max_daemons, daemon_slots, threads_per_child;
static bool async;

void ath_queue_child_init(void)
{
    int is_async = AP_MPMQ_NOT_SUPPORTED;

    ap_mpm_query(AP_MPMQ_MAX_DAEMONS, &max_daemons);
    ap_mpm_query(AP_MPMQ_HARD_LIMIT_DAEMONS, &daemon_slots);
    ap_mpm_query(AP_MPMQ_MAX_THREADS, &threads_per_child);
    ap_mpm_query(AP_MPMQ_IS_ASYNC, &is_async);
    if (threads_per_child < 1)
        threads_per_child = 1;
    async = is_async > 0;
    connections = NULL;
    served_drops = ATH_LOAD(ath_child.row->dropped);
}

/* How long bytes of the client have been waiting on a connection just accepted, ns; 0 = none, or no TCP connection. */
uint64_t ath_backlog_wait_ns(int fd)
{
    ath_tcp tcp;

    if (!ath_tcp_look(fd, &tcp) || !tcp.received || tcp.since_received_ms < BACKLOG_NOISE_MS)
        return 0;
    return (uint64_t)tcp.since_received_ms * 1000000;
}

/* ---- kept-alive connections, in each child ---- */

void ath_queue_add(ath_conn *conn)
{
    if (!async)
        return; /* a thread keeps its connection */
    pthread_mutex_lock(&connections_lock);
    conn->next = connections;
    conn->previous = &connections;
    if (connections != NULL)
        connections->previous = &conn->next;
    connections = conn;
    pthread_mutex_unlock(&connections_lock);
}

void ath_queue_remove(ath_conn *conn)
{
    if (conn->previous == NULL)
        return;
    pthread_mutex_lock(&connections_lock);
    *conn->previous = conn->next;
    if (conn->next != NULL)
        conn->next->previous = conn->previous;
    conn->previous = NULL;
    pthread_mutex_unlock(&connections_lock);
}

/* On the listener's thread, perhaps with the worker queue's mutex held. */
void ath_worker_shortage(int event, apr_uint32_t count)
{
    ath_row *row = ath_child.row;
    uint64_t since;

    if (row == NULL)
        return;
    since = ATH_LOAD(row->shortage_ns);
    switch (event) {
    case AP_SHORTAGE_WAIT:
    case AP_SHORTAGE_PAUSE:
        if (since == 0) {
            ATH_STORE(row->shortage_ns, ath_now_ns());
            ATH_ADD(row->shortages, 1);
            ath_controller_shortage();
        }
        break;
    case AP_SHORTAGE_WAITED:
    case AP_SHORTAGE_RESUME:
        if (since != 0) {
            ATH_ADD(row->short_ns, ath_now_ns() - since);
            ATH_STORE(row->shortage_ns, 0);
        }
        break;
    case AP_SHORTAGE_DROP:
        ATH_ADD(row->dropped, count);
        ath_controller_shortage();
        break;
    }
}

/* So many signs of a shortage this child has seen: the sum only grows. */
uint64_t ath_queue_shortages(void)
{
    return ATH_LOAD(ath_child.row->shortages) + ATH_LOAD(ath_child.row->dropped);
}

/*
 * Looks at this child's kept-alive connections if it may have given some up, and tells the leader by its row. A
 * socket may be closed while it is looked at, and its number be another's: then one too many or too few is counted,
 * once.
 */
bool ath_queue_watch(void)
{
    ath_row *row = ath_child.row;
    uint64_t dropped = ATH_LOAD(row->dropped), waiting = 0, oldest_ms = 0;

    if (async && (dropped != served_drops || ATH_LOAD(row->shortage_ns) != 0)) {
        pthread_mutex_lock(&connections_lock);
        for (ath_conn *conn = connections; conn != NULL; conn = conn->next) {
            ath_tcp tcp;
            int unread = 0;

            /* With an answer still to be written, the next request has to wait for its own client. */
            if (!__atomic_load_n(&conn->parked, __ATOMIC_ACQUIRE) || ATH_LOAD(conn->current) != NULL ||
                ioctl(conn->fd, FIONREAD, &unread) != 0 || unread == 0 || !ath_tcp_look(conn->fd, &tcp))
                continue;
            waiting++;
            if (tcp.since_received_ms > oldest_ms)
                oldest_ms = tcp.since_received_ms;
        }
        pthread_mutex_unlock(&connections_lock);
        if (waiting == 0)
            served_drops = dropped;
    }
    ATH_STORE(row->parked_ns, oldest_ms * 1000000);
    ATH_STORE(row->parked, waiting);
    return waiting > 0 || ATH_LOAD(row->shortage_ns) != 0;
}

/* ---- the backlog, in the leader ---- */

/* Depth and limit, from this child's listening sockets. */
static bool backlog_of_sockets(uint64_t *depth, uint64_t *limit)
{
    bool any = false;

    for (ap_listen_rec *lr = ap_listeners; lr != NULL; lr = lr->next) {
        ath_tcp tcp;
        apr_os_sock_t fd;

        if (lr->sd == NULL || apr_os_sock_get(&fd, lr->sd) != APR_SUCCESS || !ath_tcp_look(fd, &tcp) || !tcp.listening)
            continue;
        *depth += tcp.backlog;
        *limit += tcp.backlog_limit;
        any = true;
    }
    return any;
}

/* With ListenCoresBucketsRatio each child has some of the sockets only; the kernel's table has all. */
static void backlog_of_table(uint64_t *depth)
{
    static const char *const tables[] = {"/proc/net/tcp", "/proc/net/tcp6"};
    uint16_t ports[64];
    size_t count = 0;

    for (ap_listen_rec *lr = ap_listeners; lr != NULL && count < 64; lr = lr->next)
        if (lr->bind_addr != NULL)
            ports[count++] = lr->bind_addr->port;
    for (int i = 0; i < 2; i++) {
        FILE *file = fopen(tables[i], "re");
        char line[512];
        bool end = false;

        while (file != NULL && !end && fgets(line, sizeof(line), file) != NULL) {
            uint64_t waiting = 0;

            if (ath_proc_net_line(line, ports, count, &waiting, &end))
                *depth += waiting;
        }
        if (file != NULL)
            fclose(file);
    }
}

static bool child_lives(uint32_t pid)
{
    return pid != 0 && (kill((pid_t)pid, 0) == 0 || errno != ESRCH);
}

/* Does the row's child say that it has no idle worker? Only a patched httpd's does. */
static bool says_short(uint32_t pid)
{
    for (uint32_t i = 0; i < ath_shared_memory->rows; i++)
        if (ATH_LOAD(ath_shared_memory->row[i].pid) == pid)
            return ATH_LOAD(ath_shared_memory->row[i].shortage_ns) != 0;
    return false;
}

/*
 * Are all workers taken, and can the parent start no more? Only then somebody in the backlog waits for a worker that
 * somebody else holds; otherwise for a slow accept, or for a child to be born. The scoreboard tells whether a thread is
 * idle; that its listener has promised it to somebody already, only the listener.
 */
static bool starved(void)
{
    uint32_t generation = ath_shared_memory->generation;
    int living = 0;
    bool room = false;

    if (ap_scoreboard_image == NULL)
        return false;
    for (int i = 0; i < daemon_slots; i++) {
        process_score *ps = ap_get_scoreboard_process(i);
        bool short_of_workers;

        if (ps->pid == 0) {
            room = true;
            continue;
        }
        if (ps->quiescing || (uint32_t)ps->generation != generation)
            continue;
        living++;
        short_of_workers = ps->not_accepting || says_short((uint32_t)ps->pid);
        for (int t = 0; t < threads_per_child && !short_of_workers; t++) {
            worker_score *ws = ap_get_scoreboard_worker_from_indexes(i, t);

            if (ws->status == SERVER_READY || ws->status == SERVER_STARTING)
                return false;
        }
    }
    return living > 0 && !(room && living < max_daemons);
}

/*
 * The fewest that waited at any sample of the last 100 ms. A full house for a moment is how a busy server works:
 * whoever comes then is served as soon as a worker is done. Only who was there all the time waits for somebody to let
 * go.
 */
#define LASTING_NS 100000000
static uint64_t lasting(uint64_t waiting, uint64_t now_ns)
{
    static struct
    {
        uint64_t time_ns, waiting;
    } samples[32];
    static unsigned newest;
    uint64_t fewest = waiting;
    bool covered = false;

    for (unsigned back = 0; back < 31 && !covered; back++) {
        const unsigned at = (newest - back) % 32;

        if (samples[at].time_ns == 0)
            break;
        if (samples[at].waiting < fewest)
            fewest = samples[at].waiting;
        covered = now_ns - samples[at].time_ns >= LASTING_NS;
    }
    newest++;
    samples[newest % 32].time_ns = now_ns;
    samples[newest % 32].waiting = waiting;
    return covered ? fewest : 0;
}

void ath_queue_sample(void)
{
    uint64_t depth = 0, limit = 0, accepted = 0, waiting, oldest_ns, backlog_ns, now_ns = ath_now_ns();
    bool all_taken;

    if (ap_num_listen_buckets > 1)
        backlog_of_table(&depth);
    else
        backlog_of_sockets(&depth, &limit);
    for (uint32_t i = 0; i < ath_shared_memory->rows; i++)
        accepted += ATH_LOAD(ath_shared_memory->row[i].accepted);
    backlog_ns = ath_fifo_observe(ath_shared_memory->fifo, accepted, depth, now_ns);

    all_taken = depth > 0 && starved();
    waiting = all_taken ? depth : 0;
    oldest_ns = all_taken ? backlog_ns : 0;
    for (uint32_t i = 0; i < ath_shared_memory->rows; i++) {
        ath_row *row = &ath_shared_memory->row[i];
        uint64_t parked = ATH_LOAD(row->parked), parked_ns = ATH_LOAD(row->parked_ns);

        if (parked == 0 || !child_lives(ATH_LOAD(row->pid)))
            continue;
        waiting += parked;
        if (parked_ns > oldest_ns)
            oldest_ns = parked_ns;
    }
    waiting = lasting(waiting, now_ns);
    atropos_queue_observed(ath_child.slots, waiting, waiting > 0 ? oldest_ns : 0);
    ATH_STORE(ath_shared_memory->backlog, depth);
    ATH_STORE(ath_shared_memory->backlog_ns, backlog_ns);
    ATH_STORE(ath_shared_memory->backlog_limit, limit);
    ATH_STORE(ath_shared_memory->starved, all_taken);
}
