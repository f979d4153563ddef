/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies and fills without another library. Between memory of one device they are enqueued and left to
 * run; memory that growpool does not own, or whose pool cannot wait for the stream, is done with when
 * the call returns. Both ends are pinned while they are used here.
 */
#include "copies.h"

#include "args.h"
#include "errors.h"
#include "host_stream.h"
#include "range.h"

/* ---- ends of a copy -------------------------------------------------------------------------- */

/* growpool memory, or memory of any object with the buffer protocol. */
struct end {
    struct ext_part part; /* root NULL: of another library */
    struct ext_pin pin;
    Py_buffer buffer; /* obj NULL: growpool memory */
    uintptr_t address;
    size_t bytes;
};

static void close_end(struct end *end)
{
    ext_unpin(&end->pin);
    PyBuffer_Release(&end->buffer);
}

static int open_foreign(PyObject *object, bool writable, struct end *end)
{
    if (!PyObject_CheckBuffer(object)) {
        PyErr_Format(PyExc_TypeError,
                     "a copy needs growpool memory or an object with the buffer protocol, not "
                     "%.200s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    if (PyObject_GetBuffer(object, &end->buffer, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return -1;
    end->address = (uintptr_t)end->buffer.buf;
    end->bytes = (size_t)end->buffer.len;
    return 0;
}

/* What does not need a pin yet: the address and how many bytes there are. */
static int open_end(struct module_state *state, PyObject *object, bool writable, struct end *end)
{
    *end = (struct end){.pin = {0}};
    struct memory_object *memory = ext_memory_of(state, object);
    if (memory == NULL)
        return open_foreign(object, writable, end);
    if (ext_memory_whole(memory, &end->part) < 0)
        return -1;
    end->address = end->part.address;
    end->bytes = end->part.bytes;
    return 0;
}

static gp_device *device_of(const struct end *end)
{
    return end->part.root != NULL ? end->part.root->pool->device : NULL;
}

static bool is_host(const struct end *end)
{
    gp_device *device = device_of(end);
    return device == NULL || gp_device_kind_of(device) == GP_DEVICE_HOST;
}

/* ---- one copy ------------------------------------------------------------------------------- */

struct copy {
    struct end own; /* of the object whose method was called */
    struct end other;
    struct end *lead; /* the one whose pool and stream do the copy */
    bool into_own;
    bool wait; /* the other end is done with before the call returns */
    bool stuck; /* it may not be: the device could not be waited for */
};

/* Cuts the part out of the own end that the other one fills or takes. Without an offset both are the
 * same size. */
static int fit(struct copy *copy, const size_t *offset)
{
    if (offset == NULL) {
        if (copy->own.bytes == copy->other.bytes)
            return 0;
        PyErr_Format(PyExc_ValueError,
                     "the memory has %zu bytes and the other side %zu: both must be the same size, "
                     "or say with offset= where a part begins",
                     copy->own.bytes, copy->other.bytes);
        return -1;
    }
    struct ext_part whole = copy->own.part;
    if (ext_memory_within(&whole, *offset, copy->other.bytes, &copy->own.part) < 0)
        return -1;
    copy->own.address = copy->own.part.address;
    copy->own.bytes = copy->own.part.bytes;
    return 0;
}

static int choose_lead(struct copy *copy)
{
    gp_device *own = device_of(&copy->own), *other = device_of(&copy->other);
    copy->wait = own != other;
    copy->lead = is_host(&copy->own) && !is_host(&copy->other) ? &copy->other : &copy->own;
    if (own == other || is_host(&copy->own) || is_host(&copy->other))
        return 0;
    PyErr_Format(PyExc_ValueError, "a copy between %s and %s is not supported: go by host memory",
                 gp_device_name(own), gp_device_name(other));
    return -1;
}

static int check_overlap(const struct copy *copy)
{
    const bool comparable = !copy->wait || is_host(copy->lead);
    uintptr_t a = copy->own.address, b = copy->other.address;
    if (!comparable || (a < b ? b - a : a - b) >= copy->own.bytes)
        return 0;
    PyErr_Format(PyExc_ValueError,
                 "the %zu bytes at %p and at %p overlap: a copy between them is undefined",
                 copy->own.bytes, (void *)a, (void *)b);
    return -1;
}

static int pin_end(struct end *end)
{
    return end->part.root != NULL ? ext_pin(&end->part, 0, &end->pin) : 0;
}

/* The lead's stream; and, when the other end belongs to another pool, the same one as that pool knows
 * it. New references. */
static int find_streams(struct copy *copy, PyObject *stream_object, gp_stream **stream,
                        gp_stream **other)
{
    struct ext_part *lead = &copy->lead->part;
    struct pool_object *pool = lead->root->pool;
    *other = NULL;
    if (ext_pool_stream(pool, pool->pool, stream_object, EXT_STREAM_OPTIONAL, stream) < 0 ||
        (*stream == NULL && ext_memory_own_stream(lead, stream) < 0))
        return -1;
    if (copy->wait)
        return 0;
    struct pool_object *other_pool = copy->other.part.root->pool;
    if (other_pool == pool) {
        *other = gp_stream_retain(*stream);
        return 0;
    }
    gp_error error = {0};
    gp_status status = gp_pool_stream(other_pool->pool, gp_stream_handle(*stream), other, &error);
    if (status == GP_OK && ext_pool_keep_from(other_pool, *other, pool, *stream) == 0)
        return 0;
    if (status != GP_OK)
        ext_raise(ext_state((PyObject *)lead->root), status, &error, NULL);
    gp_stream_release(*other);
    gp_stream_release(*stream);
    return -1;
}

/* No stream guards the other end of a copy that waits. A wait that failed is tried once more; should that
 * fail too, the end stays held for ever rather than that the device works on memory that is gone. */
static gp_status finish(struct copy *copy, gp_pool *pool, gp_stream *stream, gp_error *error)
{
    gp_status status = gp_pool_synchronize(pool, stream, true, error);
    copy->stuck = status != GP_OK && gp_pool_synchronize(pool, stream, true, NULL) != GP_OK;
    return status;
}

/* Detached. Waits first where it has to wait anyway: that can be interrupted with nothing begun. */
static gp_status run(struct copy *copy, gp_stream *stream, gp_stream *other, gp_error *error)
{
    gp_pool *pool = copy->lead->part.root->pool->pool;
    const struct end *to = copy->into_own ? &copy->own : &copy->other;
    const struct end *from = copy->into_own ? &copy->other : &copy->own;
    gp_status status = GP_OK;
    if (copy->wait)
        status = gp_pool_synchronize(pool, stream, false, error);
    if (status == GP_OK)
        status = ext_memory_record(&copy->lead->part, stream, error);
    if (status == GP_OK && !copy->wait)
        status = ext_memory_record(&copy->other.part, other, error);
    if (status == GP_OK)
        status = gp_pool_copy(pool, to->address, from->address, to->bytes, stream, error);
    return status == GP_OK && copy->wait ? finish(copy, pool, stream, error) : status;
}

/* A worker that waits for its own stream would wait for ever. */
static int check_worker(const struct copy *copy, const gp_stream *stream)
{
    if (!copy->wait || !is_host(copy->lead) || !ext_host_stream_is_current(gp_stream_id(stream)))
        return 0;
    PyErr_SetString(PyExc_RuntimeError,
                    "a copy that has to wait, on the stream's own worker, would wait for itself: "
                    "pass stream=0, the calling thread");
    return -1;
}

static int run_pinned(struct copy *copy, PyObject *stream_object)
{
    gp_stream *stream, *other;
    if (find_streams(copy, stream_object, &stream, &other) < 0)
        return -1;
    int result = check_worker(copy, stream);
    if (result == 0) {
        gp_pool *pool = gp_pool_retain(copy->lead->part.root->pool->pool);
        struct ext_call call;
        ext_call_begin(&call, ext_state((PyObject *)copy->lead->part.root), 0);
        gp_status status = run(copy, stream, other, &call.error);
        gp_pool_release(pool);
        result = ext_call_end(&call, status);
    }
    gp_stream_release(stream);
    gp_stream_release(other);
    return result;
}

static PyObject *copy_method(struct memory_object *self, PyObject *const *given, bool into_own)
{
    struct module_state *state = ext_state((PyObject *)self);
    struct copy copy = {.into_own = into_own};
    const bool cut = given[2] != NULL && given[2] != Py_None;
    size_t offset = 0;
    if (ext_optional_size(given[2], "offset", 0, &offset) < 0 ||
        open_end(state, given[0], !into_own, &copy.other) < 0)
        return NULL;
    /* Asked last, and no Python code runs until both ends are pinned: the offset's __index__ or the other
     * side's buffer protocol may have ended this memory, and its address may be another's by now. */
    int result = open_end(state, (PyObject *)self, into_own, &copy.own);
    if (result == 0)
        result = fit(&copy, cut ? &offset : NULL);
    if (result == 0)
        result = choose_lead(&copy);
    if (result == 0 && copy.own.bytes > 0 &&
        (check_overlap(&copy) < 0 || pin_end(&copy.own) < 0 || pin_end(&copy.other) < 0 ||
         run_pinned(&copy, given[1]) < 0))
        result = -1;
    PyObject *raised = py_take_exception();
    if (!copy.stuck || copy.lead == &copy.own)
        close_end(&copy.own);
    if (!copy.stuck || copy.lead == &copy.other)
        close_end(&copy.other);
    py_raise_exception(raised);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- the methods ---------------------------------------------------------------------------- */

#define COPY_NOTES                                                                                 \
    "stream : stream, optional\n"                                                                  \
    "    Where the copy is enqueued; the memory's own stream if left out. Between memory of two\n" \
    "    devices it is one of the GPU's. It becomes an owner.\n"                                   \
    "offset : int or str, optional\n"                                                              \
    "    Bytes of this memory in front of the part that is meant, which then has the other "       \
    "side's\n"                                                                                     \
    "    size. Left out: all of it, and both sizes must be equal.\n\n"                             \
    "Raises\n------\n"                                                                             \
    "ValueError\n    The sizes do not match, the two overlap, or a part is not committed.\n"       \
    "TypeError, OverflowError\n    A wrong argument.\n"                                            \
    "BufferError, or what the other side raises\n"                                                 \
    "    It is not contiguous, or not writable where it must be.\n"                                \
    "CaptureError\n    It would have to wait for a stream that is being captured; nothing was "    \
    "copied.\n"                                                                                    \
    "PoolStateError\n    One of the two is closed.\n"                                              \
    "DriverError\n    The device failed. When even the wait for a copy under way did, the other "  \
    "side\n    stays held for ever: the device may still use it.\n\n"                              \
    "Notes\n-----\n"                                                                               \
    "Any thread. Between growpool memory of one device the copy runs behind the call, in the "     \
    "order of\n"                                                                                   \
    "its stream: after work on other streams only if you ordered them. With anything else it is "  \
    "done\n"                                                                                       \
    "when the call returns, which may wait; signals are noticed until the copy begins."

const char ext_copy_from_doc[] =
    PyDoc_STR("copy_from($self, /, source, stream=None, *, offset=None)\n--\n\n"
              "Copy bytes into this memory.\n\n"
              "Parameters\n----------\n"
              "source : Buffer, Growable, Range, View or bytes-like\n" COPY_NOTES);

PyObject *ext_memory_copy_from(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
    static const char *const names[] = {"source", "stream", "offset", NULL};
    static const struct ext_signature signature = {"copy_from", names, 1, 2};
    PyObject *given[3];
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0)
        return NULL;
    return copy_method(self, given, true);
}

const char ext_copy_to_doc[] =
    PyDoc_STR("copy_to($self, /, target, stream=None, *, offset=None)\n--\n\n"
              "Copy the bytes of this memory out.\n\n"
              "Parameters\n----------\n"
              "target : Buffer, Growable, Range, View or writable bytes-like\n" COPY_NOTES);

PyObject *ext_memory_copy_to(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
    static const char *const names[] = {"target", "stream", "offset", NULL};
    static const struct ext_signature signature = {"copy_to", names, 1, 2};
    PyObject *given[3];
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0)
        return NULL;
    return copy_method(self, given, false);
}

/* ---- filling -------------------------------------------------------------------------------- */

/* The parts of one object that are filled by one call. */
struct fill {
    struct ext_part *parts;
    struct ext_pin *pins;
    size_t count;
};

static void end_fill(struct fill *fill)
{
    for (size_t i = 0; fill->pins != NULL && i < fill->count; i++)
        ext_unpin(&fill->pins[i]);
    PyMem_Free(fill->pins);
    PyMem_Free(fill->parts);
}

/* A Range by its committed parts, anything else as a whole. */
static int find_parts(struct memory_object *self, struct fill *fill)
{
    struct ext_part whole;
    gp_interval one, *intervals = &one;
    if (ext_memory_whole(self, &whole) < 0)
        return -1;
    one = (gp_interval){0, whole.bytes};
    fill->count = 1;
    if (self->kind == EXT_RANGE && (intervals = ext_range_committed(self, &fill->count)) == NULL)
        return -1;
    fill->parts = PyMem_Calloc(fill->count + 1, sizeof(*fill->parts));
    fill->pins = PyMem_Calloc(fill->count + 1, sizeof(*fill->pins));
    int result = fill->parts != NULL && fill->pins != NULL ? 0 : -1;
    if (result < 0)
        PyErr_NoMemory();
    for (size_t i = 0; result == 0 && i < fill->count; i++) {
        size_t left = whole.bytes - intervals[i].offset; /* the last page may reach further */
        size_t bytes = intervals[i].bytes < left ? intervals[i].bytes : left;
        result = ext_memory_within(&whole, intervals[i].offset, bytes, &fill->parts[i]);
        if (result == 0)
            result = ext_pin(&fill->parts[i], 0, &fill->pins[i]);
    }
    if (intervals != &one)
        PyMem_Free(intervals);
    return result;
}

static gp_status run_fill(const struct fill *fill, unsigned char value, gp_stream *stream,
                          gp_error *error)
{
    gp_pool *pool = fill->parts[0].root->pool->pool;
    gp_status status = ext_memory_record(&fill->parts[0], stream, error);
    for (size_t i = 0; status == GP_OK && i < fill->count; i++)
        status =
            gp_pool_fill(pool, fill->parts[i].address, fill->parts[i].bytes, value, stream, error);
    return status;
}

static int fill_parts(const struct fill *fill, unsigned char value, PyObject *stream_object)
{
    gp_stream *stream;
    if (fill->count == 0 || fill->parts[0].bytes == 0)
        return 0;
    struct pool_object *pool = fill->parts[0].root->pool;
    if (ext_pool_stream(pool, pool->pool, stream_object, EXT_STREAM_OPTIONAL, &stream) < 0 ||
        (stream == NULL && ext_memory_own_stream(&fill->parts[0], &stream) < 0))
        return -1;
    struct ext_call call;
    ext_call_begin(&call, ext_state((PyObject *)pool), 0);
    gp_status status = run_fill(fill, value, stream, &call.error);
    gp_stream_release(stream);
    return ext_call_end(&call, status);
}

static int parse_byte(PyObject *object, unsigned char *out)
{
    size_t value;
    if (PyUnicode_Check(object) || PyBool_Check(object) || !PyIndex_Check(object)) {
        PyErr_Format(PyExc_TypeError, "value must be an int from 0 to 255, not %.200s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    if (ext_size(object, "value", &value) < 0)
        return -1;
    if (value > 255) {
        PyErr_Format(PyExc_ValueError, "value must be 0 to 255, got %zu", value);
        return -1;
    }
    *out = (unsigned char)value;
    return 0;
}

const char ext_fill_doc[] = PyDoc_STR(
    "fill($self, /, value, stream=None)\n--\n\n"
    "Set every byte; of a Range every committed one.\n\n"
    "Parameters\n----------\n"
    "value : int\n    0 to 255.\n"
    "stream : stream, optional\n"
    "    Where it is enqueued; the memory's own stream if left out. It becomes an owner.\n\n"
    "Raises\n------\n"
    "TypeError, ValueError, OverflowError\n    A wrong argument.\n"
    "PoolStateError\n    It is closed.\n\n"
    "Notes\n-----\nAny thread. Does not wait for the stream.");

PyObject *ext_memory_fill(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames)
{
    static const char *const names[] = {"value", "stream", NULL};
    static const struct ext_signature signature = {"fill", names, 1, 2};
    PyObject *given[2];
    struct fill fill = {NULL, NULL, 0};
    unsigned char value;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 || parse_byte(given[0], &value) < 0)
        return NULL;
    int result = find_parts(self, &fill);
    if (result == 0)
        result = fill_parts(&fill, value, given[1]);
    end_fill(&fill);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}
