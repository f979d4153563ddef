/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.cuda.Stream: just enough of a CUDA stream for tests and demos on machines without another
 * CUDA library. It is no CUDA binding.
 */
#include "cuda_stream.h"

#include "../../backing/cuda_stream.h"
#include "args.h"
#include "call.h"
#include "errors.h"
#include "gate.h"
#include "memory.h"

#include <stdbool.h>
#include <time.h>

struct cuda_stream_object {
    PyObject_HEAD gp_device *device;
    uintptr_t handle;
    bool closed;
    PyObject *weak_references;
};

static int check_open(struct cuda_stream_object *self)
{
    if (!self->closed)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the growpool.cuda.Stream is closed");
    return -1;
}

int ext_cuda_stream_handle(PyObject *object, gp_device *device, uintptr_t *handle)
{
    struct cuda_stream_object *self = (struct cuda_stream_object *)object;
    if (gp_device_kind_of(device) != GP_DEVICE_CUDA) {
        PyErr_Format(PyExc_TypeError, "a growpool.cuda.Stream cannot order work on %s",
                     gp_device_name(device));
        return -1;
    }
    if (check_open(self) < 0)
        return -1;
    if (self->device != device) {
        PyErr_Format(PyExc_ValueError, "the stream is on %s, the memory on %s",
                     gp_device_name(self->device), gp_device_name(device));
        return -1;
    }
    *handle = self->handle;
    return 0;
}

bool ext_cuda_stream_is_closed(PyObject *object)
{
    return ((struct cuda_stream_object *)object)->closed;
}

/* ---- making --------------------------------------------------------------------------------- */

static int check_is_gpu(gp_device *device)
{
    if (gp_device_kind_of(device) == GP_DEVICE_CUDA)
        return 0;
    PyErr_Format(PyExc_ValueError, "a growpool.cuda.Stream needs a GPU such as 'cuda:0', not %s",
                 gp_device_name(device));
    return -1;
}

static PyObject *cuda_stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device", "blocking", NULL};
    static const struct ext_signature signature = {"Stream", names, 0, 1};
    struct module_state *state = PyType_GetModuleState(type);
    PyObject *given[2];
    gp_device *device;
    if (ext_parse_tuple(&signature, args, kwargs, given) < 0 ||
        ext_device(state, given[0], EXT_DEVICE_GPU, &device) < 0 || check_is_gpu(device) < 0)
        return NULL;
    int blocking = given[1] != NULL ? PyObject_IsTrue(given[1]) : 0;
    if (blocking < 0)
        return NULL;
    struct cuda_stream_object *self = (struct cuda_stream_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->device = device;
    gp_error error = {0};
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_cuda_stream_create(device, blocking ? 0 : GP_CUDA_STREAM_NON_BLOCKING,
                                             &self->handle, &error);
    ext_reenter_python(saved);
    if (status == GP_OK)
        return (PyObject *)self;
    self->closed = true;
    Py_DECREF(self);
    ext_raise(state, status, &error, NULL);
    return NULL;
}

/* ---- work ----------------------------------------------------------------------------------- */

PyDoc_STRVAR(protocol_doc, "__cuda_stream__($self, /)\n--\n\n"
                           "The stream protocol of CUDA libraries: (version, handle).");

static PyObject *cuda_stream_protocol(struct cuda_stream_object *self, PyObject *unused)
{
    (void)unused;
    if (check_open(self) < 0)
        return NULL;
    return Py_BuildValue("in", 0, (Py_ssize_t)self->handle);
}

/* 0 when done, 1 while not, -1 with an exception. Sleeps a little longer each time. */
static int poll_once(struct cuda_stream_object *self, long *sleep_ns)
{
    gp_error error = {0};
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_cuda_stream_query(self->device, self->handle, &error);
    if (status == GP_NOT_READY && *sleep_ns > 0) {
        const struct timespec time = {0, *sleep_ns};
        nanosleep(&time, NULL);
    }
    ext_reenter_python(saved);
    *sleep_ns = *sleep_ns == 0 ? 1000 : *sleep_ns < 500000 ? *sleep_ns * 2 : *sleep_ns;
    if (status == GP_OK)
        return 0;
    if (status != GP_NOT_READY) {
        ext_raise(ext_state((PyObject *)self), status, &error, NULL);
        return -1;
    }
    return PyErr_CheckSignals() < 0 ? -1 : 1;
}

PyDoc_STRVAR(
    synchronize_doc,
    "synchronize($self, /)\n--\n\n"
    "Wait until all work of the stream is done.\n\n"
    "Raises\n------\n"
    "CaptureError\n    The stream is being captured; the capture survives.\n"
    "DriverError\n    Work on the device failed.\n\n"
    "Notes\n-----\nAny thread. Detached from the interpreter while it waits; signals are noticed.");

static PyObject *cuda_stream_synchronize(struct cuda_stream_object *self, PyObject *unused)
{
    (void)unused;
    long sleep_ns = 0;
    int more = 1;
    while (more > 0) {
        if (check_open(self) < 0)
            return NULL;
        more = poll_once(self, &sleep_ns);
    }
    if (more < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* An address and how many bytes lie there: an int, or growpool memory. */
static int parse_memory(struct module_state *state, PyObject *object, const char *what,
                        uintptr_t *address, size_t *size)
{
    struct memory_object *memory = ext_memory_of(state, object);
    struct ext_part part;
    *size = (size_t)PY_SSIZE_T_MAX;
    if (memory == NULL)
        return ext_address(object, what, address);
    if (ext_memory_whole(memory, &part) < 0)
        return -1;
    *address = part.address;
    *size = part.bytes;
    return 0;
}

static int check_fits(size_t size, size_t available)
{
    if (size <= available)
        return 0;
    PyErr_Format(PyExc_ValueError, "%zu bytes do not fit into memory of %zu", size, available);
    return -1;
}

static PyObject *end_work(struct cuda_stream_object *self, gp_status status, const gp_error *error)
{
    if (status == GP_OK)
        Py_RETURN_NONE;
    ext_raise(ext_state((PyObject *)self), status, error, NULL);
    return NULL;
}

PyDoc_STRVAR(
    fill_doc,
    "fill($self, /, to, value, size)\n--\n\n"
    "Enqueue: set `size` bytes at `to` to `value`.\n\n"
    "Parameters\n----------\n"
    "to : int or memory object\n    Device memory; it must stay allocated until the work is done.\n"
    "value : int\n    0 to 255.\n"
    "size : int or str\n    Bytes.\n\n"
    "Raises\n------\nValueError, TypeError, OverflowError\n    A wrong argument.\n"
    "DriverError\n    The driver refused.\n\n"
    "Notes\n-----\nAny thread. Does not wait for the work.");

static PyObject *cuda_stream_fill(struct cuda_stream_object *self, PyTypeObject *defining,
                                  PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"to", "value", "size", NULL};
    static const struct ext_signature signature = {"fill", names, 3, 3};
    struct module_state *state = PyType_GetModuleState(defining);
    PyObject *given[3];
    uintptr_t to;
    size_t value, size, available;
    if (check_open(self) < 0 || ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        parse_memory(state, given[0], "to", &to, &available) < 0 ||
        ext_size(given[1], "value", &value) < 0 || ext_size(given[2], "size", &size) < 0 ||
        check_fits(size, available) < 0)
        return NULL;
    if (value > 255)
        return PyErr_Format(PyExc_ValueError, "value must be 0 to 255, got %R", given[1]);
    gp_error error = {0};
    PyThreadState *saved = ext_leave_python();
    gp_status status =
        gp_cuda_fill(self->device, self->handle, to, (unsigned char)value, size, &error);
    ext_reenter_python(saved);
    return end_work(self, status, &error);
}

PyDoc_STRVAR(copy_doc,
             "copy($self, /, to, source, size)\n--\n\n"
             "Enqueue: copy `size` bytes between any two addresses that CUDA knows.\n\n"
             "Parameters\n----------\n"
             "to, source : int or memory object\n    Device or host memory; it must stay until the "
             "work is done.\n"
             "size : int or str\n    Bytes.\n\n"
             "Raises\n------\nValueError, TypeError, OverflowError\n    A wrong argument.\n"
             "DriverError\n    The driver refused.\n\n"
             "Notes\n-----\nAny thread. A copy from pageable host memory may wait.");

static PyObject *cuda_stream_copy(struct cuda_stream_object *self, PyTypeObject *defining,
                                  PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"to", "source", "size", NULL};
    static const struct ext_signature signature = {"copy", names, 3, 3};
    struct module_state *state = PyType_GetModuleState(defining);
    PyObject *given[3];
    uintptr_t to, source;
    size_t size, room, available;
    if (check_open(self) < 0 || ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        parse_memory(state, given[0], "to", &to, &room) < 0 ||
        parse_memory(state, given[1], "source", &source, &available) < 0 ||
        ext_size(given[2], "size", &size) < 0 || check_fits(size, room) < 0 ||
        check_fits(size, available) < 0)
        return NULL;
    gp_error error = {0};
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_cuda_copy(self->device, self->handle, to, source, size, &error);
    ext_reenter_python(saved);
    return end_work(self, status, &error);
}

/* ---- life ----------------------------------------------------------------------------------- */

static gp_status destroy(struct cuda_stream_object *self, gp_error *error)
{
    if (self->closed)
        return GP_OK;
    self->closed = true;
    if (ext_gate_is_closed())
        return GP_OK;
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_cuda_stream_destroy(self->device, self->handle, error);
    ext_reenter_python(saved);
    return status;
}

PyDoc_STRVAR(close_doc,
             "close($self, /)\n--\n\n"
             "Destroy the stream; its pending work still runs. A second call does nothing.\n\n"
             "Call forget_stream() of every pool that used it first: the driver crashes on a "
             "destroyed stream.\n\n"
             "Raises\n------\nDriverError\n    The driver refused.\n\n"
             "Notes\n-----\nNot while another thread uses the stream.");

static PyObject *cuda_stream_close(struct cuda_stream_object *self, PyObject *unused)
{
    (void)unused;
    gp_error error = {0};
    gp_status status = destroy(self, &error);
    return end_work(self, status, &error);
}

static PyObject *cuda_stream_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(self);
}

static PyObject *cuda_stream_exit(struct cuda_stream_object *self, PyObject *const *args,
                                  Py_ssize_t nargs)
{
    (void)args;
    (void)nargs;
    return cuda_stream_close(self, NULL);
}

static PyObject *cuda_stream_get_handle(struct cuda_stream_object *self, void *unused)
{
    (void)unused;
    return check_open(self) < 0 ? NULL : PyLong_FromSize_t(self->handle);
}

static PyObject *cuda_stream_get_device(struct cuda_stream_object *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(gp_device_name(self->device));
}

static PyObject *cuda_stream_get_device_id(struct cuda_stream_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(gp_device_id(self->device));
}

static PyObject *cuda_stream_get_is_closed(struct cuda_stream_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->closed);
}

static PyObject *cuda_stream_repr(struct cuda_stream_object *self)
{
    return PyUnicode_FromFormat("<growpool.cuda.Stream %p on %s%s>", (void *)self->handle,
                                gp_device_name(self->device), self->closed ? ", closed" : "");
}

static int cuda_stream_traverse(struct cuda_stream_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void cuda_stream_dealloc(struct cuda_stream_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    (void)destroy(self, NULL);
    type->tp_free(self);
    Py_DECREF(type);
}

#define CALL_FLAGS       (METH_METHOD | METH_FASTCALL | METH_KEYWORDS)
#define METHOD(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef cuda_stream_methods[] = {
    {"__cuda_stream__", (PyCFunction)cuda_stream_protocol, METH_NOARGS, protocol_doc},
    {"synchronize", (PyCFunction)cuda_stream_synchronize, METH_NOARGS, synchronize_doc},
    {"fill", METHOD(cuda_stream_fill), CALL_FLAGS, fill_doc},
    {"copy", METHOD(cuda_stream_copy), CALL_FLAGS, copy_doc},
    {"close", (PyCFunction)cuda_stream_close, METH_NOARGS, close_doc},
    {"__enter__", cuda_stream_enter, METH_NOARGS, EXT_ENTER_DOC},
    {"__exit__", METHOD(cuda_stream_exit), METH_FASTCALL, EXT_EXIT_DOC},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef cuda_stream_getset[] = {
    {"handle", (getter)cuda_stream_get_handle, NULL, "The CUstream as an int.", NULL},
    {"device", (getter)cuda_stream_get_device, NULL, "The device as text, such as 'cuda:0'.", NULL},
    {"device_id", (getter)cuda_stream_get_device_id, NULL, "The GPU's number.", NULL},
    {"is_closed", (getter)cuda_stream_get_is_closed, NULL, "True after close().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef cuda_stream_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct cuda_stream_object, weak_references),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(cuda_stream_doc,
             "Stream(device=None, *, blocking=False)\n--\n\n"
             "A CUDA stream for tests and demos: fills and copies by the driver, and waiting.\n\n"
             "Parameters\n----------\n"
             "device : str, int or object, optional\n    A GPU in any form that Pool takes; the "
             "first one if left out.\n"
             "blocking : bool, optional\n    Order it with the legacy default stream.\n\n"
             "Raises\n------\n"
             "DriverError\n    There is no such GPU.\n"
             "ValueError\n    The device is no GPU.\n\n"
             "Notes\n-----\nAny thread. A pool that used the stream keeps the object alive until "
             "forget_stream().");

static PyType_Slot cuda_stream_slots[] = {
    {Py_tp_doc, (void *)cuda_stream_doc},
    {Py_tp_new, cuda_stream_new},
    {Py_tp_methods, cuda_stream_methods},
    {Py_tp_getset, cuda_stream_getset},
    {Py_tp_members, cuda_stream_members},
    {Py_tp_traverse, cuda_stream_traverse},
    {Py_tp_dealloc, cuda_stream_dealloc},
    {Py_tp_repr, cuda_stream_repr},
    {0, NULL},
};

static PyType_Spec cuda_stream_spec = {
    .name = "growpool.cuda.Stream",
    .basicsize = sizeof(struct cuda_stream_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = cuda_stream_slots,
};

int ext_add_cuda_stream(PyObject *module, struct module_state *state)
{
    state->cuda_stream_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &cuda_stream_spec, NULL);
    if (state->cuda_stream_type == NULL)
        return -1;
    return PyModule_AddObjectRef(module, "CudaStream", (PyObject *)state->cuda_stream_type);
}
