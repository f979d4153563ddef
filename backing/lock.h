/* SPDX-License-Identifier: Apache-2.0
 *
 * Mutexes with ranks, and in test builds a witness that checks them.
 * A thread takes locks in strictly rising rank; it calls out (backing, Python, blocking driver call,
 * wait) holding none. The witness (GP_TESTING) keeps the ranks a thread holds and reports the first
 * breach to a handler; without it the wrappers are plain pthread calls.
 * In a forked child the wrappers do nothing. A latch is for the shortest sections and has a rank too.
 * One exception: the registry's lock is held while a device is opened, which keeps only other openers
 * waiting.
 *
 *   rank               lock                                       owner
 *   GP__RANK_REGISTRY  open devices                               backing/device.c
 *   GP__RANK_REAPER    the reaper thread's list of clients        sync/reaper.c
 *   GP__RANK_TIMELINES the list of timelines                      sync/capture.c
 *   GP__RANK_POOL      everything of one pool, timeline included  vmm/pool.h
 *   GP__RANK_QUICK     the quick list of one stream of a pool     vmm/quick.c
 *   GP__RANK_BACKING   a caching backing's kept chunks            backing/caching.c
 *   GP__RANK_STREAM    a host stream's queue                      backing/host_stream.c
 *   GP__RANK_DRIVER    a device implementation's own tables       host.c, cuda.c, sim.c
 */
#ifndef GP__LOCK_H
#define GP__LOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

enum gp__rank {
    GP__RANK_REGISTRY = 10,
    GP__RANK_REAPER = 20,
    GP__RANK_TIMELINES = 25,
    GP__RANK_POOL = 30,
    GP__RANK_QUICK = 35,
    GP__RANK_BACKING = 40,
    GP__RANK_STREAM = 50,
    GP__RANK_DRIVER = 60
};

struct gp__mutex {
    pthread_mutex_t native;
    enum gp__rank rank;
};

#define GP__MUTEX_INIT(rank_)                                                                      \
    {                                                                                              \
        PTHREAD_MUTEX_INITIALIZER, (rank_)                                                         \
    }

void gp__mutex_init(struct gp__mutex *mutex, enum gp__rank rank);
void gp__mutex_destroy(struct gp__mutex *mutex);
void gp__mutex_lock(struct gp__mutex *mutex);
void gp__mutex_unlock(struct gp__mutex *mutex);
/* A lock that is held for some dozen instructions, never over a call that is not inline: taking it costs one
 * atomic exchange and letting go of it a plain store, a third of what a mutex costs (and a pair of
 * malloc and free takes two). Who finds it taken spins a little, then sleeps in steps, so a holder that was
 * put off its processor gets on even if the one that waits has a higher priority. Zeroed: free. */
struct gp__latch {
    int taken; /* atomic */
};

void gp__latch_wait(struct gp__latch *latch); /* spins; on return it is taken */
static inline void gp__latch_take(struct gp__latch *latch)
{
    if (__atomic_exchange_n(&latch->taken, 1, __ATOMIC_ACQUIRE) != 0)
        gp__latch_wait(latch);
}
static inline void gp__latch_give(struct gp__latch *latch)
{
    __atomic_store_n(&latch->taken, 0, __ATOMIC_RELEASE);
}
#ifdef GP_TESTING
void gp__latch_lock(struct gp__latch *latch, enum gp__rank rank);
void gp__latch_unlock(struct gp__latch *latch, enum gp__rank rank);
#else
#define gp__latch_lock(latch, rank)   gp__latch_take(latch)
#define gp__latch_unlock(latch, rank) gp__latch_give(latch)
#endif

/* Sleeps until signalled or timeout_ns passed (CLOCK_MONOTONIC); the mutex is released meanwhile and
 * must be the only growpool lock held. `condition` must come from gp__condition_init(). */
void gp__condition_init(pthread_cond_t *condition);
void gp__condition_wait(pthread_cond_t *condition, struct gp__mutex *mutex, uint64_t timeout_ns);
/* Wakes everybody who sleeps there. */
void gp__condition_broadcast(pthread_cond_t *condition);

/* CLOCK_MONOTONIC in nanoseconds: what every timeout of the core is measured by. */
uint64_t gp__monotonic_ns(void);

/* Asserts that the calling thread holds no growpool lock: at the top of every call out (B2). */
void gp__assert_no_lock(void);
/* Asserts that it holds this one. */
void gp__assert_locked(const struct gp__mutex *mutex);

#ifdef GP_TESTING
/* Receives a sentence about a breach; the default handler aborts the test process. */
typedef void (*gp__witness_handler)(const char *message);
void gp__witness_set_handler(gp__witness_handler handler);
/* How often this process, a forked child, came to a lock: a call that is refused never does. */
unsigned long gp__witness_child_locks(void);
#endif

#endif
