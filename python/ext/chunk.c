/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Chunk: physical memory as a Python object. It never maps anything; pools do.
 */
#include "chunk.h"

#include "args.h"
#include "errors.h"
#include "gate.h"

#include <stdlib.h>

void ext_chunk_release(gp_chunk *chunk)
{
    PyThreadState *saved = ext_leave_python();
    gp_chunk_release(chunk);
    ext_reenter_python(saved);
}

PyObject *ext_chunk_object(struct module_state *state, gp_chunk *chunk)
{
    struct chunk_object *self = gp_chunk_user(chunk);
    if (self != NULL)
        return Py_NewRef(self);
    self = (struct chunk_object *)state->chunk_type->tp_alloc(state->chunk_type, 0);
    if (self == NULL)
        return NULL;
    struct chunk_object *other = gp_chunk_user(chunk);
    if (other != NULL) { /* a collection, run by tp_alloc, came here as well */
        Py_INCREF(other);
        Py_DECREF(self);
        return (PyObject *)other;
    }
    self->chunk = gp_chunk_retain(chunk);
    gp_chunk_set_user(chunk, self);
    return (PyObject *)self;
}

gp_chunk *ext_chunk_of(struct module_state *state, PyObject *object, const char *what)
{
    if (Py_IS_TYPE(object, state->chunk_type))
        return ((struct chunk_object *)object)->chunk;
    PyErr_Format(PyExc_TypeError, "%s must be a growpool.Chunk, not %.200s", what,
                 Py_TYPE(object)->tp_name);
    return NULL;
}

/* ---- making --------------------------------------------------------------------------------- */

PyObject *ext_chunk_wrap(struct module_state *state, gp_chunk *chunk)
{
    PyObject *self = ext_chunk_object(state, chunk);
    ext_chunk_release(chunk);
    return self;
}

static int parse_location(PyObject *object, gp_location *location)
{
    *location = GP_LOCATION_DEVICE;
    if (object == NULL)
        return 0;
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "location must be 'device' or 'host', not %.200s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    if (PyUnicode_CompareWithASCIIString(object, "device") == 0)
        return 0;
    *location = GP_LOCATION_HOST;
    if (PyUnicode_CompareWithASCIIString(object, "host") == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "location must be 'device' or 'host', not %R", object);
    return -1;
}

PyDoc_STRVAR(
    create_doc,
    "create($type, /, size, device=None, *, location='device', handle_type=None,\n"
    "       gpu_direct_rdma=False)\n--\n\n"
    "Make physical memory.\n\n"
    "Parameters\n----------\n"
    "size : int or str\n    Bytes, a multiple of the device's granularity (2 MiB on "
    "today's GPUs).\n"
    "device : str, int or object, optional\n"
    "    A device in any form that Pool takes, or the int that callbacks get.\n"
    "location : {'device', 'host'}\n"
    "    'host' is host memory near the GPU, mapped at device addresses.\n"
    "handle_type : {None, 'posix_fd'}\n"
    "    'posix_fd': export_fd() works. On the host such a chunk holds a file descriptor "
    "while it lives,\n"
    "    and a forked child cannot reach its memory.\n"
    "gpu_direct_rdma : bool\n"
    "    Let network cards and the like reach the memory. A wish: where the device cannot, "
    "the chunk is\n"
    "    made without, and its property of that name is False.\n\n"
    "Returns\n-------\nChunk\n\n"
    "Raises\n------\n"
    "OutOfMemoryError\n    The device has no room.\n"
    "ValueError, TypeError, OverflowError\n    A wrong argument.\n"
    "DriverError\n    The device refused, does not exist on this machine, or cannot share "
    "memory.\n\n"
    "Notes\n-----\n"
    "Any thread. The memory is released when the last reference to the chunk goes and no "
    "pool holds it.");

static PyObject *chunk_create(PyTypeObject *type, PyTypeObject *defining, PyObject *const *args,
                              Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"size",        "device",          "location",
                                        "handle_type", "gpu_direct_rdma", NULL};
    static const struct ext_signature signature = {"create", names, 1, 2};
    (void)type;
    struct module_state *state = PyType_GetModuleState(defining);
    PyObject *given[5];
    size_t size;
    gp_device *device;
    gp_location location;
    unsigned flags;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_size(given[0], "size", &size) < 0 || parse_location(given[2], &location) < 0 ||
        ext_chunk_flags(given[3], given[4], &flags) < 0 ||
        ext_device(state, given[1], EXT_DEVICE_CALLBACK_IDS, &device) < 0)
        return NULL;
    gp_error error = {0};
    gp_chunk *chunk = NULL;
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_chunk_create(device, size, location, flags, &chunk, &error);
    ext_reenter_python(saved);
    if (status == GP_OK)
        return ext_chunk_wrap(state, chunk);
    ext_raise(state, status, &error, NULL);
    return NULL;
}

/* The last reference to an adopted chunk is gone, on any thread. */
static void drop_owner(void *context)
{
    struct ext_attached attached;
    if (!ext_attach(&attached))
        return;
    Py_DECREF((PyObject *)context);
    ext_detach(&attached);
}

PyDoc_STRVAR(from_handle_doc,
             "from_handle($type, /, handle, size, device, owner=None)\n--\n\n"
             "Adopt physical memory made elsewhere. UNSAFE.\n\n"
             "The driver ends the process if `handle` is not a live allocation handle of exactly "
             "`size` bytes.\n\n"
             "Parameters\n----------\n"
             "handle : int\n    A CUmemGenericAllocationHandle.\n"
             "size : int or str\n    Its bytes.\n"
             "device : str, int or object\n    The GPU it lives on.\n"
             "owner : object, optional\n"
             "    Kept alive until growpool no longer uses the handle, and then let go: the handle "
             "stays the\n"
             "    owner's to release. Without an owner growpool releases the handle. The "
             "collector does not\n"
             "    see this reference: an owner that refers to the chunk keeps both alive until "
             "close().\n\n"
             "Returns\n-------\nChunk\n\n"
             "Raises\n------\n"
             "ValueError, TypeError, OverflowError\n    A wrong argument, or a device without "
             "handles (the host).\n\n"
             "Notes\n-----\nAny thread.");

static PyObject *chunk_from_handle(PyTypeObject *type, PyTypeObject *defining,
                                   PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"handle", "size", "device", "owner", NULL};
    static const struct ext_signature signature = {"from_handle", names, 3, 4};
    (void)type;
    struct module_state *state = PyType_GetModuleState(defining);
    PyObject *given[4];
    uintptr_t handle;
    size_t size;
    gp_device *device;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_address(given[0], "handle", &handle) < 0 || ext_size(given[1], "size", &size) < 0 ||
        ext_device(state, given[2], EXT_DEVICE_CALLBACK_IDS, &device) < 0)
        return NULL;
    PyObject *owner = given[3] == Py_None ? NULL : given[3];
    gp_error error = {0};
    gp_chunk *chunk = NULL;
    gp_status status = gp_chunk_adopt(device, handle, size, owner != NULL ? drop_owner : NULL,
                                      Py_XNewRef(owner), &chunk, &error);
    if (status != GP_OK) {
        Py_XDECREF(owner);
        ext_raise(state, status, &error, NULL);
        return NULL;
    }
    return ext_chunk_wrap(state, chunk);
}

/* ---- using ---------------------------------------------------------------------------------- */

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "Release the physical memory now. A second call does nothing.\n\n"
                        "Raises\n------\n"
                        "PoolStateError\n    A pool holds the chunk (reason 'in_use').\n"
                        "DriverError\n    The driver refused.\n\n"
                        "Notes\n-----\nAny thread.");

static PyObject *chunk_close(struct chunk_object *self, PyObject *unused)
{
    (void)unused;
    if (ext_gate_has_ended())
        Py_RETURN_NONE;
    gp_error error = {0};
    gp_chunk *chunk = gp_chunk_retain(self->chunk);
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_chunk_close(chunk, &error);
    gp_chunk_release(chunk);
    ext_reenter_python(saved);
    if (status == GP_OK) {
        ext_adapter_forget(self);
        Py_RETURN_NONE;
    }
    ext_raise(ext_state((PyObject *)self), status, &error, NULL);
    return NULL;
}

static PyObject *chunk_get_size(struct chunk_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(gp_chunk_size(self->chunk));
}

static PyObject *chunk_get_device(struct chunk_object *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(gp_device_name(gp_chunk_device(self->chunk)));
}

static PyObject *chunk_get_device_id(struct chunk_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(gp_device_id(gp_chunk_device(self->chunk)));
}

static PyObject *chunk_get_handle(struct chunk_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(gp_chunk_handle(self->chunk));
}

static PyObject *chunk_get_is_closed(struct chunk_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(gp_chunk_is_closed(self->chunk));
}

static PyObject *chunk_get_is_in_use(struct chunk_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(gp_chunk_is_in_use(self->chunk));
}

static PyObject *chunk_repr(struct chunk_object *self)
{
    char size[32];
    const char *state = gp_chunk_is_closed(self->chunk)   ? "closed"
                        : gp_chunk_is_in_use(self->chunk) ? "held by a pool"
                                                          : "idle";
    return PyUnicode_FromFormat("<growpool.Chunk %llu: %s on %s, %s>",
                                (unsigned long long)gp_chunk_id(self->chunk),
                                ext_size_text(gp_chunk_size(self->chunk), size),
                                gp_device_name(gp_chunk_device(self->chunk)), state);
}

static int chunk_traverse(struct chunk_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void chunk_dealloc(struct chunk_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    /* The callbacks of weak references may ask for the chunk's object: they get a new one. */
    if (self->chunk != NULL)
        gp_chunk_set_user(self->chunk, NULL);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    if (self->chunk != NULL)
        ext_chunk_release(self->chunk);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef chunk_methods[] = {
    {"create", (PyCFunction)(void (*)(void))chunk_create,
     METH_CLASS | METH_METHOD | METH_FASTCALL | METH_KEYWORDS, create_doc},
    {"from_handle", (PyCFunction)(void (*)(void))chunk_from_handle,
     METH_CLASS | METH_METHOD | METH_FASTCALL | METH_KEYWORDS, from_handle_doc},
    {"from_fd", (PyCFunction)(void (*)(void))ext_chunk_from_fd,
     METH_CLASS | METH_METHOD | METH_FASTCALL | METH_KEYWORDS, ext_chunk_from_fd_doc},
    {"export_fd", (PyCFunction)ext_chunk_export_fd, METH_NOARGS, ext_chunk_export_fd_doc},
    {"close", (PyCFunction)chunk_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef chunk_getset[] = {
    {"size", (getter)chunk_get_size, NULL, "Bytes.", NULL},
    {"device", (getter)chunk_get_device, NULL, "The device as text, such as 'cuda:0'.", NULL},
    {"device_id", (getter)chunk_get_device_id, NULL,
     "The device as callbacks get it: N for cuda:N, -1 for the host.", NULL},
    {"handle", (getter)chunk_get_handle, NULL, "The driver's number for the memory.", NULL},
    {"handle_type", (getter)ext_chunk_get_handle_type, NULL,
     "'posix_fd' when export_fd() works, else None.", NULL},
    {"gpu_direct_rdma", (getter)ext_chunk_get_gpu_direct_rdma, NULL,
     "True when network cards and the like may reach the memory.", NULL},
    {"is_closed", (getter)chunk_get_is_closed, NULL, "True after close().", NULL},
    {"is_in_use", (getter)chunk_get_is_in_use, NULL, "True while a pool holds the chunk.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef chunk_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct chunk_object, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(chunk_doc, "Physical memory: the unit in which a pool grows and shrinks.\n\n"
                        "Made by Chunk.create(), imported with Chunk.from_fd(), or adopted with "
                        "Chunk.from_handle(). A pool that "
                        "accepted a chunk holds it\n"
                        "until it calls `free`; a chunk that nobody holds is released.");

static PyType_Slot chunk_slots[] = {
    {Py_tp_doc, (void *)chunk_doc},   {Py_tp_methods, chunk_methods},
    {Py_tp_getset, chunk_getset},     {Py_tp_members, chunk_members},
    {Py_tp_traverse, chunk_traverse}, {Py_tp_dealloc, chunk_dealloc},
    {Py_tp_repr, chunk_repr},         {0, NULL},
};

static PyType_Spec chunk_spec = {
    .name = "growpool.Chunk",
    .basicsize = sizeof(struct chunk_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = chunk_slots,
};

int ext_add_chunk(PyObject *module, struct module_state *state)
{
    return ext_add_type(module, &chunk_spec, NULL, &state->chunk_type);
}
