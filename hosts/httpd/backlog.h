/*
 * The listen backlog: how many connections wait in it, and for how long the oldest.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The kernel tells how many wait, not since when. But it hands them out in the order of their arrival: if `accepted`
 * have been accepted so far, the oldest waiting is number accepted + 1, and it had arrived when accepted + waiting
 * first reached that number. So it is enough to note when that sum grew.
 */
#ifndef ATH_BACKLOG_H
#define ATH_BACKLOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One mark for each growth, the oldest first. Marks of accepted connections are dropped, so more than the backlog's
 * limit (SOMAXCONN is 4096) are never needed; should there be more, the newest share one mark. */
#define ATH_FIFO_MARKS 4096

typedef struct ath_fifo
{
    uint32_t first, count;
    struct
    {
        uint64_t arrived; /* connections that had arrived, since the beginning */
        uint64_t time_ns; /* when that was seen first */
    } mark[ATH_FIFO_MARKS];
} ath_fifo;

/* Notes what is seen at `now_ns` and returns the oldest's wait in ns; 0 = nobody waits, or it has just arrived. */
uint64_t ath_fifo_observe(ath_fifo *fifo, uint64_t accepted, uint64_t waiting, uint64_t now_ns);

/* What the kernel tells of a TCP socket (TCP_INFO). */
typedef struct ath_tcp
{
    bool listening;
    uint32_t backlog, backlog_limit; /* of a listening socket: connections nobody has accepted yet; their limit */
    bool received;                   /* of a connection: the peer has sent something, */
    uint32_t since_received_ms;      /* the last of it so long ago (in jiffies, up to 10 ms) */
} ath_tcp;

/* false: no TCP socket, or no such descriptor. */
bool ath_tcp_look(int fd, ath_tcp *tcp);

/*
 * Reads one line of /proc/net/tcp or tcp6: true if it is a listening socket on one of the ports; then *waiting is how
 * many connections wait in its backlog. Sets *end when the line belongs to a socket that does not listen: they come
 * after.
 */
bool ath_proc_net_line(const char *line, const uint16_t *ports, size_t count, uint64_t *waiting, bool *end);

#endif /* ATH_BACKLOG_H */
