/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of capi.h and the capsule around it. It owns no list: every entry comes from the one there.
 */
#include "module.h"

#include "capi.h"
#include "errors.h"
#include "pool.h"

/* ---- conversions from Python objects: the PYTHON entries --------------------------------------- */

static gp_pool *capi_pool_of(void *object)
{
    PyTypeObject *type = Py_TYPE((PyObject *)object);
    struct module_state *state = ext_state_of_type(type);
    if (state == NULL || type != state->pool_type) {
        PyErr_Format(PyExc_TypeError, "pool_of takes a growpool.Pool, not %.200s", type->tp_name);
        return NULL;
    }
    gp_pool *pool = ext_pool_get(object);
    if (pool == NULL)
        return NULL;
    if (gp_pool_is_closed(pool)) {
        ext_raise_closed(state, "the pool");
        return NULL;
    }
    return gp_pool_retain(pool);
}

/* ---- the table --------------------------------------------------------------------------------- */

#define CORE_ENTRY(name)         .name = gp_##name,
#define PYTHON_ENTRY(type, name) .name = capi_##name,

static const struct gp_c_api table = {.version = GP_C_API_VERSION,
                                      .size = sizeof(struct gp_c_api),
                                      GP_C_API_TABLE(CORE_ENTRY, PYTHON_ENTRY)};

int ext_add_capi(PyObject *module)
{
    PyObject *capsule = PyCapsule_New((void *)&table, GP_C_API_CAPSULE, NULL);
    if (capsule == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "_C_API", capsule);
    Py_DECREF(capsule);
    return failed;
}
