/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameter names and sizes. Devices and streams are in args_device.c.
 */
#include "args.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

static Py_ssize_t name_count(const struct ext_signature *signature)
{
    Py_ssize_t count = 0;
    while (signature->names[count] != NULL)
        count++;
    return count;
}

static int set_by_name(const struct ext_signature *signature, PyObject *name, PyObject *value,
                       PyObject **out)
{
    for (Py_ssize_t i = 0; signature->names[i] != NULL; i++) {
        if (PyUnicode_CompareWithASCIIString(name, signature->names[i]) != 0)
            continue;
        if (out[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got two values for argument '%U'",
                         signature->function, name);
            return -1;
        }
        out[i] = value;
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'",
                 signature->function, name);
    return -1;
}

static int set_by_position(const struct ext_signature *signature, PyObject *const *args,
                           Py_ssize_t nargs, PyObject **out)
{
    if (nargs > signature->positional) {
        PyErr_Format(PyExc_TypeError,
                     "%s() takes at most %zd positional arguments but %zd were given",
                     signature->function, signature->positional, nargs);
        return -1;
    }
    memset(out, 0, (size_t)name_count(signature) * sizeof(*out));
    for (Py_ssize_t i = 0; i < nargs; i++)
        out[i] = args[i];
    return 0;
}

static int check_required(const struct ext_signature *signature, PyObject *const *out)
{
    for (Py_ssize_t i = 0; i < signature->required; i++) {
        if (out[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'",
                         signature->function, signature->names[i]);
            return -1;
        }
    }
    return 0;
}

int ext_parse(const struct ext_signature *signature, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames, PyObject **out)
{
    if (set_by_position(signature, args, nargs, out) < 0)
        return -1;
    Py_ssize_t keywords = kwnames != NULL ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t i = 0; i < keywords; i++) {
        if (set_by_name(signature, PyTuple_GET_ITEM(kwnames, i), args[nargs + i], out) < 0)
            return -1;
    }
    return check_required(signature, out);
}

int ext_parse_tuple(const struct ext_signature *signature, PyObject *args, PyObject *kwargs,
                    PyObject **out)
{
    if (set_by_position(signature, &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args), out) < 0)
        return -1;
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (kwargs != NULL && PyDict_Next(kwargs, &position, &name, &value)) {
        if (set_by_name(signature, name, value, out) < 0)
            return -1;
    }
    return check_required(signature, out);
}

static int too_big(const char *what)
{
    PyErr_Format(PyExc_OverflowError, "%s does not fit into an address: at most %zd bytes", what,
                 PY_SSIZE_T_MAX);
    return -1;
}

static int size_of_int(PyObject *object, const char *what, size_t *out)
{
    PyObject *number = PyNumber_Index(object);
    if (number == NULL)
        return -1;
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (value == -1 && PyErr_Occurred())
        return -1;
    if (value < 0 && overflow <= 0) {
        PyErr_Format(PyExc_ValueError, "%s must not be negative, got %R", what, object);
        return -1;
    }
    if (overflow > 0)
        return too_big(what);
    *out = (size_t)value;
    return 0;
}

/* Bytes of a unit, letters in any case; 0 for a unit that does not exist. */
static uint64_t unit_bytes(const char *unit)
{
    static const struct {
        const char *name;
        uint64_t bytes;
    } units[] = {
        {"", 1},
        {"b", 1},
        {"kb", UINT64_C(1000)},
        {"mb", UINT64_C(1000000)},
        {"gb", UINT64_C(1000000000)},
        {"tb", UINT64_C(1000000000000)},
        {"kib", UINT64_C(1) << 10},
        {"mib", UINT64_C(1) << 20},
        {"gib", UINT64_C(1) << 30},
        {"tib", UINT64_C(1) << 40},
    };
    char lower[4] = "";
    size_t length = strlen(unit);
    if (length > 3)
        return 0;
    for (size_t i = 0; i < length; i++)
        lower[i] = (char)tolower((unsigned char)unit[i]);
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcmp(lower, units[i].name) == 0)
            return units[i].bytes;
    }
    return 0;
}

struct decimal {
    unsigned __int128 whole;
    uint64_t fraction; /* of 10^-18 */
    bool too_big;
};

/* Reads "12", "12.5", ".5" and moves *text behind it; false when there is no number. */
static bool read_decimal(const char **text, struct decimal *out)
{
    const char *at = *text;
    size_t digits = 0;
    for (; isdigit((unsigned char)*at); at++, digits++) {
        out->whole = out->whole * 10 + (unsigned)(*at - '0');
        out->too_big |= out->whole > UINT64_MAX;
        if (out->too_big)
            out->whole = 0;
    }
    uint64_t weight = UINT64_C(100000000000000000);
    if (*at == '.') {
        for (at++; isdigit((unsigned char)*at); at++, digits++, weight /= 10)
            out->fraction += weight * (unsigned)(*at - '0');
    }
    *text = at;
    return digits > 0;
}

/* Parts of a byte are dropped. */
static int size_of_text(PyObject *object, const char *what, size_t *out)
{
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(object, &length);
    if (text == NULL)
        return -1;
    char copy[64];
    bool fits = (size_t)length < sizeof(copy) && strlen(text) == (size_t)length;
    memcpy(copy, fits ? text : "", fits ? (size_t)length + 1 : 1);
    for (size_t end = strlen(copy); end > 0 && isspace((unsigned char)copy[end - 1]); end--)
        copy[end - 1] = '\0';
    const char *at = copy;
    while (isspace((unsigned char)*at))
        at++;
    bool negative = *at == '-';
    at += negative ? 1 : 0;
    struct decimal number = {0};
    bool good = read_decimal(&at, &number);
    while (isspace((unsigned char)*at))
        at++;
    uint64_t unit = unit_bytes(at);
    if (!good || negative || unit == 0) {
        PyErr_Format(PyExc_ValueError,
                     negative && good
                         ? "%s must not be negative, got %R"
                         : "%s must be bytes or text such as '8 GiB' or '1.5 MB' (B, KB, "
                           "MB, GB, TB, KiB, MiB, GiB, TiB), got %R",
                     what, object);
        return -1;
    }
    unsigned __int128 bytes = number.whole * unit + (unsigned __int128)number.fraction * unit /
                                                        UINT64_C(1000000000000000000);
    if (number.too_big || bytes > (unsigned __int128)PY_SSIZE_T_MAX)
        return too_big(what);
    *out = (size_t)bytes;
    return 0;
}

int ext_size(PyObject *object, const char *what, size_t *out)
{
    if (PyUnicode_Check(object))
        return size_of_text(object, what, out);
    if (PyBool_Check(object) || !PyIndex_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be an int or text such as '8 GiB', not %.200s", what,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    return size_of_int(object, what, out);
}

int ext_optional_size(PyObject *object, const char *what, size_t fallback, size_t *out)
{
    if (object != NULL && object != Py_None)
        return ext_size(object, what, out);
    *out = fallback;
    return 0;
}

int ext_address(PyObject *object, const char *what, uintptr_t *out)
{
    if (PyBool_Check(object) || !PyIndex_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be an int, not %.200s", what,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    PyObject *number = PyNumber_Index(object);
    if (number == NULL)
        return -1;
    size_t value = PyLong_AsSize_t(number);
    Py_DECREF(number);
    if (value == (size_t)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError))
            PyErr_Format(PyExc_ValueError, "%s is no address: %R", what, object);
        return -1;
    }
    *out = value;
    return 0;
}

const char *ext_size_text(size_t bytes, char *buffer)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0;
    for (; value >= 1024 && unit < 4; unit++)
        value /= 1024;
    snprintf(buffer, 32, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return buffer;
}
