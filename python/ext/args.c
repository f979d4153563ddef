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
        PyErr_Format(PyExc_TypeError, "%s() takes at most %zd positional arguments, got %zd",
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
        if (!PyUnicode_Check(name)) { /* type_call() lets a dict with any keys through */
            PyErr_Format(PyExc_TypeError, "%s() keywords must be strings, not %.200s",
                         signature->function, Py_TYPE(name)->tp_name);
            return -1;
        }
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
    int overflow;
    PyObject *number = PyLong_CheckExact(object) ? Py_NewRef(object) : PyNumber_Index(object);
    if (number == NULL)
        return -1;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (value == -1 && PyErr_Occurred())
        return -1;
    if (value < 0 && overflow <= 0) {
        /* Without %R: an int of thousands of digits cannot be shown. */
        if (overflow < 0)
            PyErr_Format(PyExc_ValueError, "%s must not be negative", what);
        else
            PyErr_Format(PyExc_ValueError, "%s must not be negative, got %lld", what, value);
        return -1;
    }
    if (overflow > 0)
        return too_big(what);
    *out = (size_t)value;
    return 0;
}

/* A part of a text: the characters at..end. */
struct text {
    const char *at;
    const char *end;
};

static void skip_space(struct text *text)
{
    while (text->at < text->end && isspace((unsigned char)*text->at))
        text->at++;
}

/* The next character, or NUL at the end. */
static char peek(const struct text *text)
{
    return text->at < text->end ? *text->at : '\0';
}

/* Bytes of a unit, letters in any case; 0 for a unit that does not exist. */
static uint64_t unit_bytes(const struct text *unit)
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
    size_t length = (size_t)(unit->end - unit->at);
    if (length > 3)
        return 0;
    for (size_t i = 0; i < length; i++)
        lower[i] = (char)tolower((unsigned char)unit->at[i]);
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcmp(lower, units[i].name) == 0)
            return units[i].bytes;
    }
    return 0;
}

struct decimal {
    unsigned __int128 whole;
    uint64_t fraction; /* of 10^-18 */
    bool is_whole; /* nothing but zeros behind the point */
    bool too_big;
};

/* Reads "12", "12.5", ".5" and moves text->at behind it; false when there is no number. */
static bool read_decimal(struct text *text, struct decimal *out)
{
    size_t digits = 0;
    out->is_whole = true;
    for (; isdigit((unsigned char)peek(text)); text->at++, digits++) {
        out->whole = out->whole * 10 + (unsigned)(*text->at - '0');
        out->too_big |= out->whole > UINT64_MAX;
        if (out->too_big)
            out->whole = 0;
    }
    uint64_t weight = UINT64_C(100000000000000000);
    if (peek(text) == '.') {
        for (text->at++; isdigit((unsigned char)peek(text)); text->at++, digits++, weight /= 10) {
            out->fraction += weight * (unsigned)(*text->at - '0');
            out->is_whole &= *text->at == '0';
        }
    }
    return digits > 0;
}

static int not_a_size(PyObject *object, const char *what, bool negative)
{
    PyErr_Format(PyExc_ValueError,
                 negative ? "%s must not be negative, got %.200R"
                          : "%s must be bytes or text such as '8 GiB' or '1.5 MB' (B, KB, "
                            "MB, GB, TB, KiB, MiB, GiB, TiB), got %.200R",
                 what, object);
    return -1;
}

/* Of KB and more, parts of a byte are dropped: "1.1 GiB" is meant as about that much. A fraction of a
 * byte itself is a mistake, often a forgotten unit. */
static int size_of_text(PyObject *object, const char *what, size_t *out)
{
    Py_ssize_t length;
    const char *start = PyUnicode_AsUTF8AndSize(object, &length);
    if (start == NULL)
        return -1;
    struct text text = {start, start + length};
    while (text.end > text.at && isspace((unsigned char)text.end[-1]))
        text.end--;
    skip_space(&text);
    bool negative = peek(&text) == '-';
    text.at += negative ? 1 : 0;
    struct decimal number = {0};
    bool good = read_decimal(&text, &number);
    skip_space(&text);
    uint64_t unit = unit_bytes(&text);
    if (!good || negative || unit == 0)
        return not_a_size(object, what, negative && good);
    if (unit == 1 && !number.is_whole) {
        PyErr_Format(PyExc_ValueError, "%s must be whole bytes or have a unit, got %.200R", what,
                     object);
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
            PyErr_Format(PyExc_ValueError, "%s is no address: it is negative or too large", what);
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
