/* reply.c - what the owner does with a request: looks at it, answers it. See http.h.
 *
 * A stream is a ring buffer: the owner appends, the I/O thread takes. When it is empty the connection is suspended, and
 * resumed by the next write; when it is full the owner waits for LR_HTTP_ROOM, which comes at half.
 */
#include "http/http_int.h"
#include "base/mem.h"
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

/* ---- looking ---- */

uint64_t lr_http_req_id(const lr_http_req *r) { return r->id; }
lr_str lr_http_req_method(const lr_http_req *r) { return lr_str_of(r->method); }
lr_str lr_http_req_target(const lr_http_req *r) { return lr_str_of(r->target); }
lr_str lr_http_req_body(const lr_http_req *r) { return (lr_str){r->body, r->body_n}; }
lr_str lr_http_req_peer(const lr_http_req *r) { return lr_str_of(r->peer); }

bool lr_http_req_header(const lr_http_req *r, size_t i, lr_str *name, lr_str *value)
{
    if (i >= r->n_lines) return false;
    *name = r->lines[i].name;
    *value = r->lines[i].value;
    return true;
}

bool lr_http_req_gone(lr_http_req *r)
{
    pthread_mutex_lock(&r->h->lock);
    bool gone = r->gone;
    pthread_mutex_unlock(&r->h->lock);
    return gone;
}

void lr_http_req_drop_body(lr_http_req *r)
{
    pthread_mutex_lock(&r->h->lock);
    lr_http__forget_body(r);
    pthread_mutex_unlock(&r->h->lock);
}

/* ---- both threads ---- */

void lr_http__resume(lr_http_req *r)
{
    if (!r->suspended || !r->c) return;
    r->suspended = false;
    MHD_resume_connection(r->c);
}

void lr_http__hang_up(lr_http_req *r)
{
    shutdown(r->conn->fd, SHUT_RDWR);
    MHD_set_connection_option(r->c, MHD_CONNECTION_OPTION_TIMEOUT, 1u);
}

void lr_http__lost(lr_http_req *r)
{
    if (r->gone || r->phase == LR_HTTP_REFUSED) return;
    r->gone = r->cut = true;
    r->h->stats.gone++;
    lr_http__tell(r, LR_HTTP_GONE);
    lr_http__resume(r);
}

/* ---- answering ---- */

static int add_headers(struct MHD_Response *m, const lr_http_header *headers, size_t n, lr_error *err)
{
    for (size_t i = 0; i < n; i++) {
        /* a second Content-Length or Transfer-Encoding would be ours against the listener's */
        if (strcasecmp(headers[i].name, "content-length") == 0 || strcasecmp(headers[i].name, "transfer-encoding") == 0)
            continue;
        if (MHD_add_response_header(m, headers[i].name, headers[i].value) != MHD_YES)
            return lr_fail(err, LR_EINVAL, "header %.100s can't be sent with this value", headers[i].name);
    }
    return 0;
}

/* Hands the response to io. Takes m over. */
static int put_response(lr_http_req *r, int status, struct MHD_Response *m, const lr_http_header *headers, size_t n,
                        lr_http_phase phase, lr_error *err)
{
    if (!m) return lr_fail(err, LR_ENOMEM, "no memory for an answer");
    int rc = 0;
    if (status < 200 || status > 599) rc = lr_fail(err, LR_EINVAL, "status %d: 200 to 599 expected", status);
    if (!rc) rc = add_headers(m, headers, n, err);
    pthread_mutex_lock(&r->h->lock);
    if (!rc && r->phase != LR_HTTP_WAITING) rc = lr_fail(err, LR_ESTATE, "the answer was begun already");
    if (!rc && (r->gone || !r->c)) rc = lr_fail(err, LR_ECANCELLED, "the client has gone");
    if (!rc) {
        char byte;
        if (!r->old_version && recv(r->conn->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) r->asked_at = lr_http__now();
        r->status = status;
        r->response = m;
        r->phase = phase;
        r->ended = phase == LR_HTTP_ONCE;
        lr_http__resume(r);
    }
    pthread_mutex_unlock(&r->h->lock);
    if (rc) MHD_destroy_response(m);
    return rc;
}

int lr_http_answer(lr_http_req *r, int status, const lr_http_header *headers, size_t n, lr_str body, lr_error *err)
{
    void *copy = lr_memdup(body.s ? body.s : "", body.n);
    if (!copy) return lr_fail(err, LR_ENOMEM, "no memory for an answer");
    struct MHD_Response *m = MHD_create_response_from_buffer_with_free_callback(body.n, copy, lr_free);
    if (!m) lr_free(copy);
    return put_response(r, status, m, headers, n, LR_HTTP_ONCE, err);
}

/* io: gives bytes of the stream. */
static ssize_t take(void *cls, uint64_t pos, char *out, size_t max)
{
    (void)pos;
    lr_http_req *r = cls;
    pthread_mutex_lock(&r->h->lock);
    ssize_t got = 0;
    if (r->cut) {
        lr_http__hang_up(r);
        got = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (r->n) {
        size_t n = r->n < max ? r->n : max, first = n < r->cap - r->at ? n : r->cap - r->at;
        memcpy(out, r->buf + r->at, first);
        memcpy(out + first, r->buf, n - first);
        r->at = (r->at + n) % r->cap;
        r->n -= n;
        if (r->was_full && r->n <= r->cap / 2) {
            r->was_full = false;
            lr_http__tell(r, LR_HTTP_ROOM);
        }
        got = (ssize_t)n;
    } else if (r->ended) {
        got = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        r->suspended = true;
        MHD_suspend_connection(r->c);
    }
    pthread_mutex_unlock(&r->h->lock);
    return got;
}

int lr_http_begin(lr_http_req *r, int status, const lr_http_header *headers, size_t n, lr_error *err)
{
    struct MHD_Response *m = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 8192, take, r, NULL);
    return put_response(r, status, m, headers, n, LR_HTTP_STREAM, err);
}

/* Under the lock: a ring of at least n more bytes, or as many as it may hold. */
static bool grow_ring(lr_http_req *r, size_t n)
{
    size_t max = r->h->cfg.max_stream, cap = r->cap ? r->cap : 1024;
    while (cap < max && cap < r->n + n) cap *= 2;
    if (cap > max) cap = max;
    if (cap <= r->cap) return true;
    char *p = lr_malloc(cap);
    if (!p) return false;
    size_t first = r->n < r->cap - r->at ? r->n : r->cap - r->at;
    if (r->buf) {
        memcpy(p, r->buf + r->at, first);
        memcpy(p + first, r->buf, r->n - first);
    }
    lr_free(r->buf);
    r->buf = p;
    r->cap = cap;
    r->at = 0;
    return true;
}

int lr_http_write(lr_http_req *r, const char *s, size_t n, size_t *taken, lr_error *err)
{
    int rc = 0;
    pthread_mutex_lock(&r->h->lock);
    if (r->phase != LR_HTTP_STREAM || r->ended)
        rc = lr_fail(err, LR_ESTATE, "the answer is no open stream");
    else if (r->gone || !r->c)
        rc = lr_fail(err, LR_ECANCELLED, "the client has gone");
    else if (!grow_ring(r, n))
        rc = lr_fail(err, LR_ENOMEM, "no memory for a stream");
    if (!rc) {
        size_t room = r->cap - r->n, k = n < room ? n : room, to = (r->at + r->n) % r->cap;
        size_t first = k < r->cap - to ? k : r->cap - to;
        memcpy(r->buf + to, s, first);
        memcpy(r->buf, s + first, k - first);
        r->n += k;
        if (k < n) r->was_full = true;
        if (k) lr_http__resume(r);
        *taken = k;
    }
    pthread_mutex_unlock(&r->h->lock);
    return rc;
}

void lr_http_end(lr_http_req *r)
{
    pthread_mutex_lock(&r->h->lock);
    if (r->phase == LR_HTTP_STREAM && !r->ended) {
        r->ended = true;
        lr_http__resume(r);
    }
    pthread_mutex_unlock(&r->h->lock);
}

void lr_http_req_free(lr_http_req *r)
{
    if (!r) return;
    lr_http *h = r->h;
    pthread_mutex_lock(&h->lock);
    if (r->freed) {
        pthread_mutex_unlock(&h->lock);
        return;
    }
    if (r->c && !r->gone && r->phase == LR_HTTP_WAITING) {
        r->response = lr_http__error_body("server_error", "internal_error", "the request was not answered");
        r->status = 500;
        r->phase = LR_HTTP_ONCE;
    } else if (r->phase == LR_HTTP_STREAM && !r->ended) {
        r->cut = true;
    }
    lr_http__resume(r);
    lr_http__untell(r);
    r->freed = true;
    h->stats.requests--;
    lr_http__settle(r);
    pthread_mutex_unlock(&h->lock);
}
