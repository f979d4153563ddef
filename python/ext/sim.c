/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool._core._sim, in test builds alone: the simulated device's switches for Python tests. The first
 * argument of each function is N of "sim:N".
 */
#include "sim.h"

#include "module.h"

#ifdef GROWPOOL_TESTING

#include "../../tests/support/sim.h"
#include "../../vmm/pool.h"
#include "errors.h"

/* The simulated device of an ordinal, opened if need be; NULL with an exception. */
static gp__sim *sim_of(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t wanted)
{
    if (nargs != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments expected, %zd given", wanted, nargs);
        return NULL;
    }
    int ordinal = (int)PyLong_AsLong(args[0]);
    if (ordinal == -1 && PyErr_Occurred())
        return NULL;
    gp_device *device;
    gp_error error = {0};
    if (gp_device_open(GP_DEVICE_SIM, ordinal, &device, &error) == GP_OK)
        return gp__sim_of(device);
    PyErr_SetString(PyExc_RuntimeError, error.message);
    return NULL;
}

/* args[index] as a number; -1 with an exception is told by PyErr_Occurred(). */
static size_t number(PyObject *const *args, Py_ssize_t index)
{
    return PyLong_AsSize_t(args[index]);
}

static PyObject *none_unless_raised(void)
{
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *sim_stream_create(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    int blocking = sim != NULL ? PyObject_IsTrue(args[1]) : -1;
    if (blocking < 0)
        return NULL;
    return PyLong_FromSize_t(gp__sim_stream_create(sim, blocking ? GP__SIM_STREAM_BLOCKING : 0));
}

static PyObject *sim_stream_destroy(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    size_t handle = sim != NULL ? number(args, 1) : 0;
    if (sim != NULL && !PyErr_Occurred())
        gp__sim_stream_destroy(sim, handle);
    return none_unless_raised();
}

/* (ordinal, stream, address, bytes) */
static PyObject *sim_launch(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 4);
    if (sim == NULL)
        return NULL;
    size_t handle = number(args, 1), address = number(args, 2), bytes = number(args, 3);
    if (!PyErr_Occurred())
        gp__sim_launch(sim, handle, address, bytes);
    return none_unless_raised();
}

/* (ordinal, ordinal of the device that does the work, stream, address, bytes) */
static PyObject *sim_launch_from(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 5);
    gp__sim *from = sim != NULL ? sim_of(args + 1, 1, 1) : NULL;
    if (from == NULL)
        return NULL;
    size_t handle = number(args, 2), address = number(args, 3), bytes = number(args, 4);
    if (!PyErr_Occurred())
        gp__sim_launch_from(sim, gp__sim_device(from), handle, address, bytes);
    return none_unless_raised();
}

/* (ordinal, whether other devices can reach its memory) */
static PyObject *sim_set_peers(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    int reachable = sim != NULL ? PyObject_IsTrue(args[1]) : -1;
    if (reachable >= 0)
        gp__sim_set_peers(sim, reachable);
    return none_unless_raised();
}

/* (ordinal, enum gp__sim_rdma) */
static PyObject *sim_set_rdma(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    size_t rdma = sim != NULL ? number(args, 1) : 0;
    if (sim != NULL && !PyErr_Occurred())
        gp__sim_set_rdma(sim, (enum gp__sim_rdma)rdma);
    return none_unless_raised();
}

/* (ordinal, whether it shares memory by descriptor) */
static PyObject *sim_set_sharing(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    int supported = sim != NULL ? PyObject_IsTrue(args[1]) : -1;
    if (supported >= 0)
        gp__sim_set_sharing(sim, supported);
    return none_unless_raised();
}

/* (ordinal, stream, count) */
static PyObject *sim_complete(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 3);
    if (sim == NULL)
        return NULL;
    size_t handle = number(args, 1), count = number(args, 2);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(gp__sim_complete(sim, handle, count));
}

static PyObject *sim_complete_all(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    if (sim != NULL)
        gp__sim_complete_all(sim);
    return none_unless_raised();
}

static PyObject *sim_pending_all(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    return sim != NULL ? PyLong_FromSize_t(gp__sim_pending_all(sim)) : NULL;
}

/* (ordinal): work without fences and waits for them */
static PyObject *sim_work_all(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    return sim != NULL ? PyLong_FromSize_t(gp__sim_work_all(sim)) : NULL;
}

/* (ordinal, True: a wait lets the device run; False: it times out; 2: a query lets it run too) */
static PyObject *sim_set_wait_completes(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    static const enum gp__sim_wait_mode modes[] = {GP__SIM_WAIT_TIMES_OUT, GP__SIM_WAIT_COMPLETES,
                                                   GP__SIM_QUERY_COMPLETES};
    long mode = sim != NULL ? PyLong_AsLong(args[1]) : -1;
    if (mode >= 0 && mode <= 2)
        gp__sim_set_wait_mode(sim, modes[mode]);
    return none_unless_raised();
}

/* (ordinal, stream, 0 global, 1 thread-local, 2 relaxed) */
static PyObject *sim_capture_begin(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 3);
    if (sim == NULL)
        return NULL;
    size_t handle = number(args, 1), mode = number(args, 2);
    if (!PyErr_Occurred())
        gp__sim_capture_begin(sim, handle, (enum gp__sim_capture_mode)mode);
    return none_unless_raised();
}

/* (ordinal, stream): the graph, to be destroyed, or 0 when the capture was invalidated */
static PyObject *sim_capture_end_graph(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    size_t handle = sim != NULL ? number(args, 1) : 0;
    if (sim == NULL || PyErr_Occurred())
        return NULL;
    return PyLong_FromVoidPtr(gp__sim_capture_end_graph(sim, handle));
}

/* (ordinal, graph, stream) */
static PyObject *sim_graph_launch(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 3);
    void *graph = sim != NULL ? PyLong_AsVoidPtr(args[1]) : NULL;
    size_t handle = graph != NULL ? number(args, 2) : 0;
    if (graph != NULL && !PyErr_Occurred())
        gp__sim_graph_launch(sim, graph, handle);
    return none_unless_raised();
}

/* (ordinal, graph) */
static PyObject *sim_graph_destroy(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    void *graph = sim != NULL ? PyLong_AsVoidPtr(args[1]) : NULL;
    if (graph != NULL)
        gp__sim_graph_destroy(sim, graph);
    return none_unless_raised();
}

static PyObject *sim_capture_end(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    size_t handle = sim != NULL ? number(args, 1) : 0;
    if (sim == NULL || PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(gp__sim_capture_end(sim, handle));
}

static PyObject *sim_kill_context(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    if (sim != NULL)
        gp__sim_kill_context(sim);
    return none_unless_raised();
}

/* (ordinal, n, forever) */
static PyObject *sim_fail_at(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 3);
    if (sim == NULL)
        return NULL;
    size_t fail_at = number(args, 1);
    int forever = PyObject_IsTrue(args[2]);
    if (!PyErr_Occurred())
        gp__sim_fail_at(sim, fail_at, forever > 0);
    return none_unless_raised();
}

/* (calls counted since fail_at, how many of them failed, the last one's name) */
static PyObject *sim_faults(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    if (sim == NULL)
        return NULL;
    return Py_BuildValue("KKs", (unsigned long long)gp__sim_fault_calls(sim),
                         (unsigned long long)gp__sim_faults_fired(sim), gp__sim_fault_name(sim));
}

static PyObject *sim_set_memory(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    size_t bytes = sim != NULL ? number(args, 1) : 0;
    if (sim != NULL && !PyErr_Occurred())
        gp__sim_set_memory(sim, bytes);
    return none_unless_raised();
}

static PyObject *sim_ledger(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    if (sim == NULL)
        return NULL;
    struct gp__sim_ledger ledger;
    gp__sim_get_ledger(sim, &ledger);
    return Py_BuildValue(
        "{snsnsnsnsnsnsnsnsnsK}", "reservation_count", (Py_ssize_t)ledger.reservation_count,
        "reserved_bytes", (Py_ssize_t)ledger.reserved_bytes, "chunk_count",
        (Py_ssize_t)ledger.chunk_count, "physical_bytes", (Py_ssize_t)ledger.physical_bytes,
        "unreleased_count", (Py_ssize_t)ledger.unreleased_count, "mapping_count",
        (Py_ssize_t)ledger.mapping_count, "mapped_bytes", (Py_ssize_t)ledger.mapped_bytes,
        "event_count", (Py_ssize_t)ledger.event_count, "entered", (Py_ssize_t)ledger.entered,
        "calls", (unsigned long long)ledger.calls);
}

static PyObject *sim_violations(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    if (sim == NULL)
        return NULL;
    return Py_BuildValue("Ks", (unsigned long long)gp__sim_violations(sim),
                         gp__sim_violation_text(sim));
}

static void count_violation(void *context, const char *message)
{
    (void)context;
    (void)message;
}

/* (ordinal, True: count violations; False: print and abort, the default) */
static PyObject *sim_count_violations(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    int count = sim != NULL ? PyObject_IsTrue(args[1]) : -1;
    if (count >= 0)
        gp__sim_on_violation(sim, count ? count_violation : NULL, NULL);
    return none_unless_raised();
}

static PyObject *sim_log(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    PyObject *list = sim != NULL ? PyList_New(0) : NULL;
    for (size_t i = 0; list != NULL && i < gp__sim_log_count(sim); i++) {
        PyObject *line = PyUnicode_FromString(gp__sim_log_line(sim, i));
        if (line == NULL || PyList_Append(list, line) < 0)
            Py_CLEAR(list);
        Py_XDECREF(line);
    }
    return list;
}

/* (ordinal, name of a driver call that is made without the interpreter) */
static PyObject *sim_stop_at(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 2);
    const char *call = sim != NULL ? PyUnicode_AsUTF8(args[1]) : NULL;
    if (call != NULL)
        ext_sim_stop_at(sim, call);
    return none_unless_raised();
}

/* (ordinal): whether a thread stands where stop_at said */
static PyObject *sim_is_stopped(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    return sim != NULL ? PyBool_FromLong(ext_sim_is_stopped()) : NULL;
}

/* (ordinal): lets it go on; whether one stood there */
static PyObject *sim_go_on(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    return sim != NULL ? PyBool_FromLong(ext_sim_go_on()) : NULL;
}

/* (ordinal): makes a call that may block with the interpreter held, which is a violation */
static PyObject *sim_call_attached(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    size_t available, total;
    if (sim != NULL)
        (void)gp_device_memory(gp__sim_device(sim), &available, &total, NULL);
    return none_unless_raised();
}

/* (ordinal): the count starts anew */
static PyObject *sim_forget_violations(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    if (sim != NULL)
        gp__sim_forget_violations(sim);
    return none_unless_raised();
}

/* (ordinal): whether this device's context is current on the calling thread; None when no device's is.
 * Where one is, the thread's capture mode is relaxed. */
static PyObject *sim_is_current(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    if (sim == NULL)
        return NULL;
    if (gp__sim_current() == NULL)
        Py_RETURN_NONE;
    return PyBool_FromLong(gp__sim_current() == sim);
}

/* (ordinal): pools of the device that nobody holds and that only an explicit call can close */
static PyObject *sim_left_pools(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    gp__sim *sim = sim_of(args, nargs, 1);
    return sim != NULL ? PyLong_FromSize_t(gp__orphans_left(gp__sim_device(sim))) : NULL;
}

#define FUNCTION(name_)                                                                            \
    {                                                                                              \
#name_, (PyCFunction)(void (*)(void))sim_##name_, METH_FASTCALL, NULL                      \
    }

static PyMethodDef sim_functions[] = {
    FUNCTION(stream_create),
    FUNCTION(stream_destroy),
    FUNCTION(launch),
    FUNCTION(launch_from),
    FUNCTION(set_peers),
    FUNCTION(set_rdma),
    FUNCTION(set_sharing),
    FUNCTION(complete),
    FUNCTION(complete_all),
    FUNCTION(pending_all),
    FUNCTION(work_all),
    FUNCTION(set_wait_completes),
    FUNCTION(capture_begin),
    FUNCTION(capture_end),
    FUNCTION(capture_end_graph),
    FUNCTION(graph_launch),
    FUNCTION(graph_destroy),
    FUNCTION(kill_context),
    FUNCTION(fail_at),
    FUNCTION(faults),
    FUNCTION(set_memory),
    FUNCTION(ledger),
    FUNCTION(violations),
    FUNCTION(count_violations),
    FUNCTION(log),
    FUNCTION(stop_at),
    FUNCTION(is_stopped),
    FUNCTION(go_on),
    FUNCTION(is_current),
    FUNCTION(call_attached),
    FUNCTION(forget_violations),
    FUNCTION(left_pools),
    {NULL, NULL, 0, NULL},
};

int ext_add_sim(PyObject *module, struct module_state *state)
{
    (void)state;
    gp__sim_register();
    ext_sim_watch_blocking_calls();
    PyObject *sim = PyModule_New("growpool._core._sim");
    int result = sim == NULL ? -1 : PyModule_AddFunctions(sim, sim_functions);
    if (result == 0)
        result = PyModule_AddObjectRef(module, "_sim", sim);
    Py_XDECREF(sim);
    return result;
}

#endif
