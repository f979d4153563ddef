/* SPDX-License-Identifier: Apache-2.0
 *
 * The gate, with atomics only: a fork may happen while any thread is inside it, and a lock held then
 * would stay locked in the child.
 */
#include "gate.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "../../backing/lock.h"
#include "../../sync/timeline.h"

static atomic_uint inside; /* threads that are in Python on behalf of C */
static atomic_bool ending;
static atomic_bool closed; /* implies `ending` */
static pthread_t closer; /* written before `ending` */
static _Thread_local unsigned depth;
static pthread_once_t once = PTHREAD_ONCE_INIT;

uint64_t ext_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* Of the threads that were inside, only the forking one exists in the child. If the parent was ending,
 * the child is not. */
static void after_fork_in_child(void)
{
    atomic_store(&closed, false);
    atomic_store(&ending, false);
    atomic_store(&inside, depth > 0 ? 1U : 0U);
}

/* A thread that Python did not start keeps one thread state from its first visit to its end: making and
 * deleting one for each visit is slow, and holds a lock of the interpreter that CPython 3.11 cannot
 * recover in a child forked meanwhile. */
static pthread_key_t visitor_key;

static void end_visitor(void *state)
{
    if (atomic_load(&closed) || !ext_gate_enter())
        return;
    PyEval_RestoreThread(state);
    PyThreadState_Clear(state);
    PyThreadState_DeleteCurrent();
    ext_gate_leave();
}

static void start(void)
{
    pthread_atfork(NULL, NULL, after_fork_in_child);
    pthread_key_create(&visitor_key, end_visitor);
}

static void park(void)
{
    for (;;)
        pause();
}

static void nap(void)
{
    const struct timespec moment = {0, 1000000};
    nanosleep(&moment, NULL);
}

/* CPython ends the process when it has no memory for a thread state. So the thread asks for as much
 * first, and more, and waits until there is some. */
static void wait_for_memory(void)
{
    void *room;
    while ((room = PyMem_RawMalloc(2 * sizeof(PyThreadState))) == NULL)
        nap();
    PyMem_RawFree(room);
}

/* Without memory for the key's value the thread makes and drops a state each time: slower, not wrong. */
static void keep_visitor(void)
{
    if (PyGILState_GetThisThreadState() != NULL)
        return;
    wait_for_memory();
    PyGILState_STATE gil = PyGILState_Ensure();
    if (pthread_setspecific(visitor_key, PyThreadState_Get()) == 0)
        (void)PyEval_SaveThread();
    else
        PyGILState_Release(gil);
}

bool ext_gate_enter(void)
{
    gp__assert_no_lock(); /* whoever has the interpreter may want it (P1) */
    /* A thread that is inside already was counted: stopping it here would stall the closer. */
    if (depth > 0) {
        depth++;
        return true;
    }
    pthread_once(&once, start);
    atomic_fetch_add(&inside, 1);
    if (!atomic_load(&closed)) {
        depth = 1;
        return true;
    }
    atomic_fetch_sub(&inside, 1);
    if (!pthread_equal(closer, pthread_self()))
        park();
    return false;
}

void ext_gate_leave(void)
{
    if (--depth == 0)
        atomic_fetch_sub(&inside, 1);
}

void ext_gate_begin_end(void)
{
    closer = pthread_self();
    atomic_store(&ending, true);
}

void ext_gate_park_if_ending(void)
{
    if (!atomic_load(&ending) || pthread_equal(closer, pthread_self()))
        return;
    (void)PyEval_SaveThread();
    if (depth > 0)
        atomic_fetch_sub(&inside, 1); /* it never leaves: nobody has to wait for it */
    park();
}

bool ext_gate_has_ended(void)
{
    if (!atomic_load(&closed))
        return false;
    ext_gate_park_if_ending();
    return true;
}

void ext_gate_close(uint64_t timeout_ns)
{
    if (atomic_exchange(&closed, true))
        return;
    uint64_t deadline =
        ext_now_ns() + (timeout_ns < EXT_GATE_LONGEST_NS ? timeout_ns : EXT_GATE_LONGEST_NS);
    unsigned own = depth > 0 ? 1U : 0U;
    while (atomic_load(&inside) > own && ext_now_ns() < deadline)
        nap();
}

bool ext_gate_is_closed(void)
{
    return atomic_load(&closed);
}

PyThreadState *ext_leave_python(void)
{
    return PyEval_SaveThread();
}

void ext_reenter_python(PyThreadState *saved)
{
    bool entered = ext_gate_enter();
    PyEval_RestoreThread(saved);
    if (entered)
        ext_gate_leave();
}

PyThreadState *ext_leave_to_free(void)
{
    return gp__thread_has_stream() && py_is_attached() ? ext_leave_python() : NULL;
}

void ext_return_from_free(PyThreadState *saved)
{
    if (saved != NULL)
        ext_reenter_python(saved);
}

bool ext_attach(struct ext_attached *attached)
{
    if (!ext_gate_enter())
        return false;
    keep_visitor();
    attached->gil = PyGILState_Ensure();
    attached->pending = py_take_exception();
    return true;
}

void ext_detach(struct ext_attached *attached)
{
    py_raise_exception(attached->pending);
    PyGILState_Release(attached->gil);
    ext_gate_leave();
}
