/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of element types, and the forms in which callers name one.
 */
#include "dtype.h"

#include <stdbool.h>
#include <string.h>

#include "dlpack_abi.h"

const struct ext_dtype ext_dtype_uint8 = {"uint8", "B", "|u1", DL_UINT, 1};

static const struct ext_dtype dtypes[] = {
    {"bool", "?", "|b1", DL_BOOL, 1},          {"int8", "b", "|i1", DL_INT, 1},
    {"int16", "h", "<i2", DL_INT, 2},          {"int32", "i", "<i4", DL_INT, 4},
    {"int64", "q", "<i8", DL_INT, 8},          {"uint16", "H", "<u2", DL_UINT, 2},
    {"uint32", "I", "<u4", DL_UINT, 4},        {"uint64", "Q", "<u8", DL_UINT, 8},
    {"float16", "e", "<f2", DL_FLOAT, 2},      {"bfloat16", NULL, NULL, DL_BFLOAT, 2},
    {"float32", "f", "<f4", DL_FLOAT, 4},      {"float64", "d", "<f8", DL_FLOAT, 8},
    {"complex64", "Zf", "<c8", DL_COMPLEX, 8}, {"complex128", "Zd", "<c16", DL_COMPLEX, 16},
};

/* "=f4" is "<f4" on every machine that CUDA runs on; for one byte any order will do. */
static bool is_typestr(const struct ext_dtype *dtype, const char *text)
{
    if (dtype->typestr == NULL || strchr("<>=|", text[0]) == NULL ||
        strcmp(text + 1, dtype->typestr + 1) != 0)
        return false;
    return dtype->bytes == 1 || text[0] == '<' || text[0] == '=';
}

static bool is_called(const struct ext_dtype *dtype, const char *text)
{
    return strcmp(dtype->name, text) == 0 || (text[0] != '\0' && is_typestr(dtype, text));
}

/* PyTorch shows its dtypes as "torch.float32". NULL without an exception: none is called so. */
static const struct ext_dtype *find(const char *text)
{
    if (strncmp(text, "torch.", 6) == 0)
        text += 6;
    if (is_called(&ext_dtype_uint8, text))
        return &ext_dtype_uint8;
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
        if (is_called(&dtypes[i], text))
            return &dtypes[i];
    }
    return NULL;
}

static const struct ext_dtype *unknown(PyObject *object)
{
    PyErr_Format(
        PyExc_ValueError,
        "unknown dtype %.200R: use bool, int8 to int64, uint8 to uint64, float16, bfloat16, "
        "float32, float64, complex64, complex128, or a typestr such as '<f4' in this "
        "machine's byte order",
        object);
    return NULL;
}

/* The attribute if it is text, else NULL; exceptions other than AttributeError stay raised. */
static PyObject *text_attribute(PyObject *object, const char *name)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (value == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Clear();
        return NULL;
    }
    if (!PyUnicode_Check(value))
        Py_CLEAR(value);
    return value;
}

/* What the object calls itself: a NumPy dtype by `name`, a scalar type by `__name__`, anything else, such
 * as a PyTorch dtype, by str(). New reference. */
static PyObject *name_of(PyObject *object)
{
    PyObject *name = text_attribute(object, "name");
    if (name == NULL && !PyErr_Occurred())
        name = text_attribute(object, "__name__");
    if (name == NULL && !PyErr_Occurred())
        name = PyObject_Str(object);
    return name;
}

/* NumPy's `name` does not tell the byte order, its `str` does. */
static int check_order(PyObject *object)
{
    PyObject *typestr = text_attribute(object, "str");
    if (typestr == NULL)
        return PyErr_Occurred() ? -1 : 0;
    bool foreign = PyUnicode_GET_LENGTH(typestr) > 0 && PyUnicode_READ_CHAR(typestr, 0) == '>';
    Py_DECREF(typestr);
    if (!foreign)
        return 0;
    (void)unknown(object);
    return -1;
}

const struct ext_dtype *ext_dtype_of(PyObject *object)
{
    const bool is_text = PyUnicode_Check(object);
    PyObject *name = is_text ? Py_NewRef(object) : name_of(object);
    if (name == NULL)
        return NULL;
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);
    const bool whole = text != NULL && strlen(text) == (size_t)length; /* no NUL in it */
    const struct ext_dtype *dtype = whole ? find(text) : NULL;
    Py_DECREF(name);
    if (text == NULL)
        return NULL;
    if (dtype == NULL && !is_text && !PyType_Check(object)) {
        PyObject *typestr = text_attribute(object, "str");
        if (typestr == NULL && !PyErr_Occurred())
            PyErr_Format(PyExc_TypeError,
                         "dtype must be a name such as 'float32', a typestr such as '<f4', or a "
                         "NumPy or PyTorch dtype, not %.200s",
                         Py_TYPE(object)->tp_name);
        if (typestr == NULL)
            return NULL;
        Py_DECREF(typestr);
    }
    if (dtype == NULL)
        return unknown(object);
    return !is_text && check_order(object) < 0 ? NULL : dtype;
}
