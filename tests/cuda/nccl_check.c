/* nccl_check.c - the NCCL carrier on the GPUs of one machine, a thread each: nccl_check PLUGIN [DEVICES]
 *
 * Uneven gathers, a broadcast and a sum on 2 GPUs or more, compared with what they must give; then the time of a gather
 * of a decode step's size and of a prompt's. Prints one JSON object a line; a result that is wrong has "good":false and
 * gives exit status 1. With fewer than two GPUs it says so and ends well.
 */
#define _GNU_SOURCE
#include "base/device_comm.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 8, ROWS = 37 };

static const lr_device_carrier *carrier;
static int n_devices;
static pthread_barrier_t meet;
static char desk[4096]; /* where threads leave bytes for each other */
static int bad;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* What joining needs of a carrier between processes: these are threads. */
static int host_broadcast(lr_comm *c, void *data, size_t bytes, int root, lr_error *err)
{
    if (bytes > sizeof desk) return lr_fail(err, LR_EINVAL, "a message of %zu bytes", bytes);
    if (c->rank == root) memcpy(desk, data, bytes);
    pthread_barrier_wait(&meet);
    if (c->rank != root) memcpy(data, desk, bytes);
    pthread_barrier_wait(&meet);
    return 0;
}

static void stop(const char *what, const char *why)
{
    fprintf(stderr, "nccl_check: %s: %s\n", what, why);
    exit(1); /* the other threads would wait for ever */
}

static void cuda(cudaError_t e, const char *what)
{
    if (e) stop(what, cudaGetErrorString(e));
}

static void must(int rc, const lr_error *err, const char *what)
{
    if (rc) stop(what, err->text);
}

static void report(int rank, const char *what, int good)
{
    if (!good) __atomic_store_n(&bad, 1, __ATOMIC_RELAXED);
    if (rank == 0 || !good)
        printf("{\"what\":\"%s\",\"devices\":%d,\"rank\":%d,\"good\":%s}\n", what, n_devices, rank,
               good ? "true" : "false");
}

/* Rank r has r * 5 columns (rank 0 none) of ROWS rows. */
static void gather(lr_comm *c, float *dev_in, float *dev_out, float *host)
{
    lr_error err;
    int bytes[MOST], total = 0, good = 1;
    for (int r = 0; r < c->size; r++) {
        bytes[r] = ROWS * r * 5 * (int)sizeof(float);
        total += ROWS * r * 5;
    }
    for (int i = 0; i < ROWS * c->rank * 5; i++) host[i] = (float)(c->rank * 100000 + i);
    cuda(cudaMemcpy(dev_in, host, (size_t)bytes[c->rank], cudaMemcpyHostToDevice), "copy");
    must(c->ops->all_gather(c, dev_in, dev_out, bytes, &err), &err, "all_gather");
    must(c->ops->finish(c, &err), &err, "finish");
    cuda(cudaMemcpy(host, dev_out, (size_t)total * sizeof *host, cudaMemcpyDeviceToHost), "copy");
    for (int r = 0, at = 0; r < c->size; r++)
        for (int i = 0; i < ROWS * r * 5; i++) good = good && host[at++] == (float)(r * 100000 + i);
    report(c->rank, "all_gather", good);
}

static void others(lr_comm *c, float *dev, float *host)
{
    lr_error err;
    int good = 1, root = c->size - 1;
    for (int i = 0; i < 1000; i++) host[i] = (float)(c->rank + i);
    cuda(cudaMemcpy(dev, host, 4000, cudaMemcpyHostToDevice), "copy");
    must(c->ops->all_reduce(c, dev, 1000, &err), &err, "all_reduce");
    must(c->ops->finish(c, &err), &err, "finish");
    cuda(cudaMemcpy(host, dev, 4000, cudaMemcpyDeviceToHost), "copy");
    for (int i = 0; i < 1000; i++) good = good && host[i] == (float)(c->size * i + c->size * (c->size - 1) / 2);
    report(c->rank, "all_reduce", good);
    for (int i = 0; i < 1000; i++) host[i] = (float)(c->rank * 7 + i);
    cuda(cudaMemcpy(dev, host, 4000, cudaMemcpyHostToDevice), "copy");
    must(c->ops->broadcast(c, dev, 4000, root, &err), &err, "broadcast");
    must(c->ops->finish(c, &err), &err, "finish");
    cuda(cudaMemcpy(host, dev, 4000, cudaMemcpyDeviceToHost), "copy");
    good = 1;
    for (int i = 0; i < 1000; i++) good = good && host[i] == (float)(root * 7 + i);
    report(c->rank, "broadcast", good);
}

/* Llama 3 70B's widest gather, 28672 values a row, split evenly. */
static void times(lr_comm *c, float *dev_in, float *dev_out)
{
    static const int rows[] = {1, 64, 1024};
    lr_error err;
    for (int i = 0; i < 3; i++) {
        int bytes[MOST], n = rows[i] >= 1024 ? 20 : 200;
        for (int r = 0; r < c->size; r++) bytes[r] = rows[i] * (28672 / c->size) * (int)sizeof(float);
        double begin = 0;
        for (int k = -5; k < n; k++) {
            if (k == 0) {
                must(c->ops->finish(c, &err), &err, "finish");
                begin = now();
            }
            must(c->ops->all_gather(c, dev_in, dev_out, bytes, &err), &err, "all_gather");
        }
        must(c->ops->finish(c, &err), &err, "finish");
        double each = (now() - begin) / n, sent = (double)bytes[0] * (c->size - 1);
        if (c->rank == 0)
            printf("{\"what\":\"gather of %d rows\",\"devices\":%d,\"us\":%.1f,\"gb_s\":%.1f,\"good\":true}\n", rows[i],
                   c->size, each * 1e6, sent / each * 1e-9);
    }
}

static void *rank_main(void *arg)
{
    static const lr_comm_ops host_ops = {.name = "threads", .broadcast = host_broadcast};
    lr_comm host = {.ops = &host_ops, .rank = (int)(intptr_t)arg, .size = n_devices}, *c = NULL;
    size_t most = (size_t)1024 * 28672 * sizeof(float);
    float *in, *out, *mine = malloc(most);
    lr_error err;
    if (!mine) stop("memory", "there is none");
    cuda(cudaSetDevice(host.rank), "device");
    cuda(cudaMalloc((void **)&in, most), "memory");
    cuda(cudaMalloc((void **)&out, most), "memory");
    must(carrier->join(&host, host.rank, &c, &err), &err, "join");
    gather(c, in, out, mine);
    others(c, in, mine);
    times(c, in, out);
    c->ops->free(c);
    cudaFree(in);
    cudaFree(out);
    free(mine);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[MOST];
    void *so = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    lr_device_carrier_entry *entry = NULL;
    if (!so) stop("the carrier can't be opened", argc > 1 ? dlerror() : "usage: nccl_check PLUGIN [DEVICES]");
    *(void **)(&entry) = dlsym(so, "llmrun_device_comm");
    carrier = entry ? entry() : NULL;
    if (!carrier || strcmp(carrier->abi, LR_CARRIER_ABI) != 0) stop(argv[1], "no carrier of this build");
    if (cudaGetDeviceCount(&n_devices)) n_devices = 0;
    if (n_devices > MOST) n_devices = MOST;
    if (argc > 2 && atoi(argv[2]) < n_devices) n_devices = atoi(argv[2]);
    if (n_devices < 2) {
        printf("{\"what\":\"left out: %d GPU\",\"good\":true}\n", n_devices);
        return 0;
    }
    pthread_barrier_init(&meet, NULL, (unsigned)n_devices);
    for (int i = 0; i < n_devices; i++)
        if (pthread_create(&threads[i], NULL, rank_main, (void *)(intptr_t)i)) stop("a thread", "can't be made");
    for (int i = 0; i < n_devices; i++) pthread_join(threads[i], NULL);
    return bad;
}
