/* Lines over a stream socket, for both ends. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef DEMO_WIRE_H
#define DEMO_WIRE_H
#include <errno.h>
#include <stdbool.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

typedef struct wire {
  int fd;
  size_t used;
  char in[512];
} wire;

/* False on a hang-up, or when the text is longer than a line may be. */
__attribute__((format(printf, 2, 3))) static inline bool wire_send(wire *w, const char *format, ...) {
  char out[512];
  va_list args;
  va_start(args, format);
  int length = vsnprintf(out, sizeof out - 1, format, args);
  va_end(args);
  if (length < 0) return false;
  size_t size = (size_t)length < sizeof out - 1 ? (size_t)length : sizeof out - 2;
  out[size++] = '\n';
  for (size_t sent = 0; sent < size;) {
    /* MSG_NOSIGNAL: a client that has gone must not end the server with SIGPIPE. */
    ssize_t n = send(w->fd, out + sent, size - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    sent += (size_t)n;
  }
  return true;
}

/* Copies the next line without its end into `line`. False on a hang-up or a line that does not fit. */
static inline bool wire_recv(wire *w, char line[sizeof((wire *)0)->in]) {
  for (;;) {
    char *end = memchr(w->in, '\n', w->used);
    if (end) {
      size_t length = (size_t)(end - w->in);
      memcpy(line, w->in, length);
      line[length] = '\0';
      w->used -= length + 1;
      memmove(w->in, end + 1, w->used);
      return true;
    }
    if (w->used == sizeof w->in) return false;
    ssize_t n = recv(w->fd, w->in + w->used, sizeof w->in - w->used, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    w->used += (size_t)n;
  }
}

static inline bool wire_address(struct sockaddr_un *address, const char *path) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  if (strlen(path) >= sizeof address->sun_path) {
    fprintf(stderr, "socket path is longer than %zu bytes: %s (choose a shorter one with --dir)\n",
            sizeof address->sun_path - 1, path);
    return false;
  }
  strcpy(address->sun_path, path);
  return true;
}
#endif
