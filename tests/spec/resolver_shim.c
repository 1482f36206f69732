/* resolver_shim.c - preloaded into a program, looks up names as a name server that never answers would; and what Ctrl-C
 * sends the process, the thread that waits for it gets, as any that does not keep it out may. */
#define _GNU_SOURCE
#include <netdb.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **list)
{
    (void)node, (void)service, (void)hints, (void)list;
    if (getenv("RESOLVER_SHIM_INTERRUPTS")) {
        usleep(200000); /* until the others sleep */
        pthread_kill(pthread_self(), SIGINT);
    }
    for (int i = 0; i < 600; i++) usleep(1000000);
    return EAI_AGAIN;
}
