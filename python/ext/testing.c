/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool._core._testing, in test builds alone: switches and checks of the core itself for Python tests, on
 * whatever device. Those of the simulated device are in sim.c.
 */
#include "module.h"

#ifdef GROWPOOL_TESTING

#include <stdatomic.h>

#include "../../backing/lock.h"
#include "../../backing/memory.h"
#include "../../vmm/pool.h"
#include "gate.h"
#include "pool.h"

/* (whether the first request of every growth, of all pools, is refused) */
static PyObject *testing_emergency(PyObject *self, PyObject *enabled)
{
    (void)self;
    int wanted = PyObject_IsTrue(enabled);
    if (wanted < 0)
        return NULL;
    gp__set_emergency(wanted);
    Py_RETURN_NONE;
}

/* (True: growpool's own heap has no more memory; False: it has): how often it was asked since the last call */
static PyObject *testing_fail_memory(PyObject *self, PyObject *fail)
{
    (void)self;
    int wanted = PyObject_IsTrue(fail);
    if (wanted < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(gp__memory_fail_at(wanted ? 1 : 0, wanted));
}

/* (a Pool): "", or which of the core's invariants does not hold */
static PyObject *testing_check_pool(PyObject *self, PyObject *object)
{
    (void)self;
    char message[400] = "";
    struct module_state *state = ext_state_of_type(Py_TYPE(object));
    if (state == NULL || !Py_IS_TYPE(object, state->pool_type))
        return PyErr_Format(PyExc_TypeError, "a Pool expected, not %.200s",
                            Py_TYPE(object)->tp_name);
    gp_pool *pool = ((struct pool_object *)object)->pool;
    if (pool != NULL && !gp__pool_check(pool, message, sizeof(message)) && message[0] == '\0')
        return PyUnicode_FromString("an invariant does not hold");
    return PyUnicode_FromString(message);
}

/* () -> how often this process, a forked child, came to a lock of growpool's */
static PyObject *testing_child_locks(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    return PyLong_FromUnsignedLong(gp__witness_child_locks());
}

/* (): enters Python with a lock of growpool's held, which ends a test process */
static PyObject *testing_enter_under_a_lock(PyObject *self, PyObject *unused)
{
    struct gp__mutex mutex = GP__MUTEX_INIT(GP__RANK_POOL);
    (void)self;
    (void)unused;
    gp__mutex_lock(&mutex);
    ext_gate_enter();
    ext_gate_leave();
    gp__mutex_unlock(&mutex);
    Py_RETURN_NONE;
}

/* ---- Python's raw allocator, watched ---- */

static PyMemAllocatorEx
    raw; /* what was there before; the context goes unused, so nobody can find a wrong one */
static atomic_ulong detached_calls;

static void note_call(void)
{
    if (!PyGILState_Check())
        atomic_fetch_add(&detached_calls, 1);
}

static void *watched_malloc(void *unused, size_t size)
{
    (void)unused;
    note_call();
    return raw.malloc(raw.ctx, size);
}

static void *watched_calloc(void *unused, size_t count, size_t size)
{
    (void)unused;
    note_call();
    return raw.calloc(raw.ctx, count, size);
}

static void *watched_realloc(void *unused, void *pointer, size_t size)
{
    (void)unused;
    note_call();
    return raw.realloc(raw.ctx, pointer, size);
}

static void watched_free(void *unused, void *pointer)
{
    (void)unused;
    note_call();
    raw.free(raw.ctx, pointer);
}

/* () -> how often a thread without the GIL called Python's raw allocator, since the first time it was asked */
static PyObject *testing_detached_raw_calls(PyObject *self, PyObject *unused)
{
    static PyMemAllocatorEx watched = {NULL, watched_malloc, watched_calloc, watched_realloc,
                                       watched_free};
    (void)self;
    (void)unused;
    if (raw.malloc == NULL) {
        PyMem_GetAllocator(PYMEM_DOMAIN_RAW, &raw);
        PyMem_SetAllocator(PYMEM_DOMAIN_RAW, &watched);
    }
    return PyLong_FromUnsignedLong(atomic_load(&detached_calls));
}

static PyMethodDef testing_functions[] = {
    {"emergency", testing_emergency, METH_O, NULL},
    {"fail_memory", testing_fail_memory, METH_O, NULL},
    {"check_pool", testing_check_pool, METH_O, NULL},
    {"child_locks", testing_child_locks, METH_NOARGS, NULL},
    {"enter_under_a_lock", testing_enter_under_a_lock, METH_NOARGS, NULL},
    {"detached_raw_calls", testing_detached_raw_calls, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int ext_add_testing(PyObject *module)
{
    PyObject *testing = PyModule_New("growpool._core._testing");
    int result = testing == NULL ? -1 : PyModule_AddFunctions(testing, testing_functions);
    if (result == 0)
        result = PyModule_AddObjectRef(module, "_testing", testing);
    Py_XDECREF(testing);
    return result;
}

#endif
