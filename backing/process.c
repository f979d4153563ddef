/* SPDX-License-Identifier: Apache-2.0
 *
 * What growpool knows of its process: how many forks lie between it and the one that loaded
 * growpool, and whether it is shutting down. Takes no lock.
 */
#include "backing_internal.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static _Atomic unsigned fork_generation;
static _Atomic bool exiting;
/* Both are written once, while growpool is loaded, before any other thread can call it. */
static bool handler_installed;
static pid_t loading_process;

static void count_fork(void)
{
    atomic_fetch_add_explicit(&fork_generation, 1, memory_order_relaxed);
}

__attribute__((constructor)) static void watch_forks(void)
{
    loading_process = getpid();
    handler_installed = pthread_atfork(NULL, NULL, count_fork) == 0;
}

unsigned gp__fork_generation(void)
{
    if (handler_installed) {
        return atomic_load_explicit(&fork_generation, memory_order_relaxed);
    }
    /* No memory for the handler at load time: a system call still tells a child from its parent. */
    return getpid() != loading_process;
}

bool gp__is_exiting(void)
{
    return atomic_load_explicit(&exiting, memory_order_acquire);
}

void gp_begin_exit(void)
{
    atomic_store_explicit(&exiting, true, memory_order_release);
}

gp_status gp__check_process(gp_error *error)
{
    if (gp__fork_generation() != 0) {
        return gp__state_error(error, GP_REASON_FORKED,
                               "this process was forked from the one that loaded growpool: use "
                               "growpool in the parent, or start children with spawn");
    }
    if (gp__is_exiting()) {
        return gp__state_error(error, GP_REASON_EXITING,
                               "the process is shutting down: growpool takes no more work");
    }
    return GP_OK;
}
