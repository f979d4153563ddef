/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Growable: memory whose address stays while its size changes.
 */
#include "args.h"
#include "range.h"

PyObject *ext_growable_new(struct pool_object *pool, size_t max_size, PyObject *stream)
{
    PyTypeObject *type = ext_state((PyObject *)pool)->growable_type;
    return (PyObject *)ext_range_make(pool, type, EXT_GROWABLE, max_size, stream);
}

PyDoc_STRVAR(
    resize_doc,
    "resize($self, /, size, stream=None, *, wait=True)\n--\n\n"
    "Change the size in place: the address and the contents below the smaller size stay.\n\n"
    "Growing maps new chunks behind the old ones and copies nothing, so doubling is cheap; what "
    "they\n"
    "contain is undefined. Shrinking gives back the whole chunks at the tail; one that the new end "
    "cuts\n"
    "stays and is counted as kept. Chunks are as large as the steps that made them: a pool with "
    "chunk_size\n"
    "equal to the granularity gives back everything to the page.\n\n"
    "Parameters\n----------\n"
    "size : int or str\n    Bytes, at most max_size.\n"
    "stream : stream, optional\n"
    "    Growing: where the new part is used first. Shrinking: where the last use of the tail was\n"
    "    enqueued. The growable's own stream if left out.\n"
    "wait : bool, optional\n"
    "    True: wait for the streams that own the tail, and return when its chunks were given "
    "back.\n"
    "    False: set them retiring and return; they go back in the background.\n\n"
    "Returns\n-------\nReleaseResult\n\n"
    "Raises\n------\n"
    "ValueError\n    More than max_size.\n"
    "BufferError\n    A view or an export uses a page that would go.\n"
    "CaptureError\n    A stream that would have to be waited for is being captured.\n"
    "LimitExceededError, OutOfMemoryError\n    There is no memory for the new part.\n"
    "PoolStateError\n    It is closed; or another thread resizes it now (reason 'busy').\n"
    "TypeError, OverflowError\n    A wrong argument.\n"
    "RuntimeError\n    Called by the pool's own callback.\n"
    "BaseException\n"
    "    Whatever alloc raised, or a signal handler while a growth waited. In all these cases the "
    "size is as\n"
    "    before. What free raised, if it is no Exception, or a signal handler while a shrink "
    "waited, comes\n"
    "    after the rest was done: `size` tells.\n\n"
    "Warns\n-----\nReleaseWarning\n    free raised an Exception; the chunk is in "
    "Pool.unreturned.\n\n"
    "Notes\n-----\nAny thread, one at a time. Notices signals while it waits.");

static PyObject *growable_resize(struct memory_object *self, PyObject *const *args,
                                 Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"size", "stream", "wait", NULL};
    static const struct ext_signature signature = {"resize", names, 1, 2};
    PyObject *given[3];
    struct ext_change change;
    gp_release_result result = {0, 0};
    size_t size;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_size(given[0], "size", &size) < 0 ||
        ext_change_begin(self, given[1], EXT_STREAM_OPTIONAL, given[2], &change) < 0)
        return NULL;
    gp_status status = gp_range_resize(self->range, size, change.stream, change.flags, &result,
                                       &change.call.error);
    if (ext_change_end(&change, status) < 0)
        return NULL;
    return ext_release_result(ext_state((PyObject *)self), &result);
}

static PyObject *growable_get_max_size(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->size);
}

static PyObject *growable_repr(struct memory_object *self)
{
    char size[32], most[32];
    const char *device = gp_device_name(self->pool->device);
    ext_size_text(ext_memory_size(self), size);
    ext_size_text(self->size, most);
    if (ext_memory_is_closed(self))
        return PyUnicode_FromFormat("<growpool.Growable: of %s on %s, closed>", most, device);
    return PyUnicode_FromFormat("<growpool.Growable: %s of %s on %s at %p>", size, most, device,
                                (void *)self->address);
}

static PyMethodDef growable_methods[] = {
    {"resize", (PyCFunction)(void (*)(void))growable_resize, METH_FASTCALL | METH_KEYWORDS,
     resize_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef growable_getset[] = {
    {"size", (getter)ext_memory_get_size, NULL, "Bytes now, as resize() was asked for.", NULL},
    {"max_size", (getter)growable_get_max_size, NULL, "Bytes that it can grow to.", NULL},
    {"granularity", (getter)ext_range_get_granularity, NULL,
     "Bytes of a page: the least that is mapped or given back.", NULL},
    {"physical_bytes", (getter)ext_range_get_physical_bytes, NULL,
     "Bytes of the chunks at its addresses, those on their way back too.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    growable_doc,
    "Memory that grows and shrinks in place: made by Pool.growable().\n\n"
    "The address never changes, so growing copies nothing, and whoever holds the address may go "
    "on.\n"
    "Everything that may use the memory pins it: arrays and views keep it from shrinking below "
    "them.\n\n"
    "Notes\n-----\n"
    "Any thread. Going out of scope counts as a last use on the stream it was made for: call\n"
    "record_stream() or close(stream) where that is another one.");

static PyType_Slot growable_slots[] = {
    {Py_tp_doc, (void *)growable_doc},
    {Py_tp_methods, growable_methods},
    {Py_tp_getset, growable_getset},
    {Py_tp_repr, growable_repr},
    EXT_MEMORY_SLOTS,
    {0, NULL},
};

static PyType_Spec growable_spec = {
    .name = "growpool.Growable",
    .basicsize = sizeof(struct memory_object),
    .flags = EXT_MEMORY_FLAGS,
    .slots = growable_slots,
};

int ext_add_growable(PyObject *module, struct module_state *state)
{
    return ext_add_type(module, &growable_spec, state->memory_type, &state->growable_type);
}
