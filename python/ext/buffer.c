/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Buffer: a block as an object that ends its block when it goes. What it has in common with the
 * other memory objects is in memory.c.
 */
#include "buffer.h"

#include "args.h"
#include "memory.h"

PyObject *ext_buffer_allocate(struct pool_object *pool, size_t size, PyObject *stream)
{
    PyTypeObject *type = ext_state((PyObject *)pool)->buffer_type;
    struct memory_object *self = ext_memory_new(pool, type, EXT_BLOCK);
    if (self == NULL)
        return NULL;
    self->size = size;
    if (ext_pool_block(pool, size, stream, GP_BLOCK_OBJECT, &self->address) < 0) {
        PyObject *raised = py_take_exception();
        Py_DECREF(self);
        py_raise_exception(raised);
        return NULL;
    }
    self->closed = false;
    return (PyObject *)self;
}

/* A block shares its chunks with others: what is its own is its bytes, in units of GP_ALIGNMENT. */
static PyObject *buffer_get_physical_bytes(struct memory_object *self, void *unused)
{
    (void)unused;
    size_t units = self->size / GP_ALIGNMENT + (self->size % GP_ALIGNMENT != 0);
    return PyLong_FromSize_t(ext_memory_is_closed(self) ? 0 : units * GP_ALIGNMENT);
}

static PyObject *buffer_repr(struct memory_object *self)
{
    char size[32];
    ext_size_text(self->size, size);
    const char *device = gp_device_name(self->pool->device);
    if (ext_memory_is_closed(self))
        return PyUnicode_FromFormat("<growpool.Buffer: %s on %s, closed>", size, device);
    return PyUnicode_FromFormat("<growpool.Buffer: %s on %s at %p>", size, device,
                                (void *)self->address);
}

static PyGetSetDef buffer_getset[] = {
    {"size", (getter)ext_memory_get_size, NULL, "Bytes, as asked for.", NULL},
    {"physical_bytes", (getter)buffer_get_physical_bytes, NULL,
     "Bytes of chunks that it takes up: its size rounded up to 512; 0 when closed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    buffer_doc,
    "Memory of a pool: made by Pool.allocate(), given back by close() or when the object goes.\n\n"
    "The address never changes. On host memory the buffer protocol gives writable bytes, so\n"
    "numpy.frombuffer(buffer, dtype) works; everywhere DLPack does, and view() for a shape and a\n"
    "dtype. While such an export lives, close() raises BufferError; the memory stays as long as "
    "it.\n\n"
    "Notes\n-----\n"
    "Any thread. Going out of scope counts as a last use on the stream it was allocated on: call\n"
    "record_stream() or close(stream) where that is another one.");

static PyType_Slot buffer_slots[] = {
    {Py_tp_doc, (void *)buffer_doc},
    {Py_tp_getset, buffer_getset},
    {Py_tp_repr, buffer_repr},
    EXT_MEMORY_SLOTS,
    {0, NULL},
};

static PyType_Spec buffer_spec = {
    .name = "growpool.Buffer",
    .basicsize = sizeof(struct memory_object),
    .flags = EXT_MEMORY_FLAGS,
    .slots = buffer_slots,
};

int ext_add_buffer(PyObject *module, struct module_state *state)
{
    return ext_add_type(module, &buffer_spec, state->memory_type, &state->buffer_type);
}
