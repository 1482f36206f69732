/* test_newfile.c - files that are written whole or not at all, and maps whose file is made shorter. */
#define _GNU_SOURCE
#include "file/mapfile.h"
#include "file/newfile.h"
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

static char dir[] = "/tmp/llmrun-newfile-XXXXXX";
static char path[80];

static int setup(void **state)
{
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/file", dir);
    return 0;
}

static int teardown(void **state)
{
    remove(path);
    return rmdir(dir); /* fails if anything else was left */
}

static void expect(const char *want)
{
    char text[64] = {0};
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_true(fread(text, 1, sizeof text - 1, f) > 0);
    fclose(f);
    assert_string_equal(text, want);
}

static int entries(void)
{
    int n = -2;
    DIR *d = opendir(dir);
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

static void put(const char *text)
{
    lr_newfile f;
    lr_error err;
    if (lr_newfile_open(&f, path, 0640, &err)) fail_msg("%s", err.text);
    assert_int_equal(write(f.fd, text, strlen(text)), strlen(text));
    if (lr_newfile_finish(&f, &err)) fail_msg("%s", err.text);
}

static void test_whole_or_not(void **state)
{
    struct stat st;
    lr_newfile f;
    lr_error err;
    mode_t mask = umask(0);
    put("one");
    umask(mask);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0640);
    expect("one");
    put("two");
    expect("two");
    assert_int_equal(lr_newfile_open(&f, path, 0600, &err), 0);
    assert_int_equal(write(f.fd, "half", 4), 4);
    expect("two");
    lr_newfile_discard(&f);
    lr_newfile_discard(&f);
    expect("two");
    assert_int_equal(entries(), 1);
}

/* A process that is killed in the middle of writing leaves the old file, and nothing beside it where files without
 * names are to be had. */
static void test_killed(void **state)
{
    int ready[2];
    char c;
    put("old");
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        lr_newfile f;
        lr_error err;
        if (lr_newfile_open(&f, path, 0600, &err) || write(f.fd, "half", 4) != 4) _exit(1);
        (void)!write(ready[1], "x", 1);
        pause();
        _exit(1);
    }
    assert_int_equal(read(ready[0], &c, 1), 1);
    close(ready[0]);
    close(ready[1]);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    expect("old");
    int fd = open(dir, O_WRONLY | O_TMPFILE, 0600);
    if (fd >= 0) {
        close(fd);
        assert_int_equal(entries(), 1);
    }
}

static void test_refusals(void **state)
{
    lr_newfile f;
    lr_error err;
    assert_int_equal(lr_newfile_open(&f, "/nonexistent/x", 0600, &err), LR_ENOTFOUND);
    assert_int_equal(lr_newfile_open(&f, "/dev/null", 0600, &err), LR_EINVAL);
    assert_int_equal(lr_newfile_open(&f, dir, 0600, &err), LR_EINVAL);
    lr_newfile_discard(&f);
    assert_int_equal(lr_newfile_open(&f, path, 0600, &err), 0);
    unlink(path);
    assert_int_equal(mkdir(path, 0700), 0); /* its place is taken meanwhile */
    assert_int_equal(lr_newfile_finish(&f, &err), LR_EIO);
    assert_non_null(strstr(err.text, path));
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(entries(), 0);
}

/* A file of three pages, mapped. */
static size_t map_three(lr_mapfile *m)
{
    lr_error err;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *bytes = malloc(3 * page);
    memset(bytes, 'a', 3 * page);
    FILE *f = fopen(path, "wb");
    assert_int_equal(fwrite(bytes, 1, 3 * page, f), 3 * page);
    fclose(f);
    free(bytes);
    if (lr_mapfile_open(m, path, false, &err)) fail_msg("%s", err.text);
    return page;
}

static void test_file_made_shorter(void **state)
{
    lr_mapfile m, other;
    lr_error err;
    lr_mapfile_catch();
    size_t page = map_three(&m);
    if (lr_mapfile_open(&other, path, false, &err)) fail_msg("%s", err.text);
    assert_int_equal(lr_mapfile_intact(&m, &err), 0);
    assert_int_equal(truncate(path, (off_t)page), 0);
    assert_int_equal(m.base[0], 'a');
    assert_int_equal(lr_mapfile_intact(&m, &err), 0); /* nothing that is gone was touched */
    assert_int_equal(m.base[page + 7], 0);
    assert_int_equal(m.base[3 * page - 1], 0);
    assert_int_equal(m.base[0], 'a');
    assert_int_equal(lr_mapfile_intact(&m, &err), LR_EIO);
    assert_int_equal(lr_mapfile_unchanged(&m, &err), LR_EIO);
    assert_int_equal(lr_mapfile_intact(&other, &err), 0);
    lr_mapfile_close(&m);
    lr_mapfile_close(&other);
    map_three(&m); /* a new map in the same place is whole again */
    assert_int_equal(lr_mapfile_intact(&m, &err), 0);
    lr_mapfile_close(&m);
}

/* A bus error that is not about a model file ends the process as ever. */
static void test_other_bus_errors(void **state)
{
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGBUS, SIG_DFL);
        int fd = memfd_create("x", 0);
        if (ftruncate(fd, 4096) != 0) _exit(1);
        char *p = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
        lr_mapfile_catch();
        if (ftruncate(fd, 0) != 0) _exit(1);
        _exit(p[1]);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_or_not),      cmocka_unit_test(test_killed),
        cmocka_unit_test(test_refusals),          cmocka_unit_test(test_other_bus_errors),
        cmocka_unit_test(test_file_made_shorter),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
