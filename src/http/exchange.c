/* exchange.c - one request from its first line to the end of its answer: libmicrohttpd's callbacks, all called by the
 * I/O thread. See http_int.h.
 *
 * Headers are checked where libmicrohttpd is lenient: two lengths, a length beside chunks, unknown transfer codings are
 * 400 (each would let a proxy before us see other borders between requests than we do), and so are names that are no
 * tokens, lines that go on in the next, and line ends inside of values. A body that is too long is refused at its
 * headers if its length says so and the client waits to be asked (Expect) or means to send far too much; else it is
 * read and thrown away, so that the client sees the answer.
 */
#include "http/http_int.h"
#include "base/mem.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>

#define LINE_MAX_BLANKS 4096
#define SKIP_AT_MOST    ((size_t)64 << 20) /* bytes of a too long body that are read for politeness */

/* ---- answers of io's own ---- */

struct MHD_Response *lr_http__error_body(const char *type, const char *code, const char *message)
{
    char text[512];
    int n =
        snprintf(text, sizeof text, "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,\"code\":\"%s\"}}",
                 message, type, code);
    struct MHD_Response *m = MHD_create_response_from_buffer((size_t)n, text, MHD_RESPMEM_MUST_COPY);
    if (m) MHD_add_response_header(m, MHD_HTTP_HEADER_CONTENT_TYPE, "application/json");
    return m;
}

static enum MHD_Result refuse(lr_http_req *r, unsigned status, const char *type, const char *code, const char *message)
{
    struct MHD_Response *m = lr_http__error_body(type, code, message);
    if (!m) return MHD_NO;
    MHD_add_response_header(m, MHD_HTTP_HEADER_CONNECTION, "close");
    if (status == MHD_HTTP_SERVICE_UNAVAILABLE) MHD_add_response_header(m, MHD_HTTP_HEADER_RETRY_AFTER, "1");
    enum MHD_Result ok = MHD_queue_response(r->c, status, m);
    MHD_destroy_response(m);
    pthread_mutex_lock(&r->h->lock);
    r->phase = LR_HTTP_REFUSED;
    r->h->stats.refused++;
    pthread_mutex_unlock(&r->h->lock);
    return ok;
}

static enum MHD_Result bad_request(lr_http_req *r, const char *message)
{
    return refuse(r, MHD_HTTP_BAD_REQUEST, "invalid_request_error", "bad_request", message);
}

static enum MHD_Result too_long(lr_http_req *r)
{
    char text[128];
    snprintf(text, sizeof text, "the request body is longer than %zu bytes", r->h->cfg.max_body);
    return refuse(r, MHD_HTTP_CONTENT_TOO_LARGE, "invalid_request_error", "body_too_large", text);
}

static enum MHD_Result too_busy(lr_http_req *r, const char *message)
{
    return refuse(r, MHD_HTTP_SERVICE_UNAVAILABLE, "overloaded_error", "overloaded", message);
}

/* ---- the first line ---- */

void *lr_http__on_line(void *cls, const char *uri, struct MHD_Connection *c)
{
    lr_http *h = cls;
    lr_http_req *r = lr_calloc(1, sizeof *r);
    if (!r) return NULL;
    r->h = h;
    r->c = c;
    r->slot = -1;
    r->target = lr_strdup(uri);
    r->target_end = (uintptr_t)uri + strlen(uri);
    const union MHD_ConnectionInfo *sc = MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    r->conn = sc ? sc->socket_context : NULL;
    if (!r->target || !r->conn) {
        lr_free(r->target);
        lr_free(r);
        return NULL;
    }
    pthread_mutex_lock(&h->lock);
    r->conn->at = r;
    r->conn->since = lr_http__now();
    pthread_mutex_unlock(&h->lock);
    return r;
}

/* ---- the headers ---- */

typedef struct scan {
    size_t n_lines, bytes;
    int n_length, n_coding;
    bool chunked, expects, malformed;
    size_t length;
    size_t line_end; /* bytes that end a line: 2, or 1 if the first one ends with LF alone; 0: not known */
    uintptr_t next;  /* where the next line begins, if that is known */
} scan;

static bool is_token(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int c = s[i] | 32;
        if (!(c >= 'a' && c <= 'z') && !(s[i] && strchr("0123456789!#$%&'*+-.^_`|~", s[i]))) return false;
    }
    return n > 0;
}

/* Whether a line is as it came. One that goes on in the next (obs-fold) has got that one's text behind its name, which
 * for this has been moved: otherwise only the colon, now a zero byte, and blanks are between name and value. */
static bool is_one_line(const char *name, size_t name_n, const char *value)
{
    uintptr_t from = (uintptr_t)(name + name_n), to = (uintptr_t)value;
    if (!value) return true;
    if (to <= from || to - from > LINE_MAX_BLANKS) return false;
    for (const char *p = name + name_n; p < value; p++)
        if (*p && *p != ':' && *p != ' ' && *p != '\t') return false;
    return true;
}

/* Whether the library takes lines apart in place, ends a value at the first zero byte and takes LF alone for the end of
 * a line, as up to 0.9.75. Then a line's end shows in where the next one begins. */
static bool reads_in_place(void)
{
    int major = 0, minor = 0, patch = 0;
    return sscanf(MHD_get_version(), "%d.%d.%d", &major, &minor, &patch) == 3 && major == 0 && minor == 9 &&
           patch <= 75;
}

/* Whether a line follows the one before as it should: no zero byte in that one, and its end is that of the first. */
static bool follows(scan *s, const char *name, const char *value, size_t value_n)
{
    bool good = !s->next || s->next == (uintptr_t)name;
    s->next = s->line_end && value ? (uintptr_t)(value + value_n + s->line_end) : 0;
    return good && (s->line_end < 2 || !value || !value[value_n + 1]);
}

/* Looks at the request line, as on the library reads it in place: false if it is not as it should be (a zero byte in
 * the target, more than a space behind it). Its end is what all lines must end with. */
static bool begin_lines(scan *s, uintptr_t target_end, const char *version)
{
    uintptr_t behind = (uintptr_t)version - target_end;
    if (!reads_in_place() || behind >= LINE_MAX_BLANKS) return true;
    size_t n = strlen(version);
    s->line_end = version[n + 1] ? 1 : 2;
    s->next = (uintptr_t)(version + n + s->line_end);
    return behind == 1;
}

static enum MHD_Result count_line(void *cls, enum MHD_ValueKind kind, const char *name, size_t name_n,
                                  const char *value, size_t value_n)
{
    (void)kind;
    scan *s = cls;
    s->n_lines++;
    s->bytes += name_n + value_n + 2;
    if (!is_token(name, name_n) || !is_one_line(name, name_n, value) || (value_n && memchr(value, '\r', value_n)) ||
        s->malformed || !follows(s, name, value, value_n))
        s->malformed = true;
    if (strcasecmp(name, "content-length") == 0) {
        s->n_length++;
        s->length = value && *value >= '0' && *value <= '9' ? strtoull(value, NULL, 10) : 0;
    } else if (strcasecmp(name, "transfer-encoding") == 0) {
        s->n_coding++;
        s->chunked = value && strcasecmp(value, "chunked") == 0;
    } else if (strcasecmp(name, "expect") == 0) {
        s->expects = true;
    }
    return MHD_YES;
}

static enum MHD_Result copy_line(void *cls, enum MHD_ValueKind kind, const char *name, size_t name_n, const char *value,
                                 size_t value_n)
{
    (void)kind;
    lr_http_req *r = cls;
    char *p = r->n_lines ? (char *)r->lines[r->n_lines - 1].value.s + r->lines[r->n_lines - 1].value.n + 1 : r->head;
    struct lr_http_line *l = &r->lines[r->n_lines++];
    memcpy(p, name, name_n);
    p[name_n] = 0;
    l->name = (lr_str){p, name_n};
    p += name_n + 1;
    if (value_n) memcpy(p, value, value_n);
    p[value_n] = 0;
    l->value = (lr_str){p, value_n};
    return MHD_YES;
}

static bool keep_headers(lr_http_req *r, const scan *s, const char *method)
{
    r->method = lr_strdup(method);
    r->head = lr_malloc(s->bytes + 1);
    r->lines = lr_calloc(s->n_lines + 1, sizeof *r->lines);
    if (!r->method || !r->head || !r->lines) return false;
    MHD_get_connection_values_n(r->c, MHD_HEADER_KIND, copy_line, r);
    const union MHD_ConnectionInfo *a = MHD_get_connection_info(r->c, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const struct sockaddr *sa = a ? a->client_addr : NULL;
    if (sa && sa->sa_family == AF_INET)
        inet_ntop(AF_INET, &((const struct sockaddr_in *)sa)->sin_addr, r->peer, sizeof r->peer);
    else if (sa && sa->sa_family == AF_INET6)
        inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)sa)->sin6_addr, r->peer, sizeof r->peer);
    return true;
}

/* Takes one of the places for requests; false if there is none. */
static bool take_place(lr_http_req *r)
{
    lr_http *h = r->h;
    pthread_mutex_lock(&h->lock);
    int i = h->first_free;
    while (i < h->cfg.max_requests && h->by_slot[i]) i++;
    bool found = i < h->cfg.max_requests && !h->draining;
    h->first_free = i;
    if (found) {
        h->by_slot[i] = r;
        h->n_counted++;
        r->slot = i;
        r->id = ++h->next_id;
        r->phase = LR_HTTP_BODY;
        r->conn->since = lr_http__now();
    }
    pthread_mutex_unlock(&h->lock);
    return found;
}

static enum MHD_Result headers_read(lr_http_req *r, const char *method, const char *version)
{
    scan s = {0};
    if (!begin_lines(&s, r->target_end, version)) return bad_request(r, "a request line that is malformed");
    MHD_get_connection_values_n(r->c, MHD_HEADER_KIND, count_line, &s);
    if (s.malformed)
        return bad_request(
            r, "a header line that is malformed, ends otherwise than the first, or goes on in the next line");
    r->old_version = strcmp(version, "HTTP/1.0") == 0;
    if (s.n_coding && r->old_version) return bad_request(r, "Transfer-Encoding in HTTP/1.0");
    if (s.n_length > 1) return bad_request(r, "more than one Content-Length");
    if (s.n_length && s.n_coding) return bad_request(r, "Content-Length beside Transfer-Encoding");
    if (s.n_coding > 1 || (s.n_coding && !s.chunked))
        return bad_request(r, "the only transfer coding understood is chunked");
    if (!take_place(r))
        return too_busy(r, r->h->draining ? "the server is shutting down" : "too many requests at once");
    if (!keep_headers(r, &s, method)) return MHD_NO;
    if (s.length > r->h->cfg.max_body) {
        r->too_long = true;
        if (s.expects || s.length > r->h->cfg.max_body + SKIP_AT_MOST) return too_long(r);
    }
    return MHD_YES;
}

/* ---- the body ---- */

/* Under the lock. */
void lr_http__forget_body(lr_http_req *r)
{
    r->h->stats.bodies -= r->body_cap;
    lr_free(r->body);
    r->body = NULL;
    r->body_n = r->body_cap = 0;
}

/* Makes room for n more bytes; false if there is no memory or all bodies together are too much. */
static bool grow_body(lr_http_req *r, size_t n)
{
    lr_http *h = r->h;
    if (r->body_n + n <= r->body_cap) return true;
    size_t cap = r->body_cap ? r->body_cap * 2 : 4096;
    while (cap < r->body_n + n) cap *= 2;
    pthread_mutex_lock(&h->lock);
    bool ok = h->stats.bodies - r->body_cap + cap <= h->cfg.max_bodies;
    char *p = ok ? lr_realloc(r->body, cap) : NULL;
    if (p) {
        h->stats.bodies += cap - r->body_cap;
        r->body = p;
        r->body_cap = cap;
    }
    pthread_mutex_unlock(&h->lock);
    return p != NULL;
}

/* What can't be answered while it comes in: the rest is skipped, the refusal follows at its end. */
static enum MHD_Result body_read(lr_http_req *r, const char *data, size_t n)
{
    if (!r->too_long && !r->skipped && r->body_n + n > r->h->cfg.max_body) r->too_long = true;
    if (!r->too_long && !r->skipped && grow_body(r, n)) {
        memcpy(r->body + r->body_n, data, n);
        r->body_n += n;
        return MHD_YES;
    }
    r->skipped += n;
    return r->skipped <= r->h->cfg.max_body + SKIP_AT_MOST ? MHD_YES : MHD_NO;
}

/* ---- the answer ---- */

/* Under the lock. */
static void watch(lr_http_req *r)
{
    struct epoll_event ev = {.events = EPOLLRDHUP | EPOLLONESHOT,
                             .data.u64 = (uint64_t)(uint32_t)r->id << 32 | (uint32_t)r->slot};
    r->watched = epoll_ctl(r->h->epoll, EPOLL_CTL_ADD, r->conn->fd, &ev) == 0;
}

static enum MHD_Result hand_over(lr_http_req *r)
{
    lr_http *h = r->h;
    pthread_mutex_lock(&h->lock);
    bool go = !h->stopping;
    if (go) {
        r->phase = LR_HTTP_WAITING;
        r->handed = true;
        h->stats.requests++;
        h->stats.taken++;
        watch(r);
        lr_http__tell(r, LR_HTTP_NEW);
        r->suspended = true;
        MHD_suspend_connection(r->c);
    }
    pthread_mutex_unlock(&h->lock);
    return go ? MHD_YES : MHD_NO;
}

/* Woken by the owner (or for the end of the listener). */
static enum MHD_Result answer(lr_http_req *r)
{
    lr_http *h = r->h;
    pthread_mutex_lock(&h->lock);
    struct MHD_Response *m = r->response;
    bool go = m && !r->cut;
    r->response = NULL;
    if (go && h->draining) MHD_add_response_header(m, MHD_HTTP_HEADER_CONNECTION, "close");
    int status = r->status;
    if (!go) lr_http__hang_up(r);
    pthread_mutex_unlock(&h->lock);
    enum MHD_Result ok = go ? MHD_queue_response(r->c, (unsigned)status, m) : MHD_NO;
    if (m) MHD_destroy_response(m);
    return ok;
}

enum MHD_Result lr_http__on_request(void *cls, struct MHD_Connection *c, const char *url, const char *method,
                                    const char *version, const char *data, size_t *n, void **ctx)
{
    (void)cls, (void)c, (void)url;
    lr_http_req *r = *ctx;
    if (!r) return MHD_NO;
    if (!r->seen) {
        r->seen = true;
        return headers_read(r, method, version);
    }
    if (*n) {
        size_t got = *n;
        *n = 0;
        return r->phase == LR_HTTP_BODY ? body_read(r, data, got) : MHD_YES;
    }
    if (r->phase == LR_HTTP_BODY) {
        if (r->too_long) return too_long(r);
        if (r->skipped) return too_busy(r, "too many bytes of requests at once");
        return hand_over(r);
    }
    return answer(r);
}

/* ---- the end ---- */

void lr_http__settle(lr_http_req *r)
{
    lr_http *h = r->h;
    if (r->c || (r->handed && !r->freed)) return;
    lr_http__untell(r);
    lr_http__forget_body(r);
    if (r->slot >= 0) {
        h->by_slot[r->slot] = NULL;
        h->n_counted--;
        if (r->slot < h->first_free) h->first_free = r->slot;
    }
    if (r->response) MHD_destroy_response(r->response);
    lr_free(r->buf);
    lr_free(r->method);
    lr_free(r->target);
    lr_free(r->head);
    lr_free(r->lines);
    lr_free(r);
}

void lr_http__on_done(void *cls, struct MHD_Connection *c, void **ctx, enum MHD_RequestTerminationCode how)
{
    (void)c;
    lr_http *h = cls;
    lr_http_req *r = *ctx;
    if (!r) return;
    *ctx = NULL;
    pthread_mutex_lock(&h->lock);
    if (r->watched) epoll_ctl(h->epoll, EPOLL_CTL_DEL, r->conn->fd, NULL);
    r->watched = false;
    if (r->conn->since < INFINITY) r->conn->since = lr_http__now();
    r->conn->at = NULL;
    r->conn = NULL;
    r->c = NULL;
    r->suspended = false;
    if (how != MHD_REQUEST_TERMINATED_COMPLETED_OK && r->handed && !r->gone) {
        r->gone = true;
        h->stats.gone++;
        lr_http__tell(r, LR_HTTP_GONE);
    }
    lr_http__settle(r);
    pthread_mutex_unlock(&h->lock);
}
