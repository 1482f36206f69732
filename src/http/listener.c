/* listener.c - the listener: socket, I/O thread, connections and their time limits, the queue of news. See http.h.
 *
 * The epoll set that the owner waits on holds: wake (an eventfd: there is news), timer (runs while connections are
 * open: time limits), and the sockets of requests that wait for the owner or are being answered: a client that closes
 * shows there, as libmicrohttpd does not look at a suspended connection.
 */
#include "http/http_int.h"
#include "base/clock.h"
#include "base/mem.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define WAKE_MARK  UINT64_MAX
#define TIMER_MARK (UINT64_MAX - 1)

#define SPARE_FILES 16
#define FULL_IDLE   1.0 /* seconds */
#define ASK_EVERY   5.0

double lr_http__now(void) { return lr_now(); }

lr_http_config lr_http_defaults(void)
{
    return (lr_http_config){.host = "127.0.0.1",
                            .port = 8080,
                            .max_connections = 4096,
                            .max_requests = 1024,
                            .max_header = 32 << 10,
                            .max_body = (size_t)64 << 20,
                            .max_bodies = (size_t)256 << 20,
                            .max_stream = (size_t)256 << 10,
                            .idle_timeout = 75,
                            .header_timeout = 20,
                            .body_timeout = 120};
}

/* ---- news ---- */

void lr_http__tell(lr_http_req *r, unsigned what)
{
    lr_http *h = r->h;
    if (!r->handed || r->freed) return;
    r->news |= what;
    if (r->listed) return;
    r->listed = true;
    r->next_news = NULL;
    r->prev_news = h->last_news;
    if (h->last_news)
        h->last_news->next_news = r;
    else {
        uint64_t one = 1;
        h->first_news = r;
        if (write(h->wake, &one, sizeof one) < 0) return; /* full: it is readable already */
    }
    h->last_news = r;
}

void lr_http__untell(lr_http_req *r)
{
    lr_http *h = r->h;
    if (!r->listed) return;
    if (r->prev_news)
        r->prev_news->next_news = r->next_news;
    else
        h->first_news = r->next_news;
    if (r->next_news)
        r->next_news->prev_news = r->prev_news;
    else
        h->last_news = r->prev_news;
    r->listed = false;
}

lr_http_req *lr_http_next(lr_http *h, unsigned *what)
{
    pthread_mutex_lock(&h->lock);
    lr_http_req *r = h->first_news;
    if (r) {
        lr_http__untell(r);
        *what = r->news;
        r->news = 0;
    } else {
        uint64_t n;
        if (read(h->wake, &n, sizeof n) < 0) n = 0; /* nothing to take back */
    }
    pthread_mutex_unlock(&h->lock);
    return r;
}

/* ---- time limits, clients that leave ---- */

/* Under the lock. Closing is left to libmicrohttpd: it sees the end of the stream. */
static void cut_off(lr_http *h, lr_http_conn *c)
{
    h->stats.slow++;
    shutdown(c->fd, SHUT_RDWR);
    c->since = INFINITY;
}

/* libmicrohttpd reads until a socket gives less than it was asked for, and then waits for news of it. An end that came
 * together with the last bytes is no news, so nobody but us misses a client that left amid a request. Seen twice, for
 * what has just been read may still be a whole request. Returns whether there is reason to look again soon. */
static bool look_for_end(lr_http_conn *c)
{
    char byte;
    bool end = recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0, again = end && !c->end_seen;
    if (end && !again) {
        shutdown(c->fd, SHUT_RDWR);
        c->since = INFINITY;
    }
    c->end_seen = end;
    return again;
}

/* The client has ended its sending half, which is all that can be seen, also where it has closed altogether: it says so
 * only to who sends it something. So it is sent an interim answer, now and then, which costs a client that waits
 * nothing, and brings a reset from one that has gone. HTTP/1.0 has none: such a client counts as gone (proxies that
 * still speak it close both halves). So do others that end it once a stream has begun: who half-closes does that
 * behind the request. */
static bool may_listen(lr_http_req *r)
{
    static const char interim[] = "HTTP/1.1 100 Continue\r\n\r\n";
    const ssize_t n = sizeof interim - 1;
    if (r->phase == LR_HTTP_STREAM) return r->asked_at > 0;
    r->asked_at = lr_http__now();
    if (r->phase == LR_HTTP_ONCE) return true;
    return r->phase == LR_HTTP_WAITING && !r->old_version &&
           send(r->conn->fd, interim, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL) == n;
}

static double least(double a, double b) { return a < b ? a : b; }

/* Where all connections are taken, those on which nobody asks for anything give way to those that wait to be accepted;
 * where all places for requests are, bodies that come slowly do. */
static void sweep(lr_http *h)
{
    double now = lr_http__now();
    bool soon = false, full = h->stats.connections >= h->cfg.max_connections;
    for (lr_http_conn *c = h->conns; c; c = c->next) {
        if (c->since == INFINITY) continue;
        if (c->at && c->at->asked_at > 0 && c->at->phase == LR_HTTP_WAITING && now - c->at->asked_at > ASK_EVERY &&
            !may_listen(c->at))
            lr_http__lost(c->at);
        double limit = full ? least(h->cfg.idle_timeout, FULL_IDLE) : h->cfg.idle_timeout;
        if (c->at && c->at->phase == LR_HTTP_HEADERS)
            limit = h->cfg.header_timeout;
        else if (c->at && c->at->phase == LR_HTTP_BODY)
            limit = h->n_counted < h->cfg.max_requests ? h->cfg.body_timeout : h->cfg.body_timeout / 8;
        else if (c->at)
            continue;
        if (now - c->since > limit)
            cut_off(h, c);
        else
            soon = look_for_end(c) || soon;
    }
    if (soon) timerfd_settime(h->timer, 0, &(struct itimerspec){{1, 0}, {0, 50000000}}, NULL);
}

static void client_left(lr_http *h, uint64_t mark, unsigned events)
{
    lr_http_req *r = h->by_slot[mark & 0xffffffff];
    if (!r || (uint32_t)r->id != (uint32_t)(mark >> 32) || !r->c) return;
    struct epoll_event ev = {.events = EPOLLONESHOT, .data.u64 = mark}; /* errors and resets come unasked */
    if ((events & (EPOLLHUP | EPOLLERR)) || !may_listen(r) || epoll_ctl(h->epoll, EPOLL_CTL_MOD, r->conn->fd, &ev) != 0)
        lr_http__lost(r);
}

void lr_http_poll(lr_http *h)
{
    struct epoll_event ev[64];
    int n = epoll_wait(h->epoll, ev, 64, 0);
    if (n <= 0) return;
    pthread_mutex_lock(&h->lock);
    for (int i = 0; i < n; i++) {
        uint64_t ticks;
        if (ev[i].data.u64 == WAKE_MARK) continue;
        if (ev[i].data.u64 != TIMER_MARK)
            client_left(h, ev[i].data.u64, ev[i].events);
        else if (read(h->timer, &ticks, sizeof ticks) > 0)
            sweep(h);
    }
    pthread_mutex_unlock(&h->lock);
}

/* ---- connections: called by io ---- */

/* Under the lock: the timer ticks while connections are open. */
static void set_timer(lr_http *h)
{
    bool want = h->conns != NULL;
    if (want == h->timing) return;
    h->timing = want;
    struct itimerspec it = {{want, 0}, {want, 0}};
    timerfd_settime(h->timer, 0, &it, NULL);
}

static void opened(lr_http *h, struct MHD_Connection *c, void **socket_ctx)
{
    const union MHD_ConnectionInfo *fd = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
    lr_http_conn *conn = lr_calloc(1, sizeof *conn);
    *socket_ctx = conn;
    if (!conn || !fd) return;
    int on = 1;
    conn->fd = fd->connect_fd;
    conn->since = lr_http__now();
    setsockopt(conn->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    pthread_mutex_lock(&h->lock);
    conn->next = h->conns;
    if (h->conns) h->conns->prev = conn;
    h->conns = conn;
    h->stats.connections++;
    h->stats.accepted++;
    set_timer(h);
    pthread_mutex_unlock(&h->lock);
}

static void closed(lr_http *h, void **socket_ctx)
{
    lr_http_conn *conn = *socket_ctx;
    if (!conn) return;
    pthread_mutex_lock(&h->lock);
    if (conn->prev)
        conn->prev->next = conn->next;
    else
        h->conns = conn->next;
    if (conn->next) conn->next->prev = conn->prev;
    h->stats.connections--;
    set_timer(h);
    pthread_mutex_unlock(&h->lock);
    lr_free(conn);
    *socket_ctx = NULL;
}

void lr_http__on_connection(void *cls, struct MHD_Connection *c, void **socket_ctx,
                            enum MHD_ConnectionNotificationCode what)
{
    if (what == MHD_CONNECTION_NOTIFY_STARTED)
        opened(cls, c, socket_ctx);
    else
        closed(cls, socket_ctx);
}

/* ---- starting ---- */

static bool is_loopback(const struct sockaddr *sa)
{
    if (sa->sa_family == AF_INET) return ntohl(((const struct sockaddr_in *)sa)->sin_addr.s_addr) >> 24 == 127;
    return sa->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)sa)->sin6_addr);
}

/* A listening socket on one address; -1 with errno. */
static int listen_on(const struct addrinfo *ai)
{
    int on = 1, fd = socket(ai->ai_family, ai->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, ai->ai_protocol);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, ai->ai_addr, ai->ai_addrlen) == 0 && listen(fd, 1024) == 0) return fd;
    int saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

static int open_listener(lr_http *h, lr_error *err)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list;
    char port[16];
    snprintf(port, sizeof port, "%d", h->cfg.port);
    int rc = getaddrinfo(h->cfg.host, port, &hints, &list);
    if (rc) return lr_fail(err, LR_EIO, "address %.200s: %s", h->cfg.host, gai_strerror(rc));
    for (const struct addrinfo *ai = list; ai && h->listener < 0; ai = ai->ai_next) h->listener = listen_on(ai);
    int saved = errno;
    freeaddrinfo(list);
    if (h->listener < 0) {
        return lr_fail(err, LR_EIO, "can't listen on %.200s port %d: %s", h->cfg.host, h->cfg.port, strerror(saved));
    }
    struct sockaddr_storage sa;
    socklen_t n = sizeof sa;
    if (getsockname(h->listener, (struct sockaddr *)&sa, &n) != 0 ||
        getnameinfo((struct sockaddr *)&sa, n, h->host, sizeof h->host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return lr_fail(err, LR_EIO, "address of the listening socket: %s", strerror(errno));
    h->loopback = is_loopback((struct sockaddr *)&sa);
    for (const char *p = port; *p; p++) h->port = h->port * 10 + (*p - '0');
    return 0;
}

static int watch_fd(lr_http *h, int fd, uint64_t mark)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = mark};
    return epoll_ctl(h->epoll, EPOLL_CTL_ADD, fd, &ev);
}

static int open_epoll(lr_http *h, lr_error *err)
{
    h->epoll = epoll_create1(EPOLL_CLOEXEC);
    h->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    h->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (h->epoll < 0 || h->wake < 0 || h->timer < 0 || watch_fd(h, h->wake, WAKE_MARK) ||
        watch_fd(h, h->timer, TIMER_MARK))
        return lr_fail(err, LR_EIO, "epoll: %s", strerror(errno));
    return 0;
}

static void no_log(void *cls, const char *fmt, va_list ap) { (void)cls, (void)fmt, (void)ap; }

/* The I/O thread takes no signals: they are the owner's. */
static int start_thread(lr_http *h, lr_error *err)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    h->daemon = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ITC | MHD_USE_ERROR_LOG, 0, NULL, NULL,
        lr_http__on_request, h, MHD_OPTION_EXTERNAL_LOGGER, no_log, NULL, MHD_OPTION_LISTEN_SOCKET, h->listener,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)h->cfg.max_connections, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        h->cfg.max_header, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)(h->cfg.idle_timeout + 0.999),
        MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_URI_LOG_CALLBACK, lr_http__on_line, h, MHD_OPTION_NOTIFY_COMPLETED,
        lr_http__on_done, h, MHD_OPTION_NOTIFY_CONNECTION, lr_http__on_connection, h, MHD_OPTION_THREAD_STACK_SIZE,
        (size_t)256 << 10, MHD_OPTION_END);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!h->daemon) return lr_fail(err, LR_EIO, "the HTTP listener could not be started: %s", strerror(errno));
    return 0;
}

/* Each connection takes a descriptor: as many as the system lets this process have, less some that stay for what
 * requests need (files, pipes to programs, other servers) and libmicrohttpd's own. last: a descriptor just made. */
static int bound_connections(lr_http *h, int last, lr_error *err)
{
    struct rlimit rl;
    if (getrlimit(RLIMIT_NOFILE, &rl) != 0) return 0;
    if (rl.rlim_cur < rl.rlim_max) {
        rlim_t before = rl.rlim_cur;
        rl.rlim_cur = rl.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &rl) != 0) rl.rlim_cur = before;
    }
    if (rl.rlim_cur > 1 << 30) return 0;
    int left = (int)rl.rlim_cur - last - 1 - SPARE_FILES;
    if (left < 1)
        return lr_fail(
            err, LR_EIO,
            "this process may have %d open files (ulimit -n); to serve it needs at least %d with those it has",
            (int)rl.rlim_cur, (int)rl.rlim_cur + 1 - left);
    if (h->cfg.max_connections > left) h->cfg.max_connections = left;
    return 0;
}

static int check_config(const lr_http_config *c, lr_error *err)
{
    if (c->port < 0 || c->port > 65535) return lr_fail(err, LR_EINVAL, "port %d: 0 to 65535 expected", c->port);
    if (c->max_connections < 1 || c->max_requests < 1 || c->max_requests > 1 << 20)
        return lr_fail(err, LR_EINVAL, "max_connections and max_requests must be at least 1");
    if (c->max_header < 4096) return lr_fail(err, LR_EINVAL, "max_header must be at least 4096");
    if (c->max_stream < 1024) return lr_fail(err, LR_EINVAL, "max_stream must be at least 1024");
    if (!(c->idle_timeout > 0 && c->header_timeout > 0 && c->body_timeout > 0 && c->idle_timeout < 1e6))
        return lr_fail(err, LR_EINVAL, "time limits must be above 0");
    return 0;
}

int lr_http_new(lr_http **out, const lr_http_config *cfg, lr_error *err)
{
    int rc = check_config(cfg, err);
    if (rc) return rc;
    lr_http *h = lr_calloc(1, sizeof *h);
    if (!h) return lr_fail(err, LR_ENOMEM, "no memory for a listener");
    h->cfg = *cfg;
    h->cfg.host = NULL;
    h->listener = h->epoll = h->wake = h->timer = -1;
    pthread_mutex_init(&h->lock, NULL);
    h->cfg.host = lr_strdup(cfg->host ? cfg->host : "127.0.0.1");
    h->by_slot = lr_calloc((size_t)cfg->max_requests, sizeof(void *));
    if (!h->cfg.host || !h->by_slot) rc = lr_fail(err, LR_ENOMEM, "no memory for a listener");
    if (!rc) rc = open_epoll(h, err);
    if (!rc) rc = open_listener(h, err);
    if (!rc) rc = bound_connections(h, h->listener, err);
    if (!rc) rc = start_thread(h, err);
    if (rc) {
        lr_http_free(h);
        return rc;
    }
    *out = h;
    return 0;
}

/* ---- ending ---- */

void lr_http_drain(lr_http *h)
{
    if (h->draining) return;
    pthread_mutex_lock(&h->lock);
    h->draining = true;
    pthread_mutex_unlock(&h->lock);
    MHD_socket fd = MHD_quiesce_daemon(h->daemon);
    if (fd != MHD_INVALID_SOCKET) close(fd);
    h->listener = -1;
}

/* libmicrohttpd can't be stopped while connections are suspended: each is woken, and closed when it comes round. */
static void wake_all(lr_http *h)
{
    pthread_mutex_lock(&h->lock);
    h->stopping = true;
    for (lr_http_conn *c = h->conns; c; c = c->next) {
        if (!c->at) continue;
        c->at->cut = true;
        lr_http__resume(c->at);
    }
    pthread_mutex_unlock(&h->lock);
}

static void free_held(lr_http *h)
{
    pthread_mutex_lock(&h->lock);
    for (int i = 0; i < h->cfg.max_requests; i++) {
        lr_http_req *r = h->by_slot[i];
        if (!r) continue;
        r->freed = true;
        lr_http__settle(r);
    }
    pthread_mutex_unlock(&h->lock);
}

static void close_fd(int fd)
{
    if (fd >= 0) close(fd);
}

void lr_http_free(lr_http *h)
{
    if (!h) return;
    if (h->daemon) {
        wake_all(h);
        MHD_stop_daemon(h->daemon); /* closes the listening socket, ends the thread: io is done with all requests */
        free_held(h);
    } else {
        close_fd(h->listener);
    }
    close_fd(h->epoll);
    close_fd(h->wake);
    close_fd(h->timer);
    pthread_mutex_destroy(&h->lock);
    lr_free((char *)h->cfg.host);
    lr_free(h->by_slot);
    lr_free(h);
}

int lr_http_port(const lr_http *h) { return h->port; }
const char *lr_http_host(const lr_http *h) { return h->host; }
bool lr_http_is_loopback(const lr_http *h) { return h->loopback; }
int lr_http_fd(const lr_http *h) { return h->epoll; }

void lr_http_get_stats(lr_http *h, lr_http_stats *s)
{
    pthread_mutex_lock(&h->lock);
    *s = h->stats;
    s->pending = h->n_counted;
    pthread_mutex_unlock(&h->lock);
}
