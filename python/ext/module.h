/* SPDX-License-Identifier: Apache-2.0
 *
 * What the extension's types share: the module's state, and how each type joins the module. State is
 * reached through the type of an object (none of a type made in Python exists: what can be subclassed
 * cannot be made), so there is no static object.
 */
#ifndef EXT_MODULE_H
#define EXT_MODULE_H

#include "py.h"

struct module_state {
    PyTypeObject *pool_type;
    PyTypeObject *memory_type; /* the base of the next four */
    PyTypeObject *buffer_type;
    PyTypeObject *growable_type;
    PyTypeObject *range_type;
    PyTypeObject *view_type;
    PyTypeObject *chunk_type;
    PyTypeObject *device_backing_type;
    PyTypeObject *host_numa_backing_type;
    PyTypeObject *caching_backing_type;
    PyTypeObject *host_stream_type;
    PyTypeObject *cuda_stream_type;
    PyTypeObject *stats_type;
    PyTypeObject *limit_result_type;
    PyTypeObject *release_result_type;

    /* Classes of python/growpool/_errors.py. */
    PyObject *error;
    PyObject *out_of_memory_error;
    PyObject *limit_exceeded_error;
    PyObject *address_space_error;
    PyObject *driver_error;
    PyObject *capture_error;
    PyObject *pool_state_error;
    PyObject *release_warning;

    /* Attribute names that arguments are asked for. */
    PyObject *name_alloc;
    PyObject *name_free;
    PyObject *name_cuda_stream_protocol; /* __cuda_stream__ */
    PyObject *name_cuda_stream; /* PyTorch */
    PyObject *name_ptr; /* CuPy */
    PyObject *name_device_id;
    PyObject *name_index; /* torch.device */
    PyObject *name_id; /* cupy.cuda.Device */
    PyObject *name_type;
};

/* Valid for instances of growpool's own types only. */
static inline struct module_state *ext_state(PyObject *self)
{
    return PyType_GetModuleState(Py_TYPE(self));
}

/* The same for a type that may be anybody's: NULL, and nothing raised, for types that are not ours. */
struct module_state *ext_state_of_type(PyTypeObject *type);

/* Each makes its heap types and puts them into the state and the module. 0, or -1 with an exception. */
int ext_add_pool(PyObject *module, struct module_state *state);
int ext_add_pool_views(PyObject *module, struct module_state *state);
int ext_add_memory(PyObject *module, struct module_state *state); /* before the next four */
int ext_add_buffer(PyObject *module, struct module_state *state);
int ext_add_growable(PyObject *module, struct module_state *state);
int ext_add_range(PyObject *module, struct module_state *state);
int ext_add_view(PyObject *module, struct module_state *state);
int ext_add_chunk(PyObject *module, struct module_state *state);
int ext_add_backings(PyObject *module, struct module_state *state);
int ext_add_host_stream(PyObject *module, struct module_state *state);
int ext_add_cuda_stream(PyObject *module, struct module_state *state);
int ext_add_capi(PyObject *module);
#ifdef GROWPOOL_TESTING
int ext_add_sim(PyObject *module, struct module_state *state);
int ext_add_testing(PyObject *module);
#endif

/* Makes a type from its spec, keeps it in *slot and adds it to the module. `base` NULL: object. */
int ext_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base, PyTypeObject **slot);

#endif
