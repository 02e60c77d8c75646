/*
 * Checks of the parts that need no server: backlog.c, json.c. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * make APXS=... check
 */
#include "../backlog.h"
#include "../json.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int failures;

#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            failures++;                                                      \
        }                                                                    \
    } while (0)

#define MS 1000000ull

/* ---- the oldest in the backlog ---- */

static void the_oldest_is_as_old_as_its_arrival(void)
{
    static ath_fifo fifo;

    CHECK(ath_fifo_observe(&fifo, 100, 0, 1000 * MS) == 0);
    CHECK(ath_fifo_observe(&fifo, 100, 2, 1010 * MS) == 0); /* 101 and 102 come */
    CHECK(ath_fifo_observe(&fifo, 100, 2, 1030 * MS) == 20 * MS);
    CHECK(ath_fifo_observe(&fifo, 100, 5, 1050 * MS) == 40 * MS); /* 103 to 105 come */
    CHECK(ath_fifo_observe(&fifo, 101, 4, 1060 * MS) == 50 * MS); /* 102 is the oldest, as old as 101 */
    CHECK(ath_fifo_observe(&fifo, 102, 3, 1070 * MS) == 20 * MS); /* 103 */
    CHECK(ath_fifo_observe(&fifo, 105, 0, 1080 * MS) == 0);
    CHECK(fifo.count == 0);
}

static void a_steady_flow_never_looks_old(void)
{
    static ath_fifo fifo;

    /* Always three in the backlog, each for 30 ms. */
    for (uint64_t i = 0; i < 100000; i++) {
        uint64_t wait_ns = ath_fifo_observe(&fifo, i, 3, (5000 + 10 * i) * MS);

        CHECK(wait_ns <= 30 * MS);
    }
    CHECK(fifo.count <= 4);
}

static void more_waiting_than_marks(void)
{
    static ath_fifo fifo;

    for (uint64_t i = 1; i <= 2 * ATH_FIFO_MARKS; i++)
        CHECK(ath_fifo_observe(&fifo, 0, i, i * MS) == (i - 1) * MS);
    CHECK(fifo.count == ATH_FIFO_MARKS);
    /* The newest share the last mark; those before keep their own. */
    CHECK(ath_fifo_observe(&fifo, 10, 2 * ATH_FIFO_MARKS - 10, 9000 * MS) == (9000 - 11) * MS);
    CHECK(ath_fifo_observe(&fifo, 2 * ATH_FIFO_MARKS - 1, 1, 9001 * MS) == (9001 - ATH_FIFO_MARKS) * MS);
    CHECK(ath_fifo_observe(&fifo, 2 * ATH_FIFO_MARKS, 0, 9002 * MS) == 0);
}

static void accepted_but_not_counted_yet(void)
{
    static ath_fifo fifo;

    ath_fifo_observe(&fifo, 10, 4, 100 * MS);
    /* One has left the backlog and its child has not said so: the sum shrinks from 14 to 13. */
    CHECK(ath_fifo_observe(&fifo, 10, 3, 110 * MS) == 10 * MS);
    CHECK(ath_fifo_observe(&fifo, 11, 3, 120 * MS) == 20 * MS);
    CHECK(fifo.count == 1);
}

/* ---- the kernel's word ---- */

static void the_kernel_tells_depth_limit_and_age(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(address);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), pair[2], accepted;
    struct pollfd ready = {.events = POLLIN};
    ath_tcp tcp;
    uint16_t port;
    uint64_t listed = 0;
    char line[512];
    FILE *table;

    CHECK(bind(listener, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(listener, 7) == 0);
    getsockname(listener, (struct sockaddr *)&address, &size);
    CHECK(ath_tcp_look(listener, &tcp) && tcp.listening && tcp.backlog == 0 && tcp.backlog_limit == 7);
    for (int i = 0; i < 2; i++) {
        pair[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        CHECK(connect(pair[i], (struct sockaddr *)&address, sizeof(address)) == 0);
    }
    CHECK(write(pair[0], "x", 1) == 1);
    CHECK(ath_tcp_look(listener, &tcp) && tcp.backlog == 2);

    /* The same from /proc. */
    port = ntohs(address.sin_port);
    table = fopen("/proc/net/tcp", "re");
    while (table != NULL && fgets(line, sizeof(line), table) != NULL) {
        bool end;

        if (ath_proc_net_line(line, &port, 1, &listed, &end) || end)
            break;
    }
    CHECK(listed == 2);
    if (table != NULL)
        fclose(table);

    /* The first has sent something, the second has not. */
    ready.fd = accepted = accept(listener, NULL, NULL);
    CHECK(poll(&ready, 1, 5000) == 1);
    poll(NULL, 0, 60);
    CHECK(ath_tcp_look(accepted, &tcp) && !tcp.listening && tcp.received);
    CHECK(tcp.since_received_ms >= 40 && tcp.since_received_ms < 5000);
    close(accepted);
    accepted = accept(listener, NULL, NULL);
    CHECK(ath_tcp_look(accepted, &tcp) && !tcp.received);
    close(accepted);

    close(listener);
    CHECK(!ath_tcp_look(listener, &tcp));
    for (int i = 0; i < 2; i++)
        close(pair[i]);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(!ath_tcp_look(listener, &tcp));
    close(listener);
}

static void lines_of_proc_net_tcp(void)
{
    static const uint16_t ports[] = {80, 8080};
    uint64_t waiting = 99;
    bool end;

    CHECK(!ath_proc_net_line("  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt\n", ports, 2,
                             &waiting, &end) && !end);
    CHECK(ath_proc_net_line("   0: 0100007F:1F90 00000000:0000 0A 00000000:0000001B 00:00000000 00000000     0\n",
                            ports, 2, &waiting, &end) && waiting == 27 && !end);
    CHECK(!ath_proc_net_line("   1: 0100007F:1F91 00000000:0000 0A 00000000:00000001 00:00000000 00000000\n", ports, 2,
                             &waiting, &end) && !end); /* somebody else's port */
    CHECK(ath_proc_net_line("   0: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A "
                            "00000000:00000200 00:00000000 00000000\n", ports, 2, &waiting, &end) && waiting == 512);
    /* An established connection on the port is no backlog, and no listening socket follows it. */
    CHECK(!ath_proc_net_line("  12: 0100007F:1F90 0100007F:D431 01 00000000:00000040 00:00000000 00000000\n", ports, 2,
                             &waiting, &end) && end);
    CHECK(!ath_proc_net_line("", ports, 2, &waiting, &end) && !end);
    CHECK(!ath_proc_net_line("  3: 0100007F", ports, 2, &waiting, &end) && !end);
}

/* ---- JSON ---- */

static void told(void *out_, ath_json_event event, const char *key, const char *value)
{
    static const char mark[] = "{[)so";
    char *out = out_;
    size_t used = strlen(out);

    snprintf(out + used, 4096 - used, "%c%s%s%s ", mark[event], key != NULL ? key : "",
             key != NULL && value != NULL ? "=" : "", value != NULL ? value : "");
}

static bool walks_to(const char *json, bool complete, const char *expected)
{
    char out[4096] = "";
    bool ok = ath_json_walk(json, told, out) == complete && !strcmp(out, expected);

    if (!ok)
        fprintf(stderr, "%s\n  gives: %s\n", json, out);
    return ok;
}

static void json_is_walked(void)
{
    CHECK(walks_to("{}", true, "{ ) "));
    CHECK(walks_to("{\"a\":1,\"b\":[true,null,-2.5e3],\"c\":{\"d\":\"x\"}}", true,
                   "{ oa=1 [b otrue onull o-2.5e3 ) {c sd=x ) ) "));
    CHECK(walks_to(" { \"a\" : \"\" } ", true, "{ sa= ) "));
    CHECK(walks_to("\"q\\\"\\\\\\n\\t\\u0041\\u00e9\\u20ac\"", true, "sq\"\\\n\tA\xc3\xa9\xe2\x82\xac "));
}

static void broken_json_ends_the_walk(void)
{
    char deep[100];

    CHECK(walks_to("", false, ""));
    CHECK(walks_to("{\"a\"", false, "{ "));
    CHECK(walks_to("{\"a\":", false, "{ "));
    CHECK(walks_to("{\"a\":1", false, "{ oa=1 "));
    CHECK(walks_to("{\"a\":\"cut\\", false, "{ "));
    CHECK(walks_to("{\"a\":\"\\u12", false, "{ "));
    CHECK(walks_to("[1 2]", false, "[ o1 "));
    memset(deep, '[', sizeof(deep));
    deep[99] = '\0';
    {
        char out[4096] = "";

        CHECK(!ath_json_walk(deep, told, out) && strlen(out) == 32 * 2);
    }
    /* A string longer than the room is cut, and the walk goes on behind it. */
    {
        char json[2000] = "[\"", out[4096] = "";

        memset(json + 2, 'x', 1500);
        strcpy(json + 1502, "\",7]");
        CHECK(ath_json_walk(json, told, out) && strlen(out) == strlen("[ s o7 ) ") + ATH_JSON_TEXT - 1);
    }
}

int main(void)
{
    the_oldest_is_as_old_as_its_arrival();
    a_steady_flow_never_looks_old();
    more_waiting_than_marks();
    accepted_but_not_counted_yet();
    the_kernel_tells_depth_limit_and_age();
    lines_of_proc_net_tcp();
    json_is_walked();
    broken_json_ends_the_walk();
    if (failures > 0) {
        fprintf(stderr, "%d checks failed\n", failures);
        return EXIT_FAILURE;
    }
    puts("all checks passed");
    return EXIT_SUCCESS;
}
