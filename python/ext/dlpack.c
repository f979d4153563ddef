/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory as DLPack tensors. What is handed out holds a pin and memory of malloc(), and nothing of
 * Python's, so that its deleter may run on any thread, with or without the interpreter, and after the
 * interpreter's end.
 */
#include "dlpack.h"

#include <stdlib.h>

#include "args.h"
#include "dlpack_abi.h"
#include "errors.h"
#include "view.h"

static const char legacy_name[] = "dltensor";
static const char versioned_name[] = "dltensor_versioned";

/* ---- tensors -------------------------------------------------------------------------------- */

struct export
{
    union {
        struct dl_managed_tensor legacy;
        struct dl_managed_tensor_versioned versioned;
    } managed;
    struct ext_pin pin;
    int64_t extents[]; /* the shape, then the strides */
};

static void end_export(struct export *export)
{
    ext_unpin(&export->pin);
    free(export);
}

static void delete_legacy(struct dl_managed_tensor *tensor)
{
    end_export(tensor->context);
}

static void delete_versioned(struct dl_managed_tensor_versioned *tensor)
{
    end_export(tensor->context);
}

/* Of a capsule that nobody took over; a consumer renames it. */
static void drop_capsule(PyObject *capsule)
{
    struct dl_managed_tensor *legacy = NULL;
    struct dl_managed_tensor_versioned *versioned = NULL;
    if (PyCapsule_IsValid(capsule, legacy_name))
        legacy = PyCapsule_GetPointer(capsule, legacy_name);
    else if (PyCapsule_IsValid(capsule, versioned_name))
        versioned = PyCapsule_GetPointer(capsule, versioned_name);
    if (legacy != NULL)
        legacy->deleter(legacy);
    if (versioned != NULL)
        versioned->deleter(versioned);
}

static struct dl_device device_of(gp_device *device)
{
    int id = gp_device_id(device);
    switch (gp_device_kind_of(device)) {
    case GP_DEVICE_CUDA:
        return (struct dl_device){DL_CUDA, id};
    case GP_DEVICE_HOST:
        return (struct dl_device){DL_CPU, 0};
    default:
        return (struct dl_device){DL_EXTENSION, -2 - id};
    }
}

/* What a whole Buffer, Growable or Range is seen as, beside views: bytes in one dimension. */
struct layout {
    const struct ext_dtype *dtype;
    int dimensions;
    const Py_ssize_t *shape; /* elements */
    const Py_ssize_t *strides; /* bytes */
    Py_ssize_t flat[2];
};

static void find_layout(struct memory_object *self, const struct ext_part *part, struct layout *out)
{
    const struct view_object *view = (struct view_object *)self;
    if (self->kind == EXT_VIEW) {
        *out = (struct layout){
            view->dtype, view->dimensions, view->shape, view->shape + view->dimensions, {0, 0}};
        return;
    }
    *out = (struct layout){&ext_dtype_uint8, 1, NULL, NULL, {(Py_ssize_t)part->bytes, 1}};
    out->shape = &out->flat[0];
    out->strides = &out->flat[1];
}

static struct export *new_export(struct memory_object *self, const struct ext_part *part,
                                 struct dl_tensor *tensor)
{
    struct layout layout;
    find_layout(self, part, &layout);
    size_t count = (size_t)layout.dimensions;
    struct export *export = calloc(1, sizeof(*export) + 2 * count * sizeof(int64_t));
    if (export == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        export->extents[i] = layout.shape[i];
        export->extents[count + i] = layout.strides[i] / layout.dtype->bytes;
    }
    *tensor = (struct dl_tensor){
        .data = part->bytes != 0 ? (void *)part->address : NULL,
        .device = device_of(self->pool->device),
        .dimensions = layout.dimensions,
        .type = {layout.dtype->code, (uint8_t)(layout.dtype->bytes * 8), 1},
        .shape = export->extents,
        .strides = export->extents + count,
    };
    return export;
}

/* Takes the pin over, also when it fails. */
static PyObject *make_capsule(struct memory_object *self, const struct ext_part *part,
                              struct ext_pin *pin, bool versioned)
{
    struct dl_tensor tensor;
    PyObject *capsule;
    struct export *export = new_export(self, part, &tensor);
    if (export == NULL) {
        ext_unpin(pin);
        return NULL;
    }
    export->pin = *pin;
    if (versioned) {
        export->managed.versioned = (struct dl_managed_tensor_versioned){
            {DL_MAJOR, DL_MINOR}, export, delete_versioned, 0, tensor};
        capsule = PyCapsule_New(&export->managed.versioned, versioned_name, drop_capsule);
    } else {
        export->managed.legacy = (struct dl_managed_tensor){tensor, export, delete_legacy};
        capsule = PyCapsule_New(&export->managed.legacy, legacy_name, drop_capsule);
    }
    if (capsule == NULL)
        end_export(export);
    return capsule;
}

/* ---- arguments ------------------------------------------------------------------------------ */

/* Two ints out of a tuple. */
static int parse_pair(PyObject *object, const char *what, long *first, long *second)
{
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 2 ||
        !PyIndex_Check(PyTuple_GET_ITEM(object, 0)) ||
        !PyIndex_Check(PyTuple_GET_ITEM(object, 1))) {
        /* Without %R: an int of thousands of digits cannot be shown. */
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of two ints, not %.200s%s", what,
                     Py_TYPE(object)->tp_name, PyTuple_Check(object) ? " of something else" : "");
        return -1;
    }
    PyObject *pair = Py_NewRef(object);
    *first = PyLong_AsLong(PyTuple_GET_ITEM(pair, 0));
    if (!PyErr_Occurred())
        *second = PyLong_AsLong(PyTuple_GET_ITEM(pair, 1));
    Py_DECREF(pair);
    return PyErr_Occurred() ? -1 : 0;
}

static int parse_version(PyObject *object, bool *versioned)
{
    long major = 0, minor;
    *versioned = false;
    if (object == NULL || object == Py_None)
        return 0;
    if (parse_pair(object, "max_version", &major, &minor) < 0)
        return -1;
    *versioned = major >= DL_MAJOR;
    return 0;
}

static int check_device(const struct memory_object *self, PyObject *object)
{
    long kind, id;
    if (object == NULL || object == Py_None)
        return 0;
    if (parse_pair(object, "dl_device", &kind, &id) < 0)
        return -1;
    struct dl_device own = device_of(self->pool->device);
    if (kind == own.kind && id == own.id)
        return 0;
    PyErr_Format(PyExc_BufferError,
                 "the memory is on %s, DLPack device (%d, %d), and an export moves nothing to "
                 "(%ld, %ld): allocate there and use copy_from()",
                 gp_device_name(self->pool->device), (int)own.kind, (int)own.id, kind, id);
    return -1;
}

static int check_copy(PyObject *object)
{
    if (object == NULL || object == Py_None || object == Py_False)
        return 0;
    if (object == Py_True)
        PyErr_SetString(PyExc_BufferError,
                        "an export shares memory and makes no copy: leave out copy=True, and copy "
                        "what you got, or allocate another buffer and use copy_from()");
    else
        PyErr_Format(PyExc_TypeError, "copy must be a bool or None, not %.200s",
                     Py_TYPE(object)->tp_name);
    return -1;
}

/* ---- streams -------------------------------------------------------------------------------- */

/* -1 in `object`. */
static int is_minus_one(PyObject *object)
{
    if (object == NULL || !PyLong_Check(object) || PyBool_Check(object))
        return 0;
    int overflow;
    long value = PyLong_AsLongAndOverflow(object, &overflow);
    if (value == -1 && overflow == 0)
        return PyErr_Occurred() ? -1 : 1;
    if (value != 0 || overflow != 0)
        return 0;
    PyErr_SetString(PyExc_ValueError,
                    "stream 0 is ambiguous: use 1 for the legacy default stream, 2 for the "
                    "per-thread one, or -1 for no synchronisation");
    return -1;
}

/* The consumer's stream, NULL for none (host, -1). None is the legacy default stream. */
static int consumer_stream(struct memory_object *self, PyObject *object, gp_stream **out)
{
    *out = NULL;
    if (gp_device_kind_of(self->pool->device) == GP_DEVICE_HOST) {
        if (object == NULL || object == Py_None)
            return 0;
        PyErr_SetString(PyExc_ValueError, "memory of the host is exported with stream=None");
        return -1;
    }
    int no_synchronisation = is_minus_one(object);
    if (no_synchronisation != 0)
        return no_synchronisation > 0 ? 0 : -1;
    return ext_pool_stream(self->pool, self->pool->pool, object, 0, out);
}

/* The consumer's stream becomes an owner and waits for the work of the memory's own. */
static int hand_over(const struct ext_part *part, gp_stream *consumer)
{
    gp_stream *own = NULL;
    if (consumer == NULL || part->bytes == 0)
        return 0;
    if (ext_memory_own_stream(part, &own) < 0)
        return -1;
    gp_pool *pool = gp_pool_retain(part->root->pool->pool);
    struct ext_call call;
    ext_call_begin(&call, ext_state((PyObject *)part->root), 0);
    gp_status status = ext_memory_record(part, consumer, &call.error);
    if (status == GP_OK)
        status = gp_pool_join(pool, own, consumer, &call.error);
    gp_stream_release(own);
    gp_pool_release(pool);
    return ext_call_end(&call, status);
}

/* ---- the methods ---------------------------------------------------------------------------- */

const char ext_dlpack_doc[] = PyDoc_STR(
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
    "The memory as a DLPack capsule, for from_dlpack() of another library: a view with its shape "
    "and\n"
    "dtype, anything else as bytes.\n\n"
    "Parameters\n----------\n"
    "stream : int or stream, optional\n"
    "    On a GPU the consumer's stream: None or 1 the legacy default stream, 2 the per-thread "
    "one, or\n"
    "    a handle. It becomes an owner of the memory and waits for the memory's own stream. -1: "
    "neither.\n"
    "    On the host None.\n"
    "max_version : tuple of int, optional\n    The capsule is versioned from (1, 0) on.\n"
    "dl_device : tuple of int, optional\n    The memory's own device; see __dlpack_device__().\n"
    "copy : bool, optional\n    False or None: nothing is copied.\n\n"
    "Raises\n------\n"
    "BufferError\n    Another device, or a copy, was asked for; parts of a Range are not "
    "committed.\n"
    "CaptureError\n    One of the two streams is being captured.\n"
    "TypeError, ValueError\n    A wrong argument; stream 0 is ambiguous.\n"
    "PoolStateError\n    It is closed.\n\n"
    "Notes\n-----\n"
    "Any thread. The memory lives until the consumer lets go of it, whatever becomes of this "
    "object and\n"
    "its pool; until then closing, shrinking or decommitting it raises BufferError. On a GPU its\n"
    "streams are unknown from then on: only an explicit trim(), drain() or close() gives its "
    "chunks\nback.");

PyObject *ext_memory_dlpack(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
    static const char *const names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    static const struct ext_signature signature = {"__dlpack__", names, 0, 0};
    PyObject *given[4];
    bool versioned;
    gp_stream *consumer = NULL;
    struct ext_part part;
    struct ext_pin pin;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 ||
        parse_version(given[1], &versioned) < 0 || check_device(self, given[2]) < 0 ||
        check_copy(given[3]) < 0 || ext_memory_check_open(self) < 0 ||
        consumer_stream(self, given[0], &consumer) < 0)
        return NULL;
    int result = ext_memory_whole(self, &part);
    if (result == 0)
        result = ext_pin(&part, ext_pin_flags_for_export(part.root), &pin);
    if (result == 0 && (result = hand_over(&part, consumer)) < 0)
        ext_unpin(&pin);
    gp_stream_release(consumer);
    return result == 0 ? make_capsule(self, &part, &pin, versioned) : NULL;
}

const char ext_dlpack_device_doc[] =
    PyDoc_STR("__dlpack_device__($self, /)\n--\n\n"
              "The device as DLPack names it: (1, 0) for the host, (2, N) for cuda:N.\n\n"
              "Notes\n-----\nAny thread.");

PyObject *ext_memory_dlpack_device(struct memory_object *self, PyObject *unused)
{
    (void)unused;
    struct dl_device device = device_of(self->pool->device);
    return Py_BuildValue("(ii)", (int)device.kind, (int)device.id);
}
