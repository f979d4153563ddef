/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Buffer: a block as an object that ends its block when it goes. It owns one block of its pool
 * and counts the exports of its memory; it never waits and never calls back.
 */
#include "buffer.h"

#include "args.h"
#include "errors.h"

/* Guarded by the GIL. */
struct buffer_object {
    PyObject_HEAD struct pool_object *pool;
    gp_pool *pinned; /* held while exports live: the pool must not be handed over under them */
    uintptr_t address; /* 0 for an empty buffer */
    size_t size;
    size_t exports;
    bool closed;
    PyObject *weak_references;
};

static bool is_closed(const struct buffer_object *self)
{
    return self->closed || self->pool->pool == NULL || gp_pool_is_closed(self->pool->pool);
}

/* A finishing pool takes no more work, though its buffers still hold their memory. */
static int check_open(struct buffer_object *self)
{
    bool closed = is_closed(self);
    if (!closed && !self->pool->finishing)
        return 0;
    ext_raise_closed(ext_state((PyObject *)self), closed ? "the buffer" : "the pool");
    return -1;
}

PyObject *ext_buffer_allocate(struct pool_object *pool, size_t size, PyObject *stream)
{
    PyTypeObject *type = ext_state((PyObject *)pool)->buffer_type;
    struct buffer_object *self = (struct buffer_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->pool = (struct pool_object *)Py_NewRef(pool);
    self->size = size;
    self->closed = true; /* until there is a block */
    if (ext_pool_block(pool, size, stream, GP_BLOCK_OBJECT, &self->address) < 0) {
        PyObject *raised = py_take_exception();
        Py_DECREF(self);
        py_raise_exception(raised);
        return NULL;
    }
    self->closed = false;
    return (PyObject *)self;
}

int ext_buffer_memory(PyObject *object, uintptr_t *address, size_t *size)
{
    struct buffer_object *self = (struct buffer_object *)object;
    if (check_open(self) < 0)
        return -1;
    *address = self->address;
    *size = self->size;
    return 0;
}

/* ---- closing -------------------------------------------------------------------------------- */

static int raise_pinned(const struct buffer_object *self)
{
    PyErr_Format(PyExc_BufferError,
                 "the buffer of %zu bytes has %zu live exports: drop the arrays and memoryviews on "
                 "it before closing it",
                 self->size, self->exports);
    return -1;
}

static int close_buffer(struct buffer_object *self, PyObject *stream_object)
{
    if (is_closed(self)) {
        self->closed = true;
        return 0;
    }
    if (self->exports > 0)
        return raise_pinned(self);
    gp_stream *stream = NULL;
    if (ext_pool_stream(self->pool, self->pool->pool, stream_object, true, &stream) < 0)
        return -1;
    gp_error error = {0};
    gp_status status = GP_OK;
    /* Resolving the stream may have run Python code, and that may have closed us. */
    if (!is_closed(self))
        status = gp_pool_free(self->pool->pool, self->address, stream, GP_BLOCK_OBJECT, &error);
    gp_stream_release(stream);
    if (status != GP_OK && !(status == GP_ERR_STATE && error.reason == GP_REASON_CLOSED)) {
        ext_raise(ext_state((PyObject *)self), status, &error, NULL);
        return -1;
    }
    self->closed = true;
    return 0;
}

PyDoc_STRVAR(
    close_doc,
    "close($self, /, stream=None)\n--\n\n"
    "Give the memory back to the pool. A second call does nothing.\n\n"
    "Parameters\n----------\n"
    "stream : stream, optional\n"
    "    Where its last use was enqueued; the stream it was allocated on if left out.\n\n"
    "Raises\n------\n"
    "BufferError\n    Arrays or memoryviews on it are alive.\n"
    "TypeError, ValueError\n    Not a stream of the pool's device.\n"
    "PoolStateError\n    This process is a fork of the one that made the pool.\n\n"
    "Notes\n-----\nAny thread. Never waits: the pool reuses the memory when its streams allow it.");

static PyObject *buffer_close(struct buffer_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
    static const char *const names[] = {"stream", NULL};
    static const struct ext_signature signature = {"close", names, 0, 1};
    PyObject *given[1];
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 || close_buffer(self, given[0]) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *buffer_enter(struct buffer_object *self, PyObject *unused)
{
    (void)unused;
    return check_open(self) < 0 ? NULL : Py_NewRef(self);
}

/* Masks the body's exception only with one that is no Exception, such as KeyboardInterrupt. */
static PyObject *buffer_exit(struct buffer_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    bool body_raised = nargs > 0 && args[0] != Py_None;
    if (close_buffer(self, NULL) == 0)
        Py_RETURN_NONE;
    if (!body_raised || ext_add_context(args, nargs))
        return NULL;
    PyErr_WriteUnraisable((PyObject *)self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    record_stream_doc,
    "record_stream($self, stream, /)\n--\n\n"
    "Say that another stream uses the memory too: the pool then waits for that one as well.\n\n"
    "Parameters\n----------\n"
    "stream : stream or None\n    None is the device's default stream.\n\n"
    "Raises\n------\n"
    "TypeError, ValueError\n    Not a stream of the pool's device.\n"
    "PoolStateError\n    The buffer is closed.\n\n"
    "Notes\n-----\nAny thread. Never waits. The pool keeps the stream object alive.");

static PyObject *buffer_record_stream(struct buffer_object *self, PyObject *stream_object)
{
    gp_stream *stream = NULL;
    if (check_open(self) < 0 ||
        ext_pool_stream(self->pool, self->pool->pool, stream_object, false, &stream) < 0)
        return NULL;
    gp_error error = {0};
    gp_status status = GP_OK;
    if (check_open(self) < 0) {
        gp_stream_release(stream);
        return NULL;
    }
    if (self->address != 0)
        status = gp_pool_record_stream(self->pool->pool, self->address, stream, &error);
    gp_stream_release(stream);
    if (status == GP_OK)
        Py_RETURN_NONE;
    ext_raise(ext_state((PyObject *)self), status, &error, NULL);
    return NULL;
}

/* ---- the buffer protocol --------------------------------------------------------------------- */

static int buffer_getbuffer(struct buffer_object *self, Py_buffer *view, int flags)
{
    static char nothing[1];
    view->obj = NULL;
    if (check_open(self) < 0)
        return -1;
    if (!gp_device_is_host_accessible(self->pool->device)) {
        PyErr_Format(PyExc_BufferError, "the CPU cannot read memory of %s",
                     gp_device_name(self->pool->device));
        return -1;
    }
    if (self->address == 0)
        return PyBuffer_FillInfo(view, (PyObject *)self, nothing, 0, 0, flags);
    gp_error error = {0};
    gp_status status = gp_pool_pin(self->pool->pool, self->address, false, &error);
    if (status != GP_OK) {
        ext_raise(ext_state((PyObject *)self), status, &error, NULL);
        return -1;
    }
    if (PyBuffer_FillInfo(view, (PyObject *)self, (void *)self->address, (Py_ssize_t)self->size, 0,
                          flags) < 0) {
        gp_pool_unpin(self->pool->pool, self->address);
        return -1;
    }
    if (self->exports++ == 0)
        self->pinned = gp_pool_retain(self->pool->pool);
    self->pool->exports++;
    return 0;
}

static void buffer_releasebuffer(struct buffer_object *self, Py_buffer *view)
{
    (void)view;
    if (self->exports == 0)
        return; /* an empty buffer */
    gp_pool *pinned = self->pinned;
    gp_pool_unpin(pinned, self->address);
    if (--self->exports > 0)
        pinned = NULL;
    else
        self->pinned = NULL;
    if (--self->pool->exports == 0 && self->pool->finishing)
        ext_pool_close_later(self->pool);
    gp_pool_release(pinned);
}

/* ---- what it shows --------------------------------------------------------------------------- */

static PyObject *buffer_get_handle(struct buffer_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(is_closed(self) ? 0 : self->address);
}

static PyObject *buffer_get_size(struct buffer_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->size);
}

static PyObject *buffer_get_is_closed(struct buffer_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(is_closed(self));
}

static PyObject *buffer_get_device_id(struct buffer_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(gp_device_id(self->pool->device));
}

static PyObject *buffer_get_device(struct buffer_object *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(gp_device_name(self->pool->device));
}

static PyObject *buffer_get_pool(struct buffer_object *self, void *unused)
{
    (void)unused;
    return Py_NewRef(self->pool);
}

static PyObject *buffer_get_is_device_accessible(struct buffer_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(gp_device_is_device_accessible(self->pool->device));
}

static PyObject *buffer_get_is_host_accessible(struct buffer_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(gp_device_is_host_accessible(self->pool->device));
}

static PyObject *buffer_repr(struct buffer_object *self)
{
    char size[32];
    ext_size_text(self->size, size);
    const char *device = gp_device_name(self->pool->device);
    if (is_closed(self))
        return PyUnicode_FromFormat("<growpool.Buffer: %s on %s, closed>", size, device);
    return PyUnicode_FromFormat("<growpool.Buffer: %s on %s at %p>", size, device,
                                (void *)self->address);
}

/* ---- life ----------------------------------------------------------------------------------- */

static int buffer_traverse(struct buffer_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->pool);
    return 0;
}

/* Silent whatever the pool says: it may be closed, of another process, or at its end. */
static void end_block(struct buffer_object *self)
{
    if (self->closed || self->exports > 0 || self->pool->pool == NULL)
        return;
    self->closed = true;
    (void)gp_pool_free(self->pool->pool, self->address, NULL, GP_BLOCK_OBJECT, NULL);
}

static void buffer_finalize(PyObject *self)
{
    end_block((struct buffer_object *)self);
}

/* The collector finalises once, maybe while memoryviews in the same cycle still held the memory: so the
 * block is ended here at the latest. There is no tp_clear: every cycle through a buffer goes on through
 * its pool, which lets go of everything in its own finaliser. */
static void buffer_dealloc(struct buffer_object *self)
{
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self) < 0)
        return;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    end_block(self);
    Py_DECREF(self->pool);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef buffer_methods[] = {
    {"close", (PyCFunction)(void (*)(void))buffer_close, METH_FASTCALL | METH_KEYWORDS, close_doc},
    {"record_stream", (PyCFunction)buffer_record_stream, METH_O, record_stream_doc},
    {"__enter__", (PyCFunction)buffer_enter, METH_NOARGS, EXT_ENTER_DOC},
    {"__exit__", (PyCFunction)(void (*)(void))buffer_exit, METH_FASTCALL, EXT_EXIT_DOC},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef buffer_getset[] = {
    {"handle", (getter)buffer_get_handle, NULL,
     "The address, a multiple of 512; 0 when empty or closed.", NULL},
    {"size", (getter)buffer_get_size, NULL, "Bytes, as asked for.", NULL},
    {"nbytes", (getter)buffer_get_size, NULL, "The same as size.", NULL},
    {"is_closed", (getter)buffer_get_is_closed, NULL,
     "True after close(), of the buffer or of its pool.", NULL},
    {"device", (getter)buffer_get_device, NULL, "The device as text, such as 'cuda:0'.", NULL},
    {"device_id", (getter)buffer_get_device_id, NULL, "N for cuda:N, -1 for the host.", NULL},
    {"pool", (getter)buffer_get_pool, NULL, "The pool that the memory belongs to.", NULL},
    {"is_device_accessible", (getter)buffer_get_is_device_accessible, NULL,
     "True when a GPU can use the address.", NULL},
    {"is_host_accessible", (getter)buffer_get_is_host_accessible, NULL,
     "True when the CPU can use the address, and the buffer protocol works.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef buffer_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct buffer_object, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    buffer_doc,
    "Memory of a pool: made by Pool.allocate(), given back by close() or when the object goes.\n\n"
    "The address never changes. On host memory the buffer protocol gives writable bytes, so\n"
    "numpy.frombuffer(buffer, dtype) works; while such a view lives, close() raises "
    "BufferError.\n\n"
    "Notes\n-----\n"
    "Any thread. Going out of scope counts as a last use on the stream it was allocated on: call\n"
    "record_stream() or close(stream) where that is another one.");

static PyType_Slot buffer_slots[] = {
    {Py_tp_doc, (void *)buffer_doc},
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_getset},
    {Py_tp_members, buffer_members},
    {Py_tp_traverse, buffer_traverse},
    {Py_tp_finalize, buffer_finalize},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_repr, buffer_repr},
    {Py_bf_getbuffer, buffer_getbuffer},
    {Py_bf_releasebuffer, buffer_releasebuffer},
    {0, NULL},
};

static PyType_Spec buffer_spec = {
    .name = "growpool.Buffer",
    .basicsize = sizeof(struct buffer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = buffer_slots,
};

int ext_add_buffer(PyObject *module, struct module_state *state)
{
    return ext_add_type(module, &buffer_spec, &state->buffer_type);
}
