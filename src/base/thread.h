/* thread.h - a thread that works aside and ends by itself. */
#ifndef LR_BASE_THREAD_H
#define LR_BASE_THREAD_H
#include <pthread.h>
#include <signal.h>

/* Starts run(arg) on a thread that nobody joins. It takes no signals: the process's are for its other threads. 0, or
 * what pthread_create says. */
static inline int lr_thread_aside(void *(*run)(void *), void *arg)
{
    sigset_t all, before;
    pthread_t t;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int e = pthread_create(&t, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!e) pthread_detach(t);
    return e;
}

#endif
