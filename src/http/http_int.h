/* http_int.h - what the files of src/http share. One lock per listener guards all that both threads touch.
 *
 * Which thread: "io" = libmicrohttpd's, "owner" = the one that uses http.h. Lock order: ours, then libmicrohttpd's own
 * (taken inside MHD_suspend_connection and MHD_resume_connection).
 */
#ifndef LR_HTTP_HTTP_INT_H
#define LR_HTTP_HTTP_INT_H
#include "http/http.h"
#include <math.h>
#include <microhttpd.h>
#include <pthread.h>

/* An open connection; made and freed by io, listed under the lock. */
typedef struct lr_http_conn {
    struct lr_http_conn *prev, *next;
    int fd;
    double since;    /* of its present phase; INFINITY: it has been cut off */
    bool end_seen;   /* at the last look the client had sent its end, amid or between requests */
    lr_http_req *at; /* request being read or answered, NULL between requests */
} lr_http_conn;

typedef enum lr_http_phase {
    LR_HTTP_HEADERS, /* the request line has come */
    LR_HTTP_BODY,    /* the headers have come */
    LR_HTTP_WAITING, /* handed over, connection suspended */
    LR_HTTP_ONCE,    /* the whole answer is there */
    LR_HTTP_STREAM,  /* the answer has begun */
    LR_HTTP_REFUSED, /* answered by io */
} lr_http_phase;

struct lr_http_req {
    lr_http *h;
    lr_http_req *prev_news, *next_news; /* in the list of news */
    bool listed;
    unsigned news;
    uint64_t id;

    /* io's while it reads; the owner's to look at once handed over */
    char *method, *target, *head; /* head: names and values, zero-terminated, in one block */
    uintptr_t target_end;         /* where the target ended in the buffer of the library */
    struct lr_http_line {
        lr_str name, value;
    } * lines;
    size_t n_lines;
    char *body;
    size_t body_n, body_cap;
    size_t skipped; /* bytes of a body that is too long, thrown away */
    char peer[64];
    bool seen, too_long;
    bool old_version; /* HTTP/1.0 */
    int slot;         /* in by_slot once it is counted, else -1 */

    /* under the lock from here on */
    lr_http_phase phase;
    struct MHD_Connection *c; /* NULL: io is done with it */
    lr_http_conn *conn;
    bool watched;   /* in the epoll set */
    bool suspended; /* by us */
    bool handed;    /* the owner has it or will get it */
    bool freed;     /* the owner is done with it */
    bool gone;
    bool ended;    /* the stream is complete */
    bool cut;      /* the connection is to be closed at once */
    bool was_full; /* a write found no room */
    double
        asked_at; /* its client has ended its sending half; when it was last asked whether it is there; 0: it has not */
    int status;
    struct MHD_Response *response;
    char *buf; /* ring of the stream */
    size_t at, n, cap;
};

struct lr_http {
    lr_http_config cfg;
    char host[256];
    int port;
    bool loopback, draining, stopping;
    struct MHD_Daemon *daemon;
    int listener; /* ours after draining */
    int epoll, wake, timer;
    pthread_mutex_t lock;
    lr_http_conn *conns;
    lr_http_req *first_news, *last_news;
    lr_http_stats stats;
    uint64_t next_id;
    bool timing;           /* the timer runs */
    lr_http_req **by_slot; /* (max_requests) counted requests: headers read, and not yet settled; NULL = free */
    int first_free;        /* no slot below it is free */
    int n_counted;
};

double lr_http__now(void);
/* Under the lock: puts the request into the list of news. */
void lr_http__tell(lr_http_req *, unsigned what);
void lr_http__untell(lr_http_req *);
/* Under the lock: wakes the connection if it is suspended. */
void lr_http__resume(lr_http_req *);
/* io, under the lock: closes the connection's socket in both directions. libmicrohttpd drops a connection whose
 * callback has failed when something happens on it the next time, which may be never; but it looks again and again at
 * those that have a time limit of their own, so this gives it one. */
void lr_http__hang_up(lr_http_req *);
/* Under the lock: the client is gone. */
void lr_http__lost(lr_http_req *);
/* Under the lock: frees the request if both sides are done with it. */
void lr_http__settle(lr_http_req *);
/* Under the lock: its body no longer counts. */
void lr_http__forget_body(lr_http_req *);
/* JSON text of an error answer, in OpenAI's shape; message holds no quotes. */
struct MHD_Response *lr_http__error_body(const char *type, const char *code, const char *message);

/* Callbacks for libmicrohttpd (exchange.c). */
void *lr_http__on_line(void *cls, const char *uri, struct MHD_Connection *c);
enum MHD_Result lr_http__on_request(void *cls, struct MHD_Connection *c, const char *url, const char *method,
                                    const char *version, const char *data, size_t *n, void **ctx);
void lr_http__on_done(void *cls, struct MHD_Connection *c, void **ctx, enum MHD_RequestTerminationCode how);
void lr_http__on_connection(void *cls, struct MHD_Connection *c, void **socket_ctx,
                            enum MHD_ConnectionNotificationCode what);

#endif
