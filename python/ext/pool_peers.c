/* SPDX-License-Identifier: Apache-2.0
 *
 * The peers of a growpool.Pool: the argument and the property. Which devices can be peers is the core's
 * to say.
 */
#include "pool.h"

#include "args.h"

static int wrong_peers(PyObject *object)
{
    PyErr_Format(PyExc_TypeError,
                 "peers must be a list of devices such as ['cuda:1', 'cuda:2'], not %.200s",
                 Py_TYPE(object)->tp_name);
    return -1;
}

/* The devices of a tuple, into an array of its length. */
static int open_peers(struct module_state *state, PyObject *tuple, gp_device **devices)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        if (item == Py_None) { /* elsewhere None means the default device */
            PyErr_Format(PyExc_TypeError, "peers[%zd] must be a device, not None", i);
            return -1;
        }
        if (ext_device(state, item, 0, &devices[i]) < 0)
            return -1;
    }
    return 0;
}

int ext_pool_parse_peers(struct module_state *state, PyObject *object, gp_device ***devices,
                         size_t *count)
{
    *devices = NULL;
    *count = 0;
    if (object == NULL || object == Py_None)
        return 0;
    if (PyUnicode_Check(object) || PyBytes_Check(object) || PyByteArray_Check(object) ||
        PyDict_Check(object) || (!PySequence_Check(object) && !PyAnySet_Check(object)))
        return wrong_peers(object);
    PyObject *tuple = PySequence_Tuple(object);
    if (tuple == NULL)
        return -1;
    size_t length = (size_t)PyTuple_GET_SIZE(tuple);
    *devices = PyMem_Calloc(length + 1, sizeof(**devices));
    int result = *devices != NULL ? open_peers(state, tuple, *devices) : -1;
    if (*devices == NULL)
        PyErr_NoMemory();
    Py_DECREF(tuple);
    if (result < 0) {
        PyMem_Free(*devices);
        *devices = NULL;
        return -1;
    }
    *count = length;
    return 0;
}

PyObject *ext_pool_get_peers(struct pool_object *self, void *unused)
{
    (void)unused;
    size_t count = self->pool != NULL ? gp_pool_peer_count(self->pool) : 0;
    PyObject *names = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; names != NULL && i < count; i++) {
        PyObject *name = PyUnicode_FromString(gp_device_name(gp_pool_peer(self->pool, i)));
        if (name == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SET_ITEM(names, (Py_ssize_t)i, name);
    }
    return names;
}
