/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranked mutexes over pthread, and the witness that keeps each thread's held ranks in test builds.
 * Without GP_TESTING nothing is remembered and nothing is checked.
 */
#include "lock.h"

#include "driver.h"

#include <time.h>

#define NANOSECONDS_PER_SECOND UINT64_C(1000000000)

/* gp__is_forked_child(): a forked child has the locks as they were: some taken, by threads that it does not
 * have. The one thread that it has gets here only on the way out of a call that was under way when it forked
 * (any other call was refused), and needs no lock against anybody. */

#ifdef GP_TESTING
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define HELD_CAPACITY 16 /* more than there are ranks, so that breaches can be counted too */

static _Thread_local struct {
    const void *lock;
    enum gp__rank rank;
} held[HELD_CAPACITY];
static _Thread_local unsigned held_count;
static _Atomic unsigned long child_locks;

unsigned long gp__witness_child_locks(void)
{
    return atomic_load(&child_locks);
}

static void witness_child(void)
{
    atomic_fetch_add(&child_locks, 1);
}

static void print_and_abort(const char *message)
{
    fprintf(stderr, "lock witness: %s\n", message);
    abort();
}

static _Atomic gp__witness_handler breach_handler = print_and_abort;

void gp__witness_set_handler(gp__witness_handler handler)
{
    atomic_store(&breach_handler, handler != NULL ? handler : print_and_abort);
}

__attribute__((format(printf, 1, 2))) static void report(const char *format, ...)
{
    char message[160];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    atomic_load (&breach_handler)(message);
}

static bool is_held(const void *lock)
{
    for (unsigned i = 0; i < held_count; i++) {
        if (held[i].lock == lock) {
            return true;
        }
    }
    return false;
}

/* Runs before the lock is taken: a thread that is about to deadlock still reports why. */
static void witness_before_lock(enum gp__rank rank)
{
    for (unsigned i = 0; i < held_count; i++) {
        if (held[i].rank >= rank) {
            report("taking rank %d while holding rank %d: ranks must rise", (int)rank,
                   (int)held[i].rank);
            return;
        }
    }
}

static void witness_locked(const void *lock, enum gp__rank rank)
{
    if (held_count == HELD_CAPACITY) {
        report("a thread holds more than %d locks", HELD_CAPACITY);
        return;
    }
    held[held_count].lock = lock;
    held[held_count++].rank = rank;
}

static void witness_unlocked(const void *lock, enum gp__rank rank)
{
    unsigned at = 0;
    while (at < held_count && held[at].lock != lock) {
        at++;
    }
    if (at == held_count) {
        report("unlocking rank %d, which this thread does not hold", (int)rank);
        return;
    }
    for (held_count--; at < held_count; at++) {
        held[at] = held[at + 1];
    }
}

static void witness_wait(const struct gp__mutex *mutex)
{
    if (held_count != 1 || held[0].lock != mutex) {
        report("waiting with rank %d while holding %u locks: it must be the only one",
               (int)mutex->rank, held_count);
    }
}

void gp__assert_no_lock(void)
{
    if (held_count != 0 && !gp__is_forked_child()) {
        report("calling out while holding rank %d", (int)held[held_count - 1].rank);
    }
}

void gp__assert_locked(const struct gp__mutex *mutex)
{
    if (!is_held(mutex) && !gp__is_forked_child()) {
        report("a function that needs rank %d was called without it", (int)mutex->rank);
    }
}
#else
static inline void witness_child(void)
{
}

static inline void witness_before_lock(enum gp__rank rank)
{
    (void)rank;
}

static inline void witness_locked(const void *lock, enum gp__rank rank)
{
    (void)lock;
    (void)rank;
}

static inline void witness_unlocked(const void *lock, enum gp__rank rank)
{
    (void)lock;
    (void)rank;
}

static inline void witness_wait(const struct gp__mutex *mutex)
{
    (void)mutex;
}

void gp__assert_no_lock(void)
{
}

void gp__assert_locked(const struct gp__mutex *mutex)
{
    (void)mutex;
}
#endif

void gp__mutex_init(struct gp__mutex *mutex, enum gp__rank rank)
{
    (void)pthread_mutex_init(&mutex->native, NULL);
    mutex->rank = rank;
}

void gp__mutex_destroy(struct gp__mutex *mutex)
{
    (void)pthread_mutex_destroy(&mutex->native);
}

void gp__mutex_lock(struct gp__mutex *mutex)
{
    if (gp__is_forked_child()) {
        witness_child();
        return;
    }
    witness_before_lock(mutex->rank);
    (void)pthread_mutex_lock(&mutex->native);
    witness_locked(mutex, mutex->rank);
}

void gp__mutex_unlock(struct gp__mutex *mutex)
{
    if (gp__is_forked_child()) {
        return;
    }
    witness_unlocked(mutex, mutex->rank);
    (void)pthread_mutex_unlock(&mutex->native);
}

/* ---- latches ------------------------------------------------------------------------------------ */

#define LATCH_SPINS    100
#define LATCH_SLEEP_NS 50000

/* Whoever holds it was put off the processor, or is many. */
void gp__latch_wait(struct gp__latch *latch)
{
    const struct timespec pause = {0, LATCH_SLEEP_NS};
    for (int spins = 0; !gp__is_forked_child(); spins++) {
        if (__atomic_load_n(&latch->taken, __ATOMIC_RELAXED) == 0 &&
            __atomic_exchange_n(&latch->taken, 1, __ATOMIC_ACQUIRE) == 0) {
            return;
        }
        if (spins >= LATCH_SPINS) {
            (void)nanosleep(&pause, NULL);
        }
    }
}

#ifdef GP_TESTING
void gp__latch_lock(struct gp__latch *latch, enum gp__rank rank)
{
    witness_before_lock(rank);
    gp__latch_take(latch);
    witness_locked(latch, rank);
}

void gp__latch_unlock(struct gp__latch *latch, enum gp__rank rank)
{
    witness_unlocked(latch, rank);
    gp__latch_give(latch);
}
#endif

/* ---- conditions --------------------------------------------------------------------------------- */

void gp__condition_init(pthread_cond_t *condition)
{
    /* The wall clock can be set back, and a wait bounded by it would then last too long. */
    pthread_condattr_t attributes;
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(condition, &attributes);
    (void)pthread_condattr_destroy(&attributes);
}

static struct timespec deadline_after(uint64_t timeout_ns)
{
    struct timespec deadline;
    (void)clock_gettime(CLOCK_MONOTONIC, &deadline);
    uint64_t nanoseconds = (uint64_t)deadline.tv_nsec + timeout_ns % NANOSECONDS_PER_SECOND;
    uint64_t seconds = timeout_ns / NANOSECONDS_PER_SECOND + nanoseconds / NANOSECONDS_PER_SECOND;
    deadline.tv_sec += (time_t)seconds;
    deadline.tv_nsec = (long)(nanoseconds % NANOSECONDS_PER_SECOND);
    return deadline;
}

uint64_t gp__monotonic_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NANOSECONDS_PER_SECOND + (uint64_t)now.tv_nsec;
}

void gp__condition_wait(pthread_cond_t *condition, struct gp__mutex *mutex, uint64_t timeout_ns)
{
    if (gp__is_forked_child()) {
        return; /* nobody is left to signal */
    }
    witness_wait(mutex);
    if (timeout_ns == UINT64_MAX) {
        (void)pthread_cond_wait(condition, &mutex->native);
        return;
    }
    struct timespec deadline = deadline_after(timeout_ns);
    (void)pthread_cond_timedwait(condition, &mutex->native, &deadline);
}

void gp__condition_broadcast(pthread_cond_t *condition)
{
    if (gp__is_forked_child()) {
        return; /* the C library would wait for sleepers that are not here */
    }
    (void)pthread_cond_broadcast(condition);
}
