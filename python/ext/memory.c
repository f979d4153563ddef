/* SPDX-License-Identifier: Apache-2.0
 *
 * The common base of Buffer, Growable, Range and View: what they show, how they are closed, what becomes
 * of them when nobody closes them. It never waits and never calls back.
 */
#include "memory.h"

#include "args.h"
#include "copies.h"
#include "dlpack.h"
#include "errors.h"
#include "gate.h"
#include "view.h"

/* ---- what every use asks first --------------------------------------------------------------- */

struct memory_object *ext_memory_new(struct pool_object *pool, PyTypeObject *type,
                                     enum ext_memory_kind kind)
{
    struct memory_object *self = (struct memory_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->pool = (struct pool_object *)Py_NewRef(pool);
    self->kind = kind;
    self->closed = true;
    return self;
}

struct memory_object *ext_memory_of(struct module_state *state, PyObject *object)
{
    return PyObject_TypeCheck(object, state->memory_type) ? (struct memory_object *)object : NULL;
}

bool ext_memory_is_closed(const struct memory_object *self)
{
    if (self->closed || self->pool->pool == NULL)
        return true;
    return self->range != NULL ? gp_range_is_closed(self->range)
                               : gp_pool_is_closed(self->pool->pool);
}

static const char *noun(const struct memory_object *self)
{
    switch (self->kind) {
    case EXT_BLOCK:
        return "the buffer";
    case EXT_GROWABLE:
        return "the growable";
    case EXT_RANGE:
        return "the range";
    case EXT_VIEW:
        break;
    }
    return "the view";
}

/* A finishing pool takes no more work, though its objects still hold their memory. */
int ext_memory_check_open(const struct memory_object *self)
{
    bool closed = ext_memory_is_closed(self);
    if (!closed && !self->pool->finishing)
        return 0;
    ext_raise_closed(ext_state((PyObject *)self), closed ? noun(self) : "the pool");
    return -1;
}

size_t ext_memory_size(const struct memory_object *self)
{
    if (self->kind != EXT_GROWABLE)
        return self->size;
    return self->range != NULL ? gp_range_size(self->range) : 0;
}

int ext_memory_whole(struct memory_object *self, struct ext_part *out)
{
    if (ext_memory_check_open(self) < 0)
        return -1;
    if (self->kind == EXT_VIEW)
        ext_view_part(self, out);
    else
        *out = (struct ext_part){self, self->range, self->address, 0, ext_memory_size(self)};
    return 0;
}

int ext_memory_within(const struct ext_part *part, size_t offset, size_t bytes,
                      struct ext_part *out)
{
    if (offset > part->bytes || bytes > part->bytes - offset) {
        PyErr_Format(PyExc_ValueError, "%zu bytes at offset %zu end behind the %zu bytes of %s",
                     bytes, offset, part->bytes, noun(part->root));
        return -1;
    }
    uintptr_t address = part->address == 0 ? 0 : part->address + offset;
    *out = (struct ext_part){part->root, part->range, address, part->offset + offset, bytes};
    return 0;
}

int ext_memory_own_stream(const struct ext_part *part, gp_stream **out)
{
    struct memory_object *root = part->root;
    *out = NULL;
    if (part->range != NULL)
        *out = gp_stream_retain(gp_range_stream(part->range));
    if (part->range != NULL || part->bytes == 0)
        return 0;
    gp_error error = {0};
    gp_status status = gp_pool_block_stream(root->pool->pool, root->address, out, &error);
    if (status == GP_OK)
        return 0;
    ext_raise(ext_state((PyObject *)root), status, &error, NULL);
    return -1;
}

gp_status ext_memory_record(const struct ext_part *part, gp_stream *stream, gp_error *error)
{
    if (part->range != NULL)
        return gp_range_record_stream(part->range, stream, error);
    return gp_pool_record_stream(part->root->pool->pool, part->root->address, stream, error);
}

/* ---- pins ----------------------------------------------------------------------------------- */

unsigned ext_pin_flags_for_export(const struct memory_object *root)
{
    bool host = gp_device_kind_of(root->pool->device) == GP_DEVICE_HOST;
    return host ? EXT_PIN_EXPORT : EXT_PIN_EXPORT | EXT_PIN_UNKNOWN;
}

static int raise_not_committed(const struct ext_part *part, unsigned flags)
{
    PyErr_Format(flags & EXT_PIN_EXPORT ? PyExc_BufferError : PyExc_ValueError,
                 "%zu bytes at offset %zu of %s are not all committed, of %zu that are: commit "
                 "them first, or use a view() of a part",
                 part->bytes, part->offset, noun(part->root),
                 gp_range_committed_bytes(part->range));
    return -1;
}

int ext_pin(const struct ext_part *part, unsigned flags, struct ext_pin *out)
{
    const struct memory_object *root = part->root;
    const bool unknown = (flags & EXT_PIN_UNKNOWN) != 0;
    gp_error error = {0};
    gp_status status;
    *out = (struct ext_pin){0};
    if (part->bytes == 0)
        return 0;
    struct ext_pin pin = {root->pool->pool, part->range, root->address, part->offset, part->bytes};
    if (pin.range != NULL)
        status = gp_range_pin(pin.range, pin.offset, pin.bytes, unknown, &error);
    else
        status = gp_pool_pin(pin.pool, pin.address, unknown, &error);
    if (status == GP_OK) {
        *out = pin;
        return 0;
    }
    if (status == GP_ERR_ARGUMENT && pin.range != NULL)
        return raise_not_committed(part, flags);
    ext_raise(ext_state((PyObject *)root), status, &error, NULL);
    return -1;
}

void ext_unpin(struct ext_pin *pin)
{
    struct ext_pin ended = *pin;
    *pin = (struct ext_pin){0};
    PyThreadState *saved = ext_leave_to_free();
    if (ended.range != NULL)
        gp_range_unpin(ended.range, ended.offset, ended.bytes);
    else if (ended.pool != NULL)
        gp_pool_unpin(ended.pool, ended.address);
    ext_return_from_free(saved);
}

/* ---- closing -------------------------------------------------------------------------------- */

/* Counts as closed from the start: if others get to run meanwhile, they must not end it once more. */
static gp_status end_memory(struct memory_object *self, gp_stream *stream, gp_error *error)
{
    gp_status status;
    gp_pool *pool = gp_pool_retain(self->pool->pool);
    gp_range *range = self->range != NULL ? gp_range_retain(self->range) : NULL;
    self->closed = true;
    PyThreadState *saved = ext_leave_to_free();
    if (range != NULL)
        status = gp_range_close(range, stream, error);
    else
        status = gp_pool_free(pool, self->address, stream, GP_BLOCK_OBJECT, error);
    gp_range_release(range);
    gp_pool_release(pool);
    ext_return_from_free(saved);
    if (status == GP_ERR_STATE && error->reason == GP_REASON_CLOSED)
        status = GP_OK;
    self->closed = status == GP_OK;
    return status;
}

int ext_memory_close(struct memory_object *self, PyObject *stream_object)
{
    if (self->kind == EXT_VIEW)
        return ext_view_close(self);
    if (ext_memory_is_closed(self)) {
        self->closed = true;
        return 0;
    }
    if (ext_gate_has_ended())
        return 0;
    self->closed = self->kind == EXT_BLOCK &&
                   ext_pool_quick_free(self->pool, self->address, stream_object, GP_BLOCK_OBJECT);
    if (self->closed)
        return 0;
    gp_stream *stream = NULL;
    if (ext_pool_stream(self->pool, self->pool->pool, stream_object, EXT_STREAM_LAST_USE, &stream) <
        0)
        return -1;
    gp_error error = {0};
    gp_status status = GP_OK;
    /* Resolving the stream may have run Python code, and that may have closed us. */
    if (!ext_memory_is_closed(self))
        status = end_memory(self, stream, &error);
    gp_stream_release(stream);
    if (status != GP_OK) {
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
    "    Where its last use was enqueued; the stream it was made for if left out, or if it is a\n"
    "    closed growpool stream without work.\n\n"
    "Raises\n------\n"
    "BufferError\n    Arrays, memoryviews or views on it are alive; nothing changed.\n"
    "TypeError, ValueError\n    Not a stream of the pool's device.\n"
    "PoolStateError\n    This process is a fork of the one that made the pool.\n\n"
    "Notes\n-----\nAny thread. Never waits: the pool reuses the memory when its streams allow it.");

static PyObject *memory_close(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
    static const char *const names[] = {"stream", NULL};
    static const struct ext_signature signature = {"close", names, 0, 1};
    PyObject *given[1];
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_memory_close(self, given[0]) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *memory_enter(struct memory_object *self, PyObject *unused)
{
    (void)unused;
    return ext_memory_check_open(self) < 0 ? NULL : Py_NewRef(self);
}

/* Masks the body's exception only with one that is no Exception, such as KeyboardInterrupt. */
static PyObject *memory_exit(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    bool body_raised = nargs > 0 && args[0] != Py_None;
    if (ext_memory_close(self, NULL) == 0)
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
    "PoolStateError\n    It is closed.\n\n"
    "Notes\n-----\nAny thread. Never waits. The pool keeps the stream object alive.");

static PyObject *memory_record_stream(struct memory_object *self, PyObject *stream_object)
{
    struct ext_part part;
    gp_stream *stream = NULL;
    if (ext_memory_check_open(self) < 0 ||
        ext_pool_stream(self->pool, self->pool->pool, stream_object, 0, &stream) < 0)
        return NULL;
    gp_error error = {0};
    if (ext_memory_whole(self, &part) < 0) {
        gp_stream_release(stream);
        return NULL;
    }
    gp_status status = ext_memory_record(&part, stream, &error);
    gp_stream_release(stream);
    if (status == GP_OK)
        Py_RETURN_NONE;
    ext_raise(ext_state((PyObject *)self), status, &error, NULL);
    return NULL;
}

/* ---- the buffer protocol --------------------------------------------------------------------- */

/* Py_buffer.internal is the pin: of a growable the size changes while memoryviews live. */
int ext_memory_getbuffer(struct memory_object *self, Py_buffer *view, int flags)
{
    static char nothing[1];
    struct ext_part part;
    view->obj = NULL;
    if (ext_memory_whole(self, &part) < 0)
        return -1;
    if (!gp_device_is_host_accessible(self->pool->device)) {
        PyErr_Format(PyExc_BufferError, "the CPU cannot read memory of %s",
                     gp_device_name(self->pool->device));
        return -1;
    }
    struct ext_pin *pin = PyMem_Malloc(sizeof(*pin));
    if (pin == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    void *start = part.bytes == 0 ? (void *)nothing : (void *)part.address;
    if (ext_pin(&part, EXT_PIN_EXPORT, pin) < 0) {
        PyMem_Free(pin);
        return -1;
    }
    if (PyBuffer_FillInfo(view, (PyObject *)self, start, (Py_ssize_t)part.bytes, 0, flags) < 0) {
        ext_unpin(pin);
        PyMem_Free(pin);
        return -1;
    }
    view->internal = pin;
    return 0;
}

void ext_memory_releasebuffer(struct memory_object *self, Py_buffer *view)
{
    (void)self;
    struct ext_pin *pin = view->internal;
    ext_unpin(pin);
    PyMem_Free(pin);
}

/* ---- what it shows --------------------------------------------------------------------------- */

static PyObject *memory_get_handle(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(ext_memory_is_closed(self) ? 0 : self->address);
}

PyObject *ext_memory_get_size(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(ext_memory_size(self));
}

static PyObject *memory_get_is_closed(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(ext_memory_is_closed(self));
}

static PyObject *memory_get_device_id(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(gp_device_id(self->pool->device));
}

static PyObject *memory_get_device(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(gp_device_name(self->pool->device));
}

static PyObject *memory_get_pool(struct memory_object *self, void *unused)
{
    (void)unused;
    return Py_NewRef(self->pool);
}

static PyObject *memory_get_is_device_accessible(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(gp_device_is_device_accessible(self->pool->device));
}

static PyObject *memory_get_is_host_accessible(struct memory_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(gp_device_is_host_accessible(self->pool->device));
}

/* ---- life ----------------------------------------------------------------------------------- */

int ext_memory_traverse(struct memory_object *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->pool);
    return 0;
}

/* Silent whatever the pool says: it may be closed, of another process, or at its end. Memory that is
 * pinned ends with its last pin. There is no tp_clear: every cycle through an object goes on through
 * its pool, which lets go of everything in its own finaliser. */
void ext_memory_finalize(PyObject *object)
{
    struct memory_object *self = (struct memory_object *)object;
    gp_range *range = self->range;
    if (self->kind == EXT_VIEW)
        return; /* one that is resurrected is whole, and its memory is still pinned */
    gp_pool *pool = self->kind == EXT_BLOCK && !self->closed ? self->pool->pool : NULL;
    self->closed = true;
    self->range = NULL;
    if ((pool == NULL && range == NULL) ||
        (range == NULL && ext_pool_quick_free(self->pool, self->address, NULL, GP_BLOCK_OBJECT)))
        return;
    if (pool != NULL)
        gp_pool_retain(pool);
    /* A range may hold the last reference to a closed pool, whose backing lets go of Python objects. */
    PyThreadState *saved = range != NULL ? ext_leave_python() : ext_leave_to_free();
    if (pool != NULL)
        gp_pool_abandon(pool, self->address, GP_BLOCK_OBJECT);
    gp_pool_release(pool);
    gp_range_release(range);
    ext_return_from_free(saved);
}

void ext_memory_dealloc(struct memory_object *self)
{
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self) < 0)
        return;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    Py_DECREF(self->pool);
    type->tp_free(self);
    Py_DECREF(type);
}

#define METHOD(function) ((PyCFunction)(void (*)(void))(function))
#define KEYWORDS         (METH_FASTCALL | METH_KEYWORDS)

static PyMethodDef memory_methods[] = {
    {"close", METHOD(memory_close), KEYWORDS, close_doc},
    {"record_stream", METHOD(memory_record_stream), METH_O, record_stream_doc},
    {"view", METHOD(ext_view_method), KEYWORDS, ext_view_method_doc},
    {"copy_from", METHOD(ext_memory_copy_from), KEYWORDS, ext_copy_from_doc},
    {"copy_to", METHOD(ext_memory_copy_to), KEYWORDS, ext_copy_to_doc},
    {"fill", METHOD(ext_memory_fill), KEYWORDS, ext_fill_doc},
    {"__dlpack__", METHOD(ext_memory_dlpack), KEYWORDS, ext_dlpack_doc},
    {"__dlpack_device__", METHOD(ext_memory_dlpack_device), METH_NOARGS, ext_dlpack_device_doc},
    {"__enter__", METHOD(memory_enter), METH_NOARGS, EXT_ENTER_DOC},
    {"__exit__", METHOD(memory_exit), METH_FASTCALL, EXT_EXIT_DOC},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef memory_getset[] = {
    {"handle", (getter)memory_get_handle, NULL,
     "The address; 0 when empty or closed. Of all but views a multiple of 512.", NULL},
    {"nbytes", (getter)ext_memory_get_size, NULL, "Bytes.", NULL},
    {"is_closed", (getter)memory_get_is_closed, NULL, "True after close(), its own or its pool's.",
     NULL},
    {"device", (getter)memory_get_device, NULL, "The device as text, such as 'cuda:0'.", NULL},
    {"device_id", (getter)memory_get_device_id, NULL, "N for cuda:N, -1 for the host.", NULL},
    {"pool", (getter)memory_get_pool, NULL, "The pool that the memory belongs to.", NULL},
    {"is_device_accessible", (getter)memory_get_is_device_accessible, NULL,
     "True when a GPU can use the address.", NULL},
    {"is_host_accessible", (getter)memory_get_is_host_accessible, NULL,
     "True when the CPU can use the address, and the buffer protocol works.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef memory_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct memory_object, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(memory_doc, "What Buffer, Growable, Range and View have in common; made by none.\n\n"
                         "Use it for isinstance().");

static PyType_Slot memory_slots[] = {
    {Py_tp_doc, (void *)memory_doc},       {Py_tp_methods, memory_methods},
    {Py_tp_getset, memory_getset},         {Py_tp_members, memory_members},
    {Py_tp_traverse, ext_memory_traverse}, {Py_tp_finalize, ext_memory_finalize},
    {Py_tp_dealloc, ext_memory_dealloc},   {0, NULL},
};

static PyType_Spec memory_spec = {
    .name = "growpool.Memory",
    .basicsize = sizeof(struct memory_object),
    .flags = EXT_MEMORY_FLAGS | Py_TPFLAGS_BASETYPE,
    .slots = memory_slots,
};

int ext_add_memory(PyObject *module, struct module_state *state)
{
    return ext_add_type(module, &memory_spec, NULL, &state->memory_type);
}
