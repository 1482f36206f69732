/* test_http.c - the HTTP listener over real sockets, owner and client in one thread: requests, streams with
 * back-pressure, clients that leave, limits, draining, and freeing with all of it under way. */
#include "base/mem.h"
#include "http/http.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static lr_error err;

static lr_http *start(lr_http_config c)
{
    lr_http *h = NULL;
    c.port = 0;
    assert_int_equal(lr_http_new(&h, &c, &err), 0);
    assert_true(lr_http_is_loopback(h));
    assert_string_equal(lr_http_host(h), "127.0.0.1");
    return h;
}

static int dial(lr_http *h)
{
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons((uint16_t)lr_http_port(h))};
    inet_pton(AF_INET, "127.0.0.1", &sa.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&sa, sizeof sa), 0);
    return fd;
}

static void say(int fd, const char *text)
{
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), strlen(text));
}

/* Reads until the text ends in `end`, or to the end of the stream (NULL); at most 5 s. */
static size_t hear(int fd, char *buf, size_t cap, const char *end)
{
    size_t n = 0;
    for (;;) {
        struct pollfd p = {fd, POLLIN, 0};
        assert_int_equal(poll(&p, 1, 5000), 1);
        ssize_t k = recv(fd, buf + n, cap - 1 - n, 0);
        if (k <= 0) break;
        n += (size_t)k;
        buf[n] = 0;
        if (end && n >= strlen(end) && strcmp(buf + n - strlen(end), end) == 0) return n;
    }
    buf[n] = 0;
    assert_null(end);
    return n;
}

/* The next news, waited for; NULL after `ms`. */
static lr_http_req *wait_news(lr_http *h, unsigned *what, int ms)
{
    for (;;) {
        lr_http_poll(h);
        lr_http_req *r = lr_http_next(h, what);
        if (r) return r;
        struct pollfd p = {lr_http_fd(h), POLLIN, 0};
        if (poll(&p, 1, ms) == 0) return NULL;
    }
}

static lr_http_req *wait_new(lr_http *h)
{
    unsigned what;
    lr_http_req *r = wait_news(h, &what, 5000);
    assert_non_null(r);
    assert_true(what & LR_HTTP_NEW);
    return r;
}

static void wait_settled(lr_http *h, int pending, int connections)
{
    lr_http_stats s;
    for (int i = 0; i < 500; i++) {
        lr_http_poll(h);
        lr_http_get_stats(h, &s);
        if (s.pending == pending && s.connections == connections) return;
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    fail_msg("%d requests pending, %d connections", s.pending, s.connections);
}

static void test_request_and_answer(void **state)
{
    (void)state;
    lr_http *h = start(lr_http_defaults());
    int fd = dial(h);
    char buf[2048];
    for (int i = 0; i < 3; i++) { /* on one connection */
        say(fd, "POST /a/b?c=%20d HTTP/1.1\r\nHost: x\r\nX-One: 1\r\nx-one: 2\r\nContent-Length: 5\r\n\r\nhe\0lo");
        if (i == 0)
            assert_int_equal(send(fd, "\0lo", 3, 0), 3);
        else
            assert_int_equal(send(fd, "llo", 3, 0), 3);
        lr_http_req *r = wait_new(h);
        assert_int_equal(lr_http_req_id(r), i + 1);
        assert_true(lr_str_is(lr_http_req_method(r), "POST"));
        assert_true(lr_str_is(lr_http_req_target(r), "/a/b?c=%20d"));
        assert_true(lr_str_is(lr_http_req_peer(r), "127.0.0.1"));
        lr_str body = lr_http_req_body(r), name, value;
        assert_int_equal(body.n, 5);
        assert_memory_equal(body.s, i == 0 ? "he\0lo" : "hello", 5);
        assert_true(lr_http_req_header(r, 1, &name, &value));
        assert_true(lr_str_is(name, "X-One") && lr_str_is(value, "1"));
        assert_false(lr_http_req_header(r, 4, &name, &value));
        lr_http_req_drop_body(r);
        assert_int_equal(lr_http_req_body(r).n, 0);
        lr_http_header hs[] = {{"X-Two", "two"}, {"Content-Length", "99"}};
        assert_int_equal(lr_http_answer(r, 201, hs, 2, LR_STR("done\n"), &err), 0);
        assert_int_equal(lr_http_answer(r, 201, hs, 2, LR_STR("done\n"), &err), LR_ESTATE);
        lr_http_req_free(r);
        hear(fd, buf, sizeof buf, "done\n");
        assert_non_null(strstr(buf, "HTTP/1.1 201"));
        assert_non_null(strstr(buf, "X-Two: two\r\n"));
        assert_non_null(strstr(buf, "Content-Length: 5\r\n"));
        assert_null(strstr(buf, "99"));
    }
    close(fd);
    wait_settled(h, 0, 0);
    lr_http_free(h);
}

static void test_bad_answers(void **state)
{
    (void)state;
    lr_http *h = start(lr_http_defaults());
    int fd = dial(h);
    char buf[2048];
    size_t taken;
    say(fd, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    lr_http_req *r = wait_new(h);
    lr_http_header split = {"X", "a\r\nY: b"};
    assert_int_equal(lr_http_answer(r, 200, &split, 1, LR_STR(""), &err), LR_EINVAL);
    assert_int_equal(lr_http_answer(r, 99, NULL, 0, LR_STR(""), &err), LR_EINVAL);
    assert_int_equal(lr_http_write(r, "x", 1, &taken, &err), LR_ESTATE);
    lr_http_req_free(r); /* not answered: 500 */
    hear(fd, buf, sizeof buf, "}}");
    assert_non_null(strstr(buf, "HTTP/1.1 500"));
    close(fd);
    lr_http_free(h);
}

static void test_stream(void **state)
{
    (void)state;
    lr_http_config c = lr_http_defaults();
    c.max_stream = 4096;
    lr_http *h = start(c);
    int fd = dial(h);
    char buf[8192];
    say(fd, "GET /s HTTP/1.1\r\nHost: x\r\n\r\n");
    lr_http_req *r = wait_new(h);
    assert_int_equal(lr_http_begin(r, 200, NULL, 0, &err), 0);
    for (int i = 0; i < 50; i++) { /* each piece goes out by itself */
        char piece[16];
        size_t taken, n = (size_t)snprintf(piece, sizeof piece, "piece %d\n", i);
        assert_int_equal(lr_http_write(r, piece, n, &taken, &err), 0);
        assert_int_equal(taken, n);
        strcat(piece, "\r\n");
        hear(fd, buf, sizeof buf, piece);
    }
    lr_http_end(r);
    hear(fd, buf, sizeof buf, "0\r\n\r\n");
    lr_http_req_free(r);
    close(fd);
    wait_settled(h, 0, 0);
    lr_http_free(h);
}

static void test_back_pressure(void **state)
{
    (void)state;
    lr_http_config c = lr_http_defaults();
    c.max_stream = 10000;
    lr_http *h = start(c);
    int fd = dial(h);
    say(fd, "GET /s HTTP/1.0\r\n\r\n"); /* no chunks: what comes is what was written */
    lr_http_req *r = wait_new(h);
    unsigned char block[3000];
    uint64_t sent = 0, got = 0, full = 0;
    const uint64_t total = 12 * 1000 * 1000;
    assert_int_equal(lr_http_begin(r, 200, NULL, 0, &err), 0);
    char buf[65536];
    hear(fd, buf, 4096, "\r\n\r\n");
    while (sent < total) {
        for (size_t i = 0; i < sizeof block; i++) block[i] = (unsigned char)((sent + i) * 2654435761u >> 13);
        size_t n = total - sent < sizeof block ? (size_t)(total - sent) : sizeof block, taken;
        assert_int_equal(lr_http_write(r, (char *)block, n, &taken, &err), 0);
        sent += taken;
        if (taken == n) continue;
        unsigned what = 0;
        full++;
        while (!(what & LR_HTTP_ROOM)) { /* nobody reads: no room comes until we do */
            ssize_t k = recv(fd, buf, sizeof buf, MSG_DONTWAIT);
            for (ssize_t i = 0; i < k; i++, got++)
                assert_int_equal((unsigned char)buf[i], (unsigned char)(got * 2654435761u >> 13));
            if (!wait_news(h, &what, 1)) what = 0;
        }
    }
    assert_true(full > 10);
    lr_http_end(r);
    for (ssize_t k; (k = recv(fd, buf, sizeof buf, 0)) > 0;) {
        for (ssize_t i = 0; i < k; i++, got++)
            assert_int_equal((unsigned char)buf[i], (unsigned char)(got * 2654435761u >> 13));
    }
    assert_int_equal(got, total);
    lr_http_req_free(r);
    close(fd);
    lr_http_free(h);
}

static void test_client_leaves(void **state)
{
    (void)state;
    lr_http *h = start(lr_http_defaults());
    for (int how = 0; how < 4; how++) {
        int fd = dial(h);
        size_t taken;
        unsigned what;
        say(fd, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
        lr_http_req *r = wait_new(h);
        if (how >= 2) { /* in the middle of a stream */
            assert_int_equal(lr_http_begin(r, 200, NULL, 0, &err), 0);
            assert_int_equal(lr_http_write(r, "x", 1, &taken, &err), 0);
            char buf[1024];
            hear(fd, buf, sizeof buf, "x\r\n");
        }
        assert_false(lr_http_req_gone(r));
        struct linger reset = {1, 0};
        if (how & 1) setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        close(fd);
        assert_ptr_equal(wait_news(h, &what, 5000), r);
        assert_int_equal(what, LR_HTTP_GONE);
        assert_true(lr_http_req_gone(r));
        if (how >= 2)
            assert_int_equal(lr_http_write(r, "x", 1, &taken, &err), LR_ECANCELLED);
        else
            assert_int_equal(lr_http_answer(r, 200, NULL, 0, LR_STR("x"), &err), LR_ECANCELLED);
        lr_http_req_free(r);
        wait_settled(h, 0, 0);
    }
    lr_http_stats s;
    lr_http_get_stats(h, &s);
    assert_int_equal(s.gone, 4);
    assert_int_equal(s.requests, 0);
    assert_int_equal(s.bodies, 0);
    lr_http_free(h);
}

/* Clients that end their sending half behind the request and wait: answered, at once or as a stream; one of HTTP/1.0
 * can't be told from one that has left; one that then leaves is seen, as is one that half-closes amid a stream. */
static void test_half_closed_clients(void **state)
{
    (void)state;
    static const char interim[] = "HTTP/1.1 100 Continue\r\n\r\n", text[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    enum { ONCE, STREAM, LEAVES, LEAVES_A_STREAM, AMID_A_STREAM, OLD, AT_ONCE, N_HOW };
    lr_http *h = start(lr_http_defaults());
    for (int how = 0; how < N_HOW; how++) {
        int fd = dial(h);
        char buf[1024];
        size_t taken;
        unsigned what;
        say(fd, how == OLD ? "GET / HTTP/1.0\r\n\r\n" : text);
        lr_http_req *r = wait_new(h);
        if (how == AMID_A_STREAM) assert_int_equal(lr_http_begin(r, 200, NULL, 0, &err), 0);
        if (how == AMID_A_STREAM) hear(fd, buf, sizeof buf, "\r\n\r\n");
        if (how == AT_ONCE) assert_int_equal(lr_http_answer(r, 200, NULL, 0, LR_STR("done\n"), &err), 0);
        shutdown(fd, SHUT_WR);
        if (how <= LEAVES_A_STREAM) {
            assert_null(wait_news(h, &what, 100));
            hear(fd, buf, sizeof buf, interim);
            assert_false(lr_http_req_gone(r));
        }
        if (how == ONCE) assert_int_equal(lr_http_answer(r, 200, NULL, 0, LR_STR("done\n"), &err), 0);
        if (how == STREAM || how == LEAVES_A_STREAM) {
            assert_int_equal(lr_http_begin(r, 200, NULL, 0, &err), 0);
            assert_int_equal(lr_http_write(r, "done\n", 5, &taken, &err), 0);
            hear(fd, buf, sizeof buf, "done\n\r\n");
        }
        if (how == STREAM) lr_http_end(r);
        if (how == ONCE || how == STREAM || how == AT_ONCE) {
            hear(fd, buf, sizeof buf, NULL);
            assert_non_null(strstr(buf, how == STREAM ? "0\r\n\r\n" : "done\n"));
            close(fd);
        } else {
            if (how == LEAVES || how == LEAVES_A_STREAM) close(fd);
            if (how == LEAVES_A_STREAM) assert_int_equal(lr_http_write(r, "x", 1, &taken, &err), 0);
            lr_http_req *left = NULL;
            for (int i = 0; i < 20 && !left; i++) left = wait_news(h, &what, 1000);
            assert_ptr_equal(left, r);
            assert_int_equal(what, LR_HTTP_GONE);
            if (how >= AMID_A_STREAM) close(fd);
        }
        lr_http_req_free(r);
        wait_settled(h, 0, 0);
    }
    lr_http_free(h);
}

/* What was sent and the end come in one segment: there is only one piece of news of both. */
static void test_half_requests(void **state)
{
    (void)state;
    static const char *const half[] = {"G", "GET / HTTP/1.1\r\nHost: x\r\n",
                                       "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc",
                                       "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"};
    lr_http *h = start(lr_http_defaults());
    lr_http_stats s = {0};
    int fds[8];
    for (int how = 0; how < 8; how++) {
        int on = 1;
        fds[how] = dial(h);
        setsockopt(fds[how], IPPROTO_TCP, TCP_CORK, &on, sizeof on);
        say(fds[how], half[how / 2]);
        if (how & 1)
            shutdown(fds[how], SHUT_WR);
        else
            close(fds[how]);
    }
    for (int i = 0; i < 500 && s.accepted < 8; i++) {
        nanosleep(&(struct timespec){0, 10000000}, NULL);
        lr_http_get_stats(h, &s);
    }
    assert_int_equal(s.accepted, 8);
    wait_settled(h, 0, 0);
    lr_http_get_stats(h, &s);
    assert_int_equal(s.bodies, 0);
    for (int how = 1; how < 8; how += 2) close(fds[how]);
    lr_http_free(h);
}

/* Bodies that come slowly while all places for requests are taken. */
static void test_slow_bodies_give_way(void **state)
{
    (void)state;
    lr_http_config c = lr_http_defaults();
    c.max_requests = 2;
    c.body_timeout = 8;
    lr_http *h = start(c);
    int fds[2], fd = dial(h);
    char buf[1024];
    for (int i = 0; i < 2; i++) {
        fds[i] = dial(h);
        say(fds[i], "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\na");
    }
    lr_http_stats s = {0};
    for (int i = 0; i < 500 && s.pending < 2; i++) {
        nanosleep(&(struct timespec){0, 10000000}, NULL);
        lr_http_get_stats(h, &s);
    }
    say(fd, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    hear(fd, buf, sizeof buf, NULL);
    assert_non_null(strstr(buf, "HTTP/1.1 503 "));
    close(fd);
    wait_settled(h, 0, 0);
    lr_http_get_stats(h, &s);
    assert_int_equal(s.slow, 2);
    for (int i = 0; i < 2; i++) close(fds[i]);
    lr_http_free(h);
}

static void test_unfinished_stream_is_cut(void **state)
{
    (void)state;
    lr_http *h = start(lr_http_defaults());
    int fd = dial(h);
    char buf[1024];
    size_t taken;
    say(fd, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    lr_http_req *r = wait_new(h);
    assert_int_equal(lr_http_begin(r, 200, NULL, 0, &err), 0);
    assert_int_equal(lr_http_write(r, "half", 4, &taken, &err), 0);
    hear(fd, buf, sizeof buf, "half\r\n");
    lr_http_req_free(r);
    hear(fd, buf, sizeof buf, NULL);
    assert_null(strstr(buf, "0\r\n\r\n"));
    close(fd);
    lr_http_free(h);
}

static void test_limits(void **state)
{
    (void)state;
    lr_http_config c = lr_http_defaults();
    c.max_requests = 2;
    c.max_body = 1000;
    lr_http *h = start(c);
    int fd[3];
    char buf[2048];
    lr_http_req *r[2];
    for (int i = 0; i < 2; i++) {
        fd[i] = dial(h);
        say(fd[i], "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
        r[i] = wait_new(h);
    }
    fd[2] = dial(h);
    say(fd[2], "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    hear(fd[2], buf, sizeof buf, NULL);
    assert_non_null(strstr(buf, "HTTP/1.1 503"));
    assert_non_null(strstr(buf, "Retry-After: 1\r\n"));
    close(fd[2]);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(lr_http_answer(r[i], 200, NULL, 0, LR_STR("ok"), &err), 0);
        lr_http_req_free(r[i]);
        hear(fd[i], buf, sizeof buf, "ok");
        close(fd[i]);
    }
    fd[0] = dial(h);
    say(fd[0], "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n");
    for (int i = 0; i < 1001; i++) say(fd[0], "x");
    hear(fd[0], buf, sizeof buf, NULL);
    assert_non_null(strstr(buf, "HTTP/1.1 413"));
    close(fd[0]);
    lr_http_free(h);
    c.max_header = 100;
    assert_int_equal(lr_http_new(&h, &c, &err), LR_EINVAL);
    c = lr_http_defaults();
    c.host = "no.such.host.invalid";
    assert_int_equal(lr_http_new(&h, &c, &err), LR_EIO);
    c.host = "127.0.0.1";
    c.port = 65536;
    assert_int_equal(lr_http_new(&h, &c, &err), LR_EINVAL);
}

static void test_drain(void **state)
{
    (void)state;
    lr_http *h = start(lr_http_defaults());
    int idle = dial(h), busy = dial(h), late;
    char buf[2048];
    say(idle, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    lr_http_req *r = wait_new(h);
    assert_int_equal(lr_http_answer(r, 200, NULL, 0, LR_STR("ok"), &err), 0);
    lr_http_req_free(r);
    hear(idle, buf, sizeof buf, "ok");
    say(busy, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    r = wait_new(h);
    lr_http_drain(h);
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons((uint16_t)lr_http_port(h))};
    inet_pton(AF_INET, "127.0.0.1", &sa.sin_addr);
    late = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_not_equal(connect(late, (struct sockaddr *)&sa, sizeof sa), 0);
    say(idle, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    hear(idle, buf, sizeof buf, NULL);
    assert_non_null(strstr(buf, "HTTP/1.1 503"));
    assert_int_equal(lr_http_answer(r, 200, NULL, 0, LR_STR("last"), &err), 0);
    lr_http_req_free(r);
    hear(busy, buf, sizeof buf, NULL);
    assert_non_null(strstr(buf, "HTTP/1.1 200"));
    assert_non_null(strstr(buf, "Connection: close"));
    assert_non_null(strstr(buf, "last"));
    close(idle), close(busy), close(late);
    lr_http_free(h);
}

static void test_free_with_work(void **state)
{
    (void)state;
    lr_http *h = start(lr_http_defaults());
    int fd[6];
    size_t taken;
    for (int i = 0; i < 6; i++) fd[i] = dial(h);
    say(fd[0], "GET /");                                                      /* in its line */
    say(fd[1], "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"); /* in its body */
    say(fd[2], "GET / HTTP/1.1\r\nHost: x\r\n\r\n");                          /* held by the owner */
    wait_new(h);
    say(fd[3], "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); /* a stream */
    lr_http_req *r = wait_new(h);
    assert_int_equal(lr_http_begin(r, 200, NULL, 0, &err), 0);
    assert_int_equal(lr_http_write(r, "x", 1, &taken, &err), 0);
    say(fd[4], "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); /* a stream that the owner has let go of */
    r = wait_new(h);
    assert_int_equal(lr_http_begin(r, 200, NULL, 0, &err), 0);
    lr_http_end(r);
    lr_http_req_free(r);
    say(fd[5], "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); /* perhaps in the queue */
    lr_http_free(h);
    for (int i = 0; i < 6; i++) close(fd[i]);
}

static void test_slow_clients(void **state)
{
    (void)state;
    lr_http_config c = lr_http_defaults();
    c.header_timeout = c.body_timeout = 1;
    lr_http *h = start(c);
    int a = dial(h), b = dial(h), ok = dial(h);
    char buf[1024];
    say(a, "GET / HTTP/1.1\r\n");
    say(b, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n");
    bool cut[2] = {false, false};
    for (int i = 0; i < 40 && !(cut[0] && cut[1]); i++) { /* a byte now and then, for 4 s at most */
        lr_http_poll(h);
        if (send(a, "X", 1, MSG_NOSIGNAL) < 0) cut[0] = true;
        if (i % 10 == 0 && send(b, "X", 1, MSG_NOSIGNAL) < 0) cut[1] = true;
        if (recv(a, buf, 1, MSG_DONTWAIT) == 0) cut[0] = true;
        if (recv(b, buf, 1, MSG_DONTWAIT) == 0) cut[1] = true;
        nanosleep(&(struct timespec){0, 100000000}, NULL);
    }
    assert_true(cut[0] && cut[1]);
    say(ok, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    lr_http_req *r = wait_new(h);
    lr_http_answer(r, 200, NULL, 0, LR_STR("ok"), &err);
    lr_http_req_free(r);
    hear(ok, buf, sizeof buf, "ok");
    lr_http_stats s;
    lr_http_get_stats(h, &s);
    assert_int_equal(s.slow, 2);
    close(a), close(b), close(ok);
    lr_http_free(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_request_and_answer),
        cmocka_unit_test(test_bad_answers),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_back_pressure),
        cmocka_unit_test(test_client_leaves),
        cmocka_unit_test(test_half_closed_clients),
        cmocka_unit_test(test_half_requests),
        cmocka_unit_test(test_slow_bodies_give_way),
        cmocka_unit_test(test_unfinished_stream_is_cut),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_drain),
        cmocka_unit_test(test_free_with_work),
        cmocka_unit_test(test_slow_clients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
