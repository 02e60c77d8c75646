/*
 * The part of queue.c that needs no server: see backlog.h. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "backlog.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>

#define STATE_LISTEN 10

bool ath_tcp_look(int fd, ath_tcp *tcp)
{
    struct tcp_info info = {0};
    socklen_t size = sizeof(info);

    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0)
        return false;
    /* For a listening socket the kernel puts its queue into two fields that have no other meaning there. */
    *tcp = (ath_tcp){
        .listening = info.tcpi_state == STATE_LISTEN,
        .backlog = info.tcpi_unacked,
        .backlog_limit = info.tcpi_sacked,
        .received = info.tcpi_bytes_received > 0,
        .since_received_ms = info.tcpi_last_data_recv,
    };
    return true;
}

uint64_t ath_fifo_observe(ath_fifo *fifo, uint64_t accepted, uint64_t waiting, uint64_t now_ns)
{
    uint64_t arrived = accepted + waiting;
    uint64_t newest;

    while (fifo->count > 0 && fifo->mark[fifo->first % ATH_FIFO_MARKS].arrived <= accepted) {
        fifo->first = (fifo->first + 1) % ATH_FIFO_MARKS;
        fifo->count--;
    }
    if (waiting == 0)
        return 0;
    newest = fifo->count > 0 ? fifo->mark[(fifo->first + fifo->count - 1) % ATH_FIFO_MARKS].arrived : accepted;
    if (arrived > newest) {
        if (fifo->count == ATH_FIFO_MARKS) {
            /* The newest share the mark: they are said to have come with the one before. */
            fifo->mark[(fifo->first + fifo->count - 1) % ATH_FIFO_MARKS].arrived = arrived;
        }
        else {
            uint32_t at = (fifo->first + fifo->count++) % ATH_FIFO_MARKS;

            fifo->mark[at].arrived = arrived;
            fifo->mark[at].time_ns = now_ns;
        }
    }
    /* A connection that was accepted and is not counted as such yet makes the sum shrink for a moment: no mark then. */
    if (fifo->count == 0 || now_ns < fifo->mark[fifo->first].time_ns)
        return 0;
    return now_ns - fifo->mark[fifo->first].time_ns;
}

bool ath_proc_net_line(const char *line, const uint16_t *ports, size_t count, uint64_t *waiting, bool *end)
{
    unsigned port, state, tx;
    unsigned long rx;

    *end = false;
    /* "  0: 0100007F:1F90 00000000:0000 0A 00000000:00000003 ...": address:port, peer, state, tx_queue:rx_queue */
    if (sscanf(line, " %*u: %*[0-9A-Fa-f]:%4x %*[0-9A-Fa-f]:%*x %2x %8x:%8lx", &port, &state, &tx, &rx) != 4)
        return false;
    if (state != STATE_LISTEN) {
        *end = true;
        return false;
    }
    for (size_t i = 0; i < count; i++)
        if (ports[i] == port) {
            *waiting = rx;
            return true;
        }
    return false;
}
