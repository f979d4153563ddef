/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices and streams as arguments: which forms are understood, and what is said about the others.
 */
#include "args.h"

#include <limits.h>
#include <string.h>

#include "cuda_stream.h"
#include "errors.h"
#include "gate.h"
#include "host_stream.h"

/* Detached: opening the first GPU loads and initialises the driver. */
static int open_device(struct module_state *state, gp_device_kind kind, int ordinal,
                       gp_device **out)
{
    gp_error error = {0};
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_device_open(kind, ordinal, out, &error);
    ext_reenter_python(saved);
    if (status == GP_OK)
        return 0;
    ext_raise(state, status, &error, NULL);
    return -1;
}

static int open_default(struct module_state *state, gp_device **out)
{
    gp_error error = {0};
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_cuda_available(&error);
    if (status == GP_OK)
        status = gp_device_open(GP_DEVICE_CUDA, 0, out, &error);
    else
        status = gp_device_open(GP_DEVICE_HOST, 0, out, &error);
    ext_reenter_python(saved);
    if (status == GP_OK)
        return 0;
    ext_raise(state, status, &error, NULL);
    return -1;
}

static int unknown_device(PyObject *object)
{
    PyErr_Format(
        PyExc_ValueError,
        "unknown device %R: use 'cuda:N' or an int N for a GPU, 'host' for this machine's memory",
        object);
    return -1;
}

/* The decimal number that is all of `text`, or -1. */
static int ordinal_of(const char *text)
{
    int value = 0;
    if (*text == '\0')
        return -1;
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9' || value > 100000)
            return -1;
        value = value * 10 + (*text - '0');
    }
    return value;
}

static int device_of_text(struct module_state *state, PyObject *object, gp_device **out)
{
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(object, &length);
    if (text == NULL)
        return -1;
    if (strlen(text) != (size_t)length) /* a NUL would hide what follows it */
        return unknown_device(object);
    if (strcmp(text, "host") == 0 || strcmp(text, "cpu") == 0)
        return open_device(state, GP_DEVICE_HOST, 0, out);
    if (strcmp(text, "cuda") == 0)
        return open_device(state, GP_DEVICE_CUDA, 0, out);
    if (strncmp(text, "cuda:", 5) == 0 && ordinal_of(text + 5) >= 0)
        return open_device(state, GP_DEVICE_CUDA, ordinal_of(text + 5), out);
#ifdef GROWPOOL_TESTING
    if (strncmp(text, "sim:", 4) == 0 && ordinal_of(text + 4) >= 0)
        return open_device(state, GP_DEVICE_SIM, ordinal_of(text + 4), out);
#endif
    return unknown_device(object);
}

static int device_of_int(struct module_state *state, PyObject *object, unsigned flags,
                         gp_device **out)
{
    int overflow;
    PyObject *number = PyNumber_Index(object);
    if (number == NULL)
        return -1;
    long id = PyLong_AsLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (id == -1 && PyErr_Occurred())
        return -1;
    if (overflow != 0) { /* without the number: thousands of digits cannot be shown */
        PyErr_SetString(PyExc_ValueError,
                        "unknown device: the int is far out of range; use 'cuda:N' or "
                        "an int N for a GPU, 'host' for this machine's memory");
        return -1;
    }
    if (id > 100000 || id < -100000)
        return unknown_device(object);
    if (id >= 0)
        return open_device(state, GP_DEVICE_CUDA, (int)id, out);
    if (!(flags & EXT_DEVICE_CALLBACK_IDS))
        return unknown_device(object);
    if (id == -1)
        return open_device(state, GP_DEVICE_HOST, 0, out);
#ifdef GROWPOOL_TESTING
    return open_device(state, GP_DEVICE_SIM, (int)(-2 - id), out);
#else
    return unknown_device(object);
#endif
}

/* The attribute, or NULL without an exception when there is none; else -1. An AttributeError out of
 * Python code, say from inside a property, looks the same as no attribute: the first one is kept in
 * *masked, to be told with the error that comes of it. */
static int optional_attribute(PyObject *object, PyObject *name, PyObject **out, PyObject **masked)
{
    *out = PyObject_GetAttr(object, name);
    if (*out != NULL)
        return 0;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    PyObject *error = py_take_exception();
    PyObject *traceback = PyException_GetTraceback(error);
    if (*masked == NULL && traceback != NULL)
        *masked = Py_NewRef(error);
    Py_XDECREF(traceback);
    Py_DECREF(error);
    return 0;
}

/* Makes it the __cause__ of the TypeError that is raised, if one is. Takes the reference. */
static void tell_masked(PyObject *masked)
{
    if (masked == NULL || !PyErr_Occurred() || !PyErr_ExceptionMatches(PyExc_TypeError)) {
        Py_XDECREF(masked);
        return;
    }
    PyObject *raised = py_take_exception();
    PyObject *cause = PyException_GetCause(raised);
    if (cause == NULL)
        PyException_SetCause(raised, Py_NewRef(masked));
    Py_XDECREF(cause);
    Py_DECREF(masked);
    py_raise_exception(raised);
}

/* What torch.device says in `type`: 1 for "cpu", whose index means nothing, 0 for "cuda" or nothing,
 * -1 with an exception for any other kind. */
static int is_cpu_object(struct module_state *state, PyObject *object, PyObject **masked)
{
    PyObject *type;
    if (optional_attribute(object, state->name_type, &type, masked) < 0)
        return -1;
    int result = 0;
    if (type == NULL || !PyUnicode_Check(type))
        result = 0;
    else if (PyUnicode_CompareWithASCIIString(type, "cpu") == 0)
        result = 1;
    else if (PyUnicode_CompareWithASCIIString(type, "cuda") != 0) {
        PyErr_Format(PyExc_ValueError,
                     "a device of type %.200R cannot be used: only 'cuda' and 'cpu'", type);
        result = -1;
    }
    Py_XDECREF(type);
    return result;
}

/* 1: the object has no usable number. */
static int device_of_attributes(struct module_state *state, PyObject *object, PyObject **masked,
                                gp_device **out)
{
    PyObject *const names[] = {state->name_device_id, state->name_index, state->name_id};
    int result = 1;
    for (size_t i = 0; result > 0 && i < sizeof(names) / sizeof(names[0]); i++) {
        PyObject *id;
        if (optional_attribute(object, names[i], &id, masked) < 0)
            return -1;
        if (id == NULL)
            continue;
        if (id == Py_None && names[i] == state->name_index)
            result = open_device(state, GP_DEVICE_CUDA, 0, out);
        else if (PyIndex_Check(id) && !PyBool_Check(id))
            result = device_of_int(state, id, EXT_DEVICE_CALLBACK_IDS, out);
        Py_DECREF(id);
    }
    return result;
}

static int device_of_object(struct module_state *state, PyObject *object, gp_device **out)
{
    PyObject *masked = NULL;
    int result = is_cpu_object(state, object, &masked);
    if (result == 0)
        result = device_of_attributes(state, object, &masked, out);
    else if (result > 0)
        result = open_device(state, GP_DEVICE_HOST, 0, out);
    if (result > 0) {
        PyErr_Format(
            PyExc_TypeError,
            "device must be text such as 'cuda:0' or 'host', an int, or an object with device_id, "
            "index or id, not %.200s",
            Py_TYPE(object)->tp_name);
        result = -1;
    }
    tell_masked(masked);
    return result;
}

int ext_device(struct module_state *state, PyObject *object, unsigned flags, gp_device **out)
{
    if (object == NULL || object == Py_None)
        return flags & EXT_DEVICE_GPU ? open_device(state, GP_DEVICE_CUDA, 0, out)
                                      : open_default(state, out);
    if (PyUnicode_Check(object))
        return device_of_text(state, object, out);
    if (PyBool_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "device must not be a bool");
        return -1;
    }
    if (PyIndex_Check(object))
        return device_of_int(state, object, flags, out);
    return device_of_object(state, object, out);
}

/* ---- streams -------------------------------------------------------------------------------- */

static int handle_of_int(PyObject *object, uintptr_t *handle)
{
    PyObject *number = PyNumber_Index(object);
    if (number == NULL)
        return -1;
    size_t value = PyLong_AsSize_t(number);
    int negative = value == (size_t)-1 && PyErr_Occurred() != NULL;
    if (negative && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyObject *zero = PyLong_FromLong(0);
        PyErr_Clear();
        int below = zero != NULL ? PyObject_RichCompareBool(number, zero, Py_LT) : -1;
        Py_XDECREF(zero);
        if (below > 0)
            PyErr_SetString(PyExc_ValueError, "a stream handle must not be negative");
        else if (below == 0)
            PyErr_Format(PyExc_OverflowError,
                         "the int is too large for a stream handle: at most %zu", SIZE_MAX);
    }
    Py_DECREF(number);
    if (negative)
        return -1;
    *handle = value;
    return 0;
}

static int wrong_stream(PyObject *object, gp_device *device)
{
    const char *wanted =
        gp_device_kind_of(device) == GP_DEVICE_HOST
            ? "a growpool.host.Stream, its id, or None"
            : "None, an int handle, or an object with __cuda_stream__, cuda_stream or ptr";
    PyErr_Format(PyExc_TypeError, "a pool on %s cannot use a stream of type %.200s; it takes %s",
                 gp_device_name(device), Py_TYPE(object)->tp_name, wanted);
    return -1;
}

static bool is_version_0(PyObject *version)
{
    int overflow = 0;
    return PyLong_Check(version) && PyLong_AsLongAndOverflow(version, &overflow) == 0 &&
           overflow == 0;
}

/* Calls __cuda_stream__, or takes the tuple that older libraries have there. */
static int handle_of_protocol(PyObject *answer, uintptr_t *handle)
{
    PyObject *pair = PyCallable_Check(answer) ? PyObject_CallNoArgs(answer) : Py_NewRef(answer);
    if (pair == NULL)
        return -1;
    int result = -1;
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
        PyErr_Format(PyExc_TypeError, "__cuda_stream__ must give (version, handle), not %.200s",
                     Py_TYPE(pair)->tp_name);
    else if (!is_version_0(PyTuple_GET_ITEM(pair, 0)))
        PyErr_SetString(PyExc_TypeError,
                        "__cuda_stream__ of another version than the int 0 is not understood");
    else if (!PyIndex_Check(PyTuple_GET_ITEM(pair, 1)) || PyBool_Check(PyTuple_GET_ITEM(pair, 1)))
        PyErr_Format(PyExc_TypeError, "__cuda_stream__ must give an int handle, not %.200s",
                     Py_TYPE(PyTuple_GET_ITEM(pair, 1))->tp_name);
    else
        result = handle_of_int(PyTuple_GET_ITEM(pair, 1), handle);
    Py_DECREF(pair);
    return result;
}

static int handle_of_attributes(struct module_state *state, gp_device *device, PyObject *object,
                                PyObject **masked, uintptr_t *handle)
{
    PyObject *value;
    if (optional_attribute(object, state->name_cuda_stream_protocol, &value, masked) < 0)
        return -1;
    if (value != NULL) {
        int result = handle_of_protocol(value, handle);
        Py_DECREF(value);
        return result;
    }
    PyObject *const names[] = {state->name_cuda_stream, state->name_ptr};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (optional_attribute(object, names[i], &value, masked) < 0)
            return -1;
        if (value == NULL)
            continue;
        int result = PyIndex_Check(value) && !PyBool_Check(value) ? handle_of_int(value, handle)
                                                                  : wrong_stream(object, device);
        Py_DECREF(value);
        return result;
    }
    return wrong_stream(object, device);
}

static int handle_of_object(struct module_state *state, gp_device *device, PyObject *object,
                            uintptr_t *handle)
{
    PyObject *masked = NULL;
    int result = handle_of_attributes(state, device, object, &masked, handle);
    tell_masked(masked);
    return result;
}

int ext_stream(struct module_state *state, gp_device *device, PyObject *object, uintptr_t *handle,
               PyObject **keep)
{
    bool host = gp_device_kind_of(device) == GP_DEVICE_HOST;
    *keep = NULL;
    *handle = 0;
    if (object == NULL || object == Py_None)
        return 0;
    if (PyLong_CheckExact(object))
        return handle_of_int(object, handle);
    if (PyBool_Check(object) || PyUnicode_Check(object))
        return wrong_stream(object, device);
    if (PyIndex_Check(object))
        return handle_of_int(object, handle);
    int result;
    if (Py_IS_TYPE(object, state->host_stream_type))
        result = host ? ext_host_stream_handle(object, handle) : wrong_stream(object, device);
    else if (host)
        result = wrong_stream(object, device);
    else if (Py_IS_TYPE(object, state->cuda_stream_type))
        result = ext_cuda_stream_handle(object, device, handle);
    else
        result = handle_of_object(state, device, object, handle);
    if (result == 0)
        *keep = Py_NewRef(object);
    return result;
}

bool ext_stream_is_closed(struct module_state *state, PyObject *object, uintptr_t *handle)
{
    *handle = 0;
    if (object != NULL && Py_IS_TYPE(object, state->cuda_stream_type))
        return ext_cuda_stream_is_closed(object);
    return object != NULL && Py_IS_TYPE(object, state->host_stream_type) &&
           ext_host_stream_is_closed(object, handle);
}
