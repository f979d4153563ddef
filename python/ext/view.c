/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.View: a part of a Buffer, Growable or Range as an array with a shape and an element type, for
 * other libraries to take up. It pins its part and never changes it.
 */
#include "view.h"

#include "../../sync/timeline.h"
#include "args.h"
#include "errors.h"

#define MAX_DIMENSIONS 64 /* as the buffer protocol and NumPy have it */

void ext_view_part(struct memory_object *memory, struct ext_part *out)
{
    struct view_object *self = (struct view_object *)memory;
    *out =
        (struct ext_part){self->base, self->pin.range, memory->address, self->offset, memory->size};
}

/* ---- shapes --------------------------------------------------------------------------------- */

static int one_dimension(PyObject *object, Py_ssize_t *out)
{
    size_t size;
    if (PyUnicode_Check(object) || PyBool_Check(object) || !PyIndex_Check(object)) {
        PyErr_Format(PyExc_TypeError, "shape must be an int or a tuple of ints, not of %.200s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    if (ext_size(object, "a dimension", &size) < 0)
        return -1;
    *out = (Py_ssize_t)size;
    return 0;
}

/* Memory for `count` dimensions and as many strides. */
static Py_ssize_t *new_shape(Py_ssize_t count)
{
    Py_ssize_t *shape = PyMem_Calloc((size_t)(count > 0 ? 2 * count : 1), sizeof(*shape));
    if (shape == NULL)
        PyErr_NoMemory();
    return shape;
}

static Py_ssize_t *shape_of_tuple(PyObject *tuple, int *dimensions)
{
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    if (count > MAX_DIMENSIONS) {
        PyErr_Format(PyExc_ValueError, "a view has at most %d dimensions, not %zd", MAX_DIMENSIONS,
                     count);
        return NULL;
    }
    Py_ssize_t *shape = new_shape(count);
    for (Py_ssize_t i = 0; shape != NULL && i < count; i++) {
        if (one_dimension(PyTuple_GET_ITEM(tuple, i), &shape[i]) < 0) {
            PyMem_Free(shape);
            shape = NULL;
        }
    }
    *dimensions = (int)count;
    return shape;
}

static Py_ssize_t *parse_shape(PyObject *object, int *dimensions)
{
    PyObject *tuple;
    if (PyUnicode_Check(object) || PyBool_Check(object) || PyIndex_Check(object))
        tuple = PyTuple_Pack(1, object);
    else
        tuple = PySequence_Tuple(object);
    if (tuple == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError) && Py_TYPE(object)->tp_iter == NULL &&
            !PySequence_Check(object))
            PyErr_Format(PyExc_TypeError, "shape must be an int or a tuple of ints, not %.200s",
                         Py_TYPE(object)->tp_name);
        return NULL;
    }
    Py_ssize_t *shape = shape_of_tuple(tuple, dimensions);
    Py_DECREF(tuple);
    return shape;
}

/* Fills in the strides, C order, and gives the bytes of all elements. */
static int lay_out(struct view_object *self, size_t *bytes)
{
    Py_ssize_t *strides = self->shape + self->dimensions;
    size_t total = self->dtype->bytes;
    bool empty = false;
    for (int i = self->dimensions - 1; i >= 0; i--) {
        size_t count = (size_t)self->shape[i];
        strides[i] = (Py_ssize_t)total;
        empty |= count == 0;
        if (count > 1 && total > (size_t)PY_SSIZE_T_MAX / count) {
            PyErr_SetString(PyExc_OverflowError,
                            "the shape has more bytes than fit into an address");
            return -1;
        }
        total *= count > 1 ? count : 1;
    }
    *bytes = empty ? 0 : total;
    return 0;
}

/* ---- making --------------------------------------------------------------------------------- */

/* Pins [offset, offset + bytes) of `whole` for the new view. */
static int take_part(struct view_object *self, const struct ext_part *whole, size_t offset)
{
    size_t bytes;
    struct ext_part part;
    if (offset % self->dtype->bytes != 0) {
        PyErr_Format(PyExc_ValueError, "offset %zu is no multiple of the %d bytes of %s", offset,
                     self->dtype->bytes, self->dtype->name);
        return -1;
    }
    if (lay_out(self, &bytes) < 0 || ext_memory_within(whole, offset, bytes, &part) < 0)
        return -1;
    /* Of a view of a view: the inner offset may be odd for the new element type. */
    if (part.address % self->dtype->bytes != 0) {
        PyErr_Format(PyExc_ValueError, "address %p is no multiple of the %d bytes of %s",
                     (void *)part.address, self->dtype->bytes, self->dtype->name);
        return -1;
    }
    unsigned unknown = ext_pin_flags_for_export(part.root) & EXT_PIN_UNKNOWN;
    if (ext_pin(&part, unknown, &self->pin) < 0)
        return -1;
    self->base = (struct memory_object *)Py_NewRef(part.root);
    self->offset = part.offset;
    self->memory.address = part.bytes == 0 ? 0 : part.address;
    self->memory.size = part.bytes;
    self->memory.closed = false;
    return 0;
}

const char ext_view_method_doc[] = PyDoc_STR(
    "view($self, /, shape, dtype='uint8', *, offset=0)\n--\n\n"
    "A part of the memory as an array, for other libraries to take up.\n\n"
    "Parameters\n----------\n"
    "shape : int or tuple of int\n    Elements in each dimension; () is a single one.\n"
    "dtype : str or object, optional\n"
    "    'bool', 'int8' to 'int64', 'uint8' to 'uint64', 'float16', 'bfloat16', 'float32',\n"
    "    'float64', 'complex64' or 'complex128'; a typestr such as '<f4'; a NumPy or PyTorch\n"
    "    dtype.\n"
    "offset : int or str, optional\n"
    "    Bytes in front of the first element, a multiple of the element's size.\n\n"
    "Returns\n-------\nView\n\n"
    "Raises\n------\n"
    "ValueError\n    It would end behind the memory; a part is not committed; an odd offset; no "
    "such\n    dtype.\n"
    "TypeError, OverflowError\n    A wrong argument.\n"
    "PoolStateError\n    The memory is closed.\n\n"
    "Notes\n-----\n"
    "Any thread. While the view lives, its part is pinned: closing, shrinking or decommitting it "
    "raises\nBufferError.");

PyObject *ext_view_method(struct memory_object *memory, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames)
{
    static const char *const names[] = {"shape", "dtype", "offset", NULL};
    static const struct ext_signature signature = {"view", names, 1, 2};
    struct module_state *state = ext_state((PyObject *)memory);
    PyObject *given[3];
    struct ext_part whole;
    size_t offset;
    int dimensions;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        ext_optional_size(given[2], "offset", 0, &offset) < 0)
        return NULL;
    /* Before the object is made: this may run Python code, which finds every object by the collector. */
    const struct ext_dtype *dtype = given[1] != NULL ? ext_dtype_of(given[1]) : &ext_dtype_uint8;
    Py_ssize_t *shape = dtype != NULL ? parse_shape(given[0], &dimensions) : NULL;
    if (shape == NULL)
        return NULL;
    struct view_object *self =
        (struct view_object *)ext_memory_new(memory->pool, state->view_type, EXT_VIEW);
    if (self == NULL) {
        PyMem_Free(shape);
        return NULL;
    }
    self->dtype = dtype;
    self->shape = shape;
    self->dimensions = dimensions;
    /* Asked last: what the arguments are made of may have closed the memory. */
    if (ext_memory_whole(memory, &whole) == 0 && take_part(self, &whole, offset) == 0)
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* ---- closing -------------------------------------------------------------------------------- */

int ext_view_close(struct memory_object *memory)
{
    struct view_object *self = (struct view_object *)memory;
    if (self->exports > 0) {
        PyErr_Format(PyExc_BufferError,
                     "the view of %zu bytes has %zu live exports: drop the arrays and memoryviews "
                     "on it before closing it",
                     memory->size, self->exports);
        return -1;
    }
    memory->closed = true;
    ext_unpin(&self->pin);
    return 0;
}

PyDoc_STRVAR(close_doc,
             "close($self, /)\n--\n\n"
             "Let go of the memory, which stays with the object that the view was made of.\n\n"
             "What was handed out by DLPack holds the memory itself. What took up the\n"
             "__cuda_array_interface__ does not: nothing may use it any more. A second call does\n"
             "nothing.\n\n"
             "Raises\n------\nBufferError\n    Memoryviews on the view are alive; nothing "
             "changed.\n\n"
             "Notes\n-----\nAny thread. Never waits.");

static PyObject *view_close(struct memory_object *self, PyObject *unused)
{
    (void)unused;
    if (ext_view_close(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- the buffer protocol --------------------------------------------------------------------- */

/* One dimension at most is longer than 1: then C and Fortran order are the same. */
static bool is_both_orders(const struct view_object *self)
{
    int longer = 0;
    for (int i = 0; i < self->dimensions; i++)
        longer += self->shape[i] > 1;
    return longer <= 1 || self->memory.size == 0;
}

static int check_export(struct view_object *self, int flags)
{
    if (ext_memory_check_open(&self->memory) < 0)
        return -1;
    if (!gp_device_is_host_accessible(self->memory.pool->device))
        PyErr_Format(PyExc_BufferError, "the CPU cannot read memory of %s",
                     gp_device_name(self->memory.pool->device));
    else if (self->dtype->format == NULL)
        PyErr_Format(PyExc_BufferError,
                     "the buffer protocol has no %s: use DLPack, or a view of uint16",
                     self->dtype->name);
    else if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && !is_both_orders(self))
        PyErr_SetString(PyExc_BufferError, "the view is in C order, not in Fortran order");
    else
        return 0;
    return -1;
}

static int view_getbuffer(struct view_object *self, Py_buffer *view, int flags)
{
    static char nothing[16];
    view->obj = NULL;
    if (check_export(self, flags) < 0)
        return -1;
    const bool shaped = (flags & PyBUF_ND) == PyBUF_ND;
    *view = (Py_buffer){
        .buf = self->memory.address != 0 ? (void *)self->memory.address : (void *)nothing,
        .obj = Py_NewRef(self),
        .len = (Py_ssize_t)self->memory.size,
        .itemsize = self->dtype->bytes,
        .format = (flags & PyBUF_FORMAT) != 0 ? (char *)(uintptr_t)self->dtype->format : NULL,
        .ndim = shaped ? self->dimensions : 1,
        .shape = shaped && self->dimensions > 0 ? self->shape : NULL,
    };
    if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES && view->shape != NULL)
        view->strides = self->shape + self->dimensions;
    self->exports++;
    return 0;
}

static void view_releasebuffer(struct view_object *self, Py_buffer *view)
{
    (void)view;
    self->exports--;
}

/* ---- what it shows --------------------------------------------------------------------------- */

static PyObject *view_get_shape(struct view_object *self, void *unused)
{
    (void)unused;
    PyObject *tuple = PyTuple_New(self->dimensions);
    for (int i = 0; tuple != NULL && i < self->dimensions; i++) {
        PyObject *dimension = PyLong_FromSsize_t(self->shape[i]);
        if (dimension == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, i, dimension);
    }
    return tuple;
}

static PyObject *view_get_dtype(struct view_object *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(self->dtype->name);
}

static PyObject *view_get_base(struct view_object *self, void *unused)
{
    (void)unused;
    return Py_NewRef(self->base);
}

/* The owner's stream as the interface counts: 1 for the legacy default stream, never 0. None for one that
 * was forgotten: its work is done, and its handle may be another stream's by now. */
static PyObject *interface_stream(struct view_object *self)
{
    struct ext_part part;
    gp_stream *stream;
    ext_view_part(&self->memory, &part);
    if (ext_memory_own_stream(&part, &stream) < 0)
        return NULL;
    uintptr_t handle = stream != NULL ? gp_stream_handle(stream) : 0;
    bool forgotten = stream != NULL && gp__stream_is_forgotten(stream);
    gp_stream_release(stream);
    if (forgotten)
        Py_RETURN_NONE;
    return PyLong_FromSize_t(handle != 0 ? handle : 1);
}

static PyObject *view_get_cuda_array_interface(struct view_object *self, void *unused)
{
    gp_device *device = self->memory.pool->device;
    if (gp_device_kind_of(device) != GP_DEVICE_CUDA)
        return PyErr_Format(PyExc_AttributeError,
                            "__cuda_array_interface__ is for memory of a GPU; this is on %s",
                            gp_device_name(device));
    if (self->dtype->typestr == NULL)
        return PyErr_Format(PyExc_AttributeError,
                            "__cuda_array_interface__ has no %s: use DLPack, or a view of uint16",
                            self->dtype->name);
    if (ext_memory_check_open(&self->memory) < 0)
        return NULL;
    PyObject *stream = interface_stream(self);
    PyObject *shape = stream != NULL ? view_get_shape(self, unused) : NULL;
    if (shape == NULL) {
        Py_XDECREF(stream);
        return NULL;
    }
    return Py_BuildValue("{sisNsss(KO)sOsN}", "version", 3, "shape", shape, "typestr",
                         self->dtype->typestr, "data", (unsigned long long)self->memory.address,
                         Py_False, "strides", Py_None, "stream", stream);
}

static PyObject *view_repr(struct view_object *self)
{
    const char *device = gp_device_name(self->memory.pool->device);
    PyObject *shape = view_get_shape(self, NULL);
    if (shape == NULL)
        return NULL;
    PyObject *text =
        PyUnicode_FromFormat("<growpool.View: %R of %s on %s%s>", shape, self->dtype->name, device,
                             ext_memory_is_closed(&self->memory) ? ", closed" : "");
    Py_DECREF(shape);
    return text;
}

/* ---- life ----------------------------------------------------------------------------------- */

static int view_traverse(struct view_object *self, visitproc visit, void *arg)
{
    Py_VISIT(self->base);
    return ext_memory_traverse(&self->memory, visit, arg);
}

static void view_dealloc(struct view_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->memory.weak_references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    ext_unpin(&self->pin);
    PyMem_Free(self->shape);
    Py_XDECREF(self->base);
    Py_DECREF(self->memory.pool);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef view_methods[] = {
    {"close", (PyCFunction)view_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef view_getset[] = {
    {"shape", (getter)view_get_shape, NULL, "Elements in each dimension: a tuple of int.", NULL},
    {"dtype", (getter)view_get_dtype, NULL, "The element type's name, such as 'float32'.", NULL},
    {"base", (getter)view_get_base, NULL, "The Buffer, Growable or Range that it is a part of.",
     NULL},
    {"__cuda_array_interface__", (getter)view_get_cuda_array_interface, NULL,
     "Version 3, on GPUs alone. Who takes it up must keep the view.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    view_doc,
    "A part of a Buffer, Growable or Range as an array: made by view().\n\n"
    "Other libraries take it up by DLPack (numpy.from_dlpack(view) and its like), by the buffer\n"
    "protocol on the host, and by __cuda_array_interface__ on a GPU.\n\n"
    "Notes\n-----\n"
    "Any thread. It pins its part until it is closed or goes out of scope: the memory is not "
    "closed,\nshrunk or decommitted meanwhile.");

static PyType_Slot view_slots[] = {
    {Py_tp_doc, (void *)view_doc},
    {Py_tp_methods, view_methods},
    {Py_tp_getset, view_getset},
    {Py_tp_traverse, view_traverse},
    {Py_tp_finalize, ext_memory_finalize},
    {Py_tp_dealloc, view_dealloc},
    {Py_tp_repr, view_repr},
    {Py_bf_getbuffer, view_getbuffer},
    {Py_bf_releasebuffer, view_releasebuffer},
    {0, NULL},
};

static PyType_Spec view_spec = {
    .name = "growpool.View",
    .basicsize = sizeof(struct view_object),
    .flags = EXT_MEMORY_FLAGS,
    .slots = view_slots,
};

int ext_add_view(PyObject *module, struct module_state *state)
{
    return ext_add_type(module, &view_spec, state->memory_type, &state->view_type);
}
