/* http.h - an HTTP/1.1 listener: requests come whole from a queue, answers go out at once or as a stream.
 *
 * libmicrohttpd's one thread (the I/O thread) owns the sockets and moves bytes: it reads requests to their end, puts
 * them into a queue, and writes answers from buffers. All functions here are called by one other thread, the owner: it
 * takes requests from the queue (lr_http_poll, lr_http_next), looks at them, answers them. lr_http_fd is readable when
 * there may be news, so the owner sleeps in poll() when it has nothing else to do.
 *
 * Everything is bounded: headers, bodies (each, and all that are not answered), requests not yet answered, connections,
 * and the bytes of a stream that its client has not taken (the writer is told to wait). A request beyond a bound is
 * refused with 413, 431 or 503 by the I/O thread. Requests that arrive too slowly are cut off.
 *
 * A client that closes its connection before the answer is complete is gone: the owner is told. One that only ends its
 * sending half behind a request (nc -N, socat) gets "100 Continue", and the answer when it is there.
 */
#ifndef LR_HTTP_HTTP_H
#define LR_HTTP_HTTP_H
#include "base/error.h"
#include "base/str.h"
#include <stdint.h>

typedef struct lr_http lr_http;
/* One request and its answer. */
typedef struct lr_http_req lr_http_req;

/* Start from lr_http_defaults(). */
typedef struct lr_http_config {
    const char *host;      /* address or name to bind; "127.0.0.1" */
    int port;              /* 0 = any free one; 8080 */
    int max_connections;   /* open at once, less if the limit of open files is low; further ones wait; 4096 */
    int max_requests;      /* taken in and not yet answered; 1024 */
    size_t max_header;     /* bytes that a connection's headers may take, 4096 at least; 32 KiB */
    size_t max_body;       /* bytes of one body; 64 MiB */
    size_t max_bodies;     /* bytes of all bodies not yet answered; 256 MiB */
    size_t max_stream;     /* bytes of a stream that wait for its client; 256 KiB */
    double idle_timeout;   /* seconds without a byte either way, between requests too; 75; where all connections are
                              taken, at most 1 between requests */
    double header_timeout; /* seconds from a request's first line to the end of its headers; 20 */
    double body_timeout;   /* seconds for a body as a whole; 120; an eighth where max_requests are taken in */
} lr_http_config;

lr_http_config lr_http_defaults(void);

/* Binds, listens, starts the I/O thread. Strings of cfg are copied. LR_EINVAL: a bad setting; LR_EIO: address in use,
 * not to be had, ... */
int lr_http_new(lr_http **out, const lr_http_config *cfg, lr_error *err);
/* Closes all connections, answered or not, and frees everything; requests that the owner still holds too. NULL is
 * allowed. */
void lr_http_free(lr_http *);
/* Accepts no connection any more; open ones are closed after their answer, and new requests on them get 503. */
void lr_http_drain(lr_http *);
int lr_http_port(const lr_http *);
/* "127.0.0.1", "::1": where it listens. */
const char *lr_http_host(const lr_http *);
/* Only this machine can reach it. */
bool lr_http_is_loopback(const lr_http *);
/* Readable when lr_http_poll should be called. Borrowed. */
int lr_http_fd(const lr_http *);
/* Takes note of clients that have gone and of requests that come too slowly. Never waits. */
void lr_http_poll(lr_http *);

enum lr_http_event {
    LR_HTTP_NEW = 1,  /* a whole request: take its handle, answer it, free it */
    LR_HTTP_ROOM = 2, /* a stream that was full has room again */
    LR_HTTP_GONE = 4, /* nobody is there for the answer any more */
};
/* The next request that something happened to; *what: lr_http_event bits since it was last returned. NULL: no more. A
 * request that was never NEW to the owner is not returned. */
lr_http_req *lr_http_next(lr_http *, unsigned *what);

typedef struct lr_http_stats {
    int connections;   /* open */
    int requests;      /* read to the end and not yet freed by the owner */
    int pending;       /* requests whose headers have come and whose answer has not gone out */
    size_t bodies;     /* bytes held by bodies */
    uint64_t accepted; /* connections so far */
    uint64_t taken;    /* requests so far */
    uint64_t refused;  /* answered by the I/O thread itself: 4xx and 503 */
    uint64_t gone;     /* clients that left before their answer was complete */
    uint64_t slow;     /* connections cut off for their slowness */
} lr_http_stats;
void lr_http_get_stats(lr_http *, lr_http_stats *);

/* ---- the request: borrowed until lr_http_req_free ---- */

uint64_t lr_http_req_id(const lr_http_req *); /* 1, 2, ... per listener */
lr_str lr_http_req_method(const lr_http_req *);
/* As it stands in the request line: path and query, not decoded. */
lr_str lr_http_req_target(const lr_http_req *);
lr_str lr_http_req_body(const lr_http_req *);
lr_str lr_http_req_peer(const lr_http_req *); /* the client's address, without port */
/* Header lines in their order; false past the end. */
bool lr_http_req_header(const lr_http_req *, size_t i, lr_str *name, lr_str *value);
bool lr_http_req_gone(lr_http_req *);
/* The body's bytes are given back before the request is freed. */
void lr_http_req_drop_body(lr_http_req *);

/* ---- the answer ---- */

typedef struct lr_http_header {
    const char *name, *value;
} lr_http_header;

/* The whole answer; the body is copied. Content-Length, Date and Connection are set by the listener. LR_ESTATE if an
 * answer was begun already, LR_EINVAL: a status outside of 200..599 or a header with a line end in it,
 * LR_ECANCELLED: the client has gone. */
int lr_http_answer(lr_http_req *, int status, const lr_http_header *headers, size_t n, lr_str body, lr_error *err);
/* Begins an answer whose body follows piece by piece. */
int lr_http_begin(lr_http_req *, int status, const lr_http_header *headers, size_t n, lr_error *err);
/* Appends to the stream: *taken bytes, fewer than n when the buffer is full (LR_HTTP_ROOM comes when there is room
 * again). LR_ECANCELLED: the client has gone. */
int lr_http_write(lr_http_req *, const char *s, size_t n, size_t *taken, lr_error *err);
/* The stream is complete; what is buffered still goes out. */
void lr_http_end(lr_http_req *);
/* Gives the handle back. An answer that was not begun becomes a 500, a stream that was not ended is cut off so that the
 * client can tell. */
void lr_http_req_free(lr_http_req *);

#endif
