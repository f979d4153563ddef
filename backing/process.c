/* SPDX-License-Identifier: Apache-2.0
 *
 * What growpool knows of its process: how many forks lie between it and the one that first used
 * growpool, and whether it is shutting down. Takes no lock.
 */
#include "backing_internal.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static _Atomic unsigned fork_generation;
static _Atomic bool exiting;
int gp__process_is_ready;
/* The process that first used growpool, or the one it was forked from; 0 while nobody has. */
static _Atomic pid_t first_user;
/* Written once, while growpool is loaded, before any other thread can call it. */
static bool handler_installed;

/* A child of a process that only loaded growpool inherits nothing and starts afresh. Whatever the
 * parent was ending is not the child's end. */
static void count_fork(void)
{
    if (atomic_load_explicit(&first_user, memory_order_relaxed) != 0) {
        atomic_fetch_add_explicit(&fork_generation, 1, memory_order_relaxed);
    }
    atomic_store_explicit(&exiting, false, memory_order_relaxed);
    __atomic_store_n(&gp__process_is_ready, 0, __ATOMIC_SEQ_CST);
}

__attribute__((constructor)) static void watch_forks(void)
{
    handler_installed = pthread_atfork(NULL, NULL, count_fork) == 0;
}

void gp__note_use(void)
{
    pid_t nobody = 0;
    if (atomic_load(&first_user) == 0) {
        (void)atomic_compare_exchange_strong(&first_user, &nobody, getpid());
    }
}

unsigned gp__fork_generation(void)
{
    if (handler_installed) {
        return atomic_load_explicit(&fork_generation, memory_order_relaxed);
    }
    /* No memory for the handler at load time: a system call still tells a child from its parent. */
    pid_t user = atomic_load_explicit(&first_user, memory_order_relaxed);
    return user != 0 && user != getpid();
}

bool gp__is_exiting(void)
{
    return atomic_load_explicit(&exiting, memory_order_acquire);
}

void gp_begin_exit(void)
{
    atomic_store(&exiting, true);
    __atomic_store_n(&gp__process_is_ready, 0, __ATOMIC_SEQ_CST);
}

/* From here on one look tells. Without the handler nothing would take that back in a child. An end that
 * begins just now, or a fork by a signal handler, is seen here or takes it back itself. */
static void become_ready(void)
{
    if (!handler_installed) {
        return;
    }
    __atomic_store_n(&gp__process_is_ready, 1, __ATOMIC_SEQ_CST);
    if (atomic_load(&exiting) || gp__fork_generation() != 0) {
        __atomic_store_n(&gp__process_is_ready, 0, __ATOMIC_SEQ_CST);
    }
}

gp_status gp__check_fork_closely(gp_error *error)
{
    if (gp__fork_generation() == 0) {
        return GP_OK;
    }
    return gp__state_error(
        error, GP_REASON_FORKED,
        "this process was forked from one that had used growpool, whose devices, "
        "locks and threads a child cannot use: start workers with \"spawn\" or "
        "\"forkserver\", or fork before the first use");
}

gp_status gp__check_process_closely(gp_error *error)
{
    gp__note_use(); /* first: what a fork finds unused no thread has a lock of */
    gp_status status = gp__check_fork_closely(error);
    if (status == GP_OK && gp__is_exiting()) {
        return gp__state_error(error, GP_REASON_EXITING,
                               "the process is shutting down: growpool takes no more work");
    }
    if (status == GP_OK) {
        become_ready();
    }
    return status;
}
