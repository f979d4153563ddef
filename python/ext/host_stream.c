/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.host.Stream: Python callables run in order by a worker thread. It owns the callables until
 * they ran; it knows nothing of pools.
 */
#include "host_stream.h"

#include "../../backing/host_stream.h"
#include "args.h"
#include "call.h"
#include "errors.h"
#include "gate.h"

#include <stdbool.h>
#include <time.h>

#define WAIT_SLICE_NS UINT64_C(20000000) /* between looks at signals */

/* Guarded by the GIL. */
struct host_stream_object {
    PyObject_HEAD gp_host_stream *stream; /* NULL once closed and no thread waits on it */
    uint64_t id;
    bool closed;
    unsigned waiters; /* threads inside gp_host_stream_wait() */
    uint64_t submitted; /* tasks */
    uint64_t done; /* tasks whose callable returned */
    PyObject *exception; /* the first that was not raised yet */
    PyObject *weak_references;
};

struct task {
    PyObject *callable;
    struct host_stream_object *stream;
};

static _Thread_local struct host_stream_object *running; /* on a worker thread */

int ext_host_stream_handle(PyObject *object, uintptr_t *handle)
{
    struct host_stream_object *self = (struct host_stream_object *)object;
    if (self->closed) {
        PyErr_SetString(PyExc_ValueError, "the growpool.host.Stream is closed");
        return -1;
    }
    *handle = (uintptr_t)self->id;
    return 0;
}

bool ext_host_stream_is_closed(PyObject *object, uintptr_t *id)
{
    struct host_stream_object *self = (struct host_stream_object *)object;
    *id = (uintptr_t)self->id;
    return self->closed;
}

bool ext_host_stream_is_current(uint64_t id)
{
    return running != NULL && running->id == id;
}

/* ---- work ----------------------------------------------------------------------------------- */

/* On the worker thread. After the gate closed it is parked and does not come back. */
static void run_task(void *context)
{
    struct task *task = context;
    struct host_stream_object *self = task->stream;
    struct ext_attached attached;
    if (!ext_attach(&attached))
        return;
    running = self;
    PyObject *result = PyObject_CallNoArgs(task->callable);
    running = NULL;
    self->done++;
    Py_XDECREF(result);
    if (result == NULL && self->exception == NULL)
        self->exception = py_take_exception();
    else if (result == NULL)
        PyErr_WriteUnraisable(task->callable);
    Py_DECREF(task->callable);
    PyMem_RawFree(task);
    Py_DECREF(self);
    ext_detach(&attached);
}

PyDoc_STRVAR(
    submit_doc,
    "submit($self, function, /)\n--\n\n"
    "Run function() on the worker thread, after everything submitted before.\n\n"
    "Parameters\n----------\n"
    "function : callable\n"
    "    Takes nothing; its result is dropped. An exception is raised by the next "
    "synchronize().\n\n"
    "Raises\n------\n"
    "PoolStateError\n    The stream is closed, or this process is a fork of the one that made it.\n"
    "TypeError\n    Not callable.\n\n"
    "Notes\n-----\nAny thread.");

static PyObject *host_stream_submit(struct host_stream_object *self, PyObject *function)
{
    struct module_state *state = ext_state((PyObject *)self);
    if (!PyCallable_Check(function))
        return PyErr_Format(PyExc_TypeError, "submit() needs a callable, not %.200s",
                            Py_TYPE(function)->tp_name);
    if (self->closed) {
        ext_raise_closed(state, "the growpool.host.Stream");
        return NULL;
    }
    struct task *task = PyMem_RawMalloc(sizeof(*task));
    if (task == NULL)
        return PyErr_NoMemory();
    task->callable = Py_NewRef(function);
    task->stream = (struct host_stream_object *)Py_NewRef(self);
    gp_error error = {0};
    gp_status status = gp_host_stream_submit(self->stream, run_task, task, &error);
    if (status == GP_OK) {
        self->submitted++;
        Py_RETURN_NONE;
    }
    PyMem_RawFree(task);
    Py_DECREF(function);
    Py_DECREF(self);
    ext_raise(state, status, &error, NULL);
    return NULL;
}

/* One slice of a wait, detached. The last waiter of a closed stream lets go of it. */
static gp_status wait_a_slice(struct host_stream_object *self)
{
    self->waiters++;
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_host_stream_wait(self->stream, WAIT_SLICE_NS);
    ext_reenter_python(saved);
    self->waiters--;
    if (self->closed && self->waiters == 0) {
        gp_host_stream_close(self->stream);
        self->stream = NULL;
    }
    return status;
}

static void sleep_a_moment(void)
{
    const struct timespec moment = {0, 1000000};
    PyThreadState *saved = ext_leave_python();
    nanosleep(&moment, NULL);
    ext_reenter_python(saved);
}

/* Until all work that was submitted before the call is done. When a later task is done as well, the
 * earlier ones are behind the stream for certain, so new work cannot prolong the wait. A closed stream
 * can only be asked how many tasks returned. */
static int wait_for_work(struct host_stream_object *self)
{
    uint64_t target = self->submitted;
    while (self->stream != NULL ? self->done <= target : self->done < target) {
        gp_status status = GP_NOT_READY;
        if (self->stream == NULL)
            sleep_a_moment();
        else
            status = wait_a_slice(self);
        if (status == GP_OK)
            return 0;
        if (status != GP_NOT_READY) {
            gp_error error = {0};
            gp_error_set(&error, status, "the stream's worker is not in this forked process");
            error.reason = GP_REASON_FORKED;
            ext_raise(ext_state((PyObject *)self), status, &error, NULL);
            return -1;
        }
        if (PyErr_CheckSignals() < 0)
            return -1;
    }
    return 0;
}

PyDoc_STRVAR(
    synchronize_doc,
    "synchronize($self, /)\n--\n\n"
    "Wait until everything submitted before is done.\n\n"
    "Raises\n------\n"
    "BaseException\n    What a submitted callable raised first since the last call, unchanged.\n"
    "RuntimeError\n    Called on the stream's own worker thread.\n\n"
    "Notes\n-----\n"
    "Any other thread. Detached from the interpreter while it waits; signals are noticed.");

static PyObject *host_stream_synchronize(struct host_stream_object *self, PyObject *unused)
{
    (void)unused;
    if (running == self) {
        PyErr_SetString(PyExc_RuntimeError,
                        "synchronize() on the stream's own worker would wait for itself");
        return NULL;
    }
    if (wait_for_work(self) < 0)
        return NULL;
    if (self->exception == NULL)
        Py_RETURN_NONE;
    PyObject *exception = self->exception;
    self->exception = NULL;
    py_raise_exception(exception);
    return NULL;
}

static void close_stream(struct host_stream_object *self)
{
    self->closed = true;
    if (self->stream != NULL && self->waiters == 0) {
        gp_host_stream_close(self->stream);
        self->stream = NULL;
    }
}

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "Take no more work. What was submitted still runs; synchronize() first to "
                        "wait for it and to see its\n"
                        "exceptions: one that nobody asked for is only reported when the stream is "
                        "dropped. A second\n"
                        "call does nothing.\n\n"
                        "Notes\n-----\nAny thread. Pools that know the stream are not disturbed.");

static PyObject *host_stream_close(struct host_stream_object *self, PyObject *unused)
{
    (void)unused;
    close_stream(self);
    Py_RETURN_NONE;
}

static PyObject *host_stream_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(self);
}

/* An exception that ends the program goes on, and still tells of the body's. */
static void add_context(PyObject *body)
{
    PyObject *raised = py_take_exception();
    PyObject *context = PyException_GetContext(raised);
    if (context == NULL && raised != body)
        PyException_SetContext(raised, Py_NewRef(body));
    Py_XDECREF(context);
    py_raise_exception(raised);
}

/* Waits, so that the body's work is over and its exceptions are seen; the body's own comes first, but
 * before KeyboardInterrupt and the like. */
static PyObject *host_stream_exit(struct host_stream_object *self, PyObject *const *args,
                                  Py_ssize_t nargs)
{
    PyObject *body = nargs > 1 && PyExceptionInstance_Check(args[1]) ? args[1] : NULL;
    PyObject *result = host_stream_synchronize(self, NULL);
    close_stream(self);
    if (result != NULL || body == NULL)
        return result;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        add_context(body);
        return NULL;
    }
    PyErr_WriteUnraisable((PyObject *)self);
    Py_RETURN_NONE;
}

/* ---- the object ----------------------------------------------------------------------------- */

static PyObject *host_stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {NULL};
    static const struct ext_signature signature = {"Stream", names, 0, 0};
    PyObject *none[1];
    if (ext_parse_tuple(&signature, args, kwargs, none) < 0)
        return NULL;
    struct host_stream_object *self = (struct host_stream_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    gp_error error = {0};
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_host_stream_create(&self->stream, &error);
    ext_reenter_python(saved);
    if (status != GP_OK) {
        self->closed = true;
        Py_DECREF(self);
        ext_raise(PyType_GetModuleState(type), status, &error, NULL);
        return NULL;
    }
    self->id = gp_host_stream_id(self->stream);
    return (PyObject *)self;
}

static PyObject *host_stream_get_id(struct host_stream_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->id);
}

static PyObject *host_stream_get_is_closed(struct host_stream_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->closed);
}

static PyObject *host_stream_repr(struct host_stream_object *self)
{
    return PyUnicode_FromFormat("<growpool.host.Stream %llu%s>", (unsigned long long)self->id,
                                self->closed ? ", closed" : "");
}

static int host_stream_traverse(struct host_stream_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->exception);
    return 0;
}

static int host_stream_clear(struct host_stream_object *self)
{
    Py_CLEAR(self->exception);
    return 0;
}

/* Nobody can ask for the exception any more. A finaliser, because clearing a cycle, such as one
 * through the exception's own traceback, would lose it before tp_dealloc. */
static void host_stream_finalize(PyObject *object)
{
    struct host_stream_object *self = (struct host_stream_object *)object;
    if (self->exception == NULL)
        return;
    PyObject *raised = py_take_exception();
    PyObject *exception = self->exception;
    self->exception = NULL;
    py_raise_exception(exception);
    PyErr_WriteUnraisable(object);
    py_raise_exception(raised);
}

static void host_stream_dealloc(struct host_stream_object *self)
{
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self) < 0)
        return;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    close_stream(self);
    host_stream_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef host_stream_methods[] = {
    {"submit", (PyCFunction)host_stream_submit, METH_O, submit_doc},
    {"synchronize", (PyCFunction)host_stream_synchronize, METH_NOARGS, synchronize_doc},
    {"close", (PyCFunction)host_stream_close, METH_NOARGS, close_doc},
    {"__enter__", host_stream_enter, METH_NOARGS, EXT_ENTER_DOC},
    {"__exit__", (PyCFunction)(void (*)(void))host_stream_exit, METH_FASTCALL, EXT_EXIT_DOC},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef host_stream_getset[] = {
    {"id", (getter)host_stream_get_id, NULL, "The stream's number; never reused in a process.",
     NULL},
    {"is_closed", (getter)host_stream_get_is_closed, NULL, "True after close().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef host_stream_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct host_stream_object, weak_references),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    host_stream_doc,
    "Stream()\n--\n\n"
    "A stream of the host device: a worker thread that runs callables in order.\n\n"
    "Work submitted here may use a host pool's memory; a pool that was told of the stream waits "
    "for that\n"
    "work before it unmaps anything. As a context manager it waits at the end and then closes.\n\n"
    "Notes\n-----\nAny thread.");

static PyType_Slot host_stream_slots[] = {
    {Py_tp_doc, (void *)host_stream_doc},
    {Py_tp_new, host_stream_new},
    {Py_tp_methods, host_stream_methods},
    {Py_tp_getset, host_stream_getset},
    {Py_tp_members, host_stream_members},
    {Py_tp_traverse, host_stream_traverse},
    {Py_tp_clear, host_stream_clear},
    {Py_tp_dealloc, host_stream_dealloc},
    {Py_tp_repr, host_stream_repr},
    {Py_tp_finalize, host_stream_finalize},
    {0, NULL},
};

static PyType_Spec host_stream_spec = {
    .name = "growpool.host.Stream",
    .basicsize = sizeof(struct host_stream_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = host_stream_slots,
};

int ext_add_host_stream(PyObject *module, struct module_state *state)
{
    state->host_stream_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &host_stream_spec, NULL);
    if (state->host_stream_type == NULL)
        return -1;
    return PyModule_AddObjectRef(module, "HostStream", (PyObject *)state->host_stream_type);
}
