/* SPDX-License-Identifier: Apache-2.0
 *
 * A C extension of somebody else's that uses pools made in Python through growpool's capsule. It
 * includes the headers of an installed package, links to nothing, and shows what its test asks for.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <growpool/capi.h>

#include <pthread.h>

static const struct gp_c_api *gp;

PyMODINIT_FUNC PyInit_extension(void);

static PyObject *raise_status(gp_status status, const gp_error *error)
{
    return PyErr_Format(PyExc_RuntimeError, "%s: %s", gp->status_text(status), error->message);
}

/* ---- what it does with a pool ------------------------------------------------------------------ */

struct work {
    gp_pool *pool;
    size_t bytes;
    uintptr_t address;
    gp_status status;
    gp_error error;
};

static void allocate(struct work *work)
{
    gp_stream *stream = NULL;
    work->status = gp->pool_stream(work->pool, 0, &stream, &work->error);
    if (work->status != GP_OK)
        return;
    work->status =
        gp->pool_malloc(work->pool, work->bytes, stream, 0, &work->address, &work->error);
    gp->stream_release(stream);
}

static void *allocate_on_thread(void *argument)
{
    allocate(argument);
    return NULL;
}

static void allocate_elsewhere(struct work *work)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, allocate_on_thread, work) != 0) {
        work->status = GP_ERR_HOST_MEMORY;
        return;
    }
    pthread_join(thread, NULL);
}

/* allocate(pool, bytes, how) -> address; how: "attached", "detached" or "thread". */
static PyObject *py_allocate(PyObject *module, PyObject *args)
{
    PyObject *object;
    Py_ssize_t bytes;
    const char *how;
    (void)module;
    if (!PyArg_ParseTuple(args, "Ons", &object, &bytes, &how))
        return NULL;
    struct work work = {.bytes = (size_t)bytes};
    work.pool = gp->pool_of(object);
    if (work.pool == NULL)
        return NULL;
    if (how[0] == 'a') {
        allocate(&work);
    } else {
        Py_BEGIN_ALLOW_THREADS if (how[0] == 'd') allocate(&work);
        else allocate_elsewhere(&work);
        Py_END_ALLOW_THREADS
    }
    gp->pool_release(work.pool);
    return work.status == GP_OK ? PyLong_FromSize_t(work.address)
                                : raise_status(work.status, &work.error);
}

/* try_allocate(pool, bytes) -> address, or None where the pool would have to grow. Attached. */
static PyObject *py_try_allocate(PyObject *module, PyObject *args)
{
    PyObject *object;
    Py_ssize_t bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "On", &object, &bytes))
        return NULL;
    gp_pool *pool = gp->pool_of(object);
    if (pool == NULL)
        return NULL;
    gp_error error = {0};
    gp_stream *stream = NULL;
    uintptr_t address = 0;
    gp_status status = gp->pool_stream(pool, 0, &stream, &error);
    if (status == GP_OK)
        status = gp->pool_try_malloc(pool, (size_t)bytes, stream, 0, &address, &error);
    gp->stream_release(stream);
    gp->pool_release(pool);
    if (status == GP_NOT_READY)
        Py_RETURN_NONE;
    return status == GP_OK ? PyLong_FromSize_t(address) : raise_status(status, &error);
}

/* free(pool, address): attached, since it never waits. */
static PyObject *py_free(PyObject *module, PyObject *args)
{
    PyObject *object;
    Py_ssize_t address;
    (void)module;
    if (!PyArg_ParseTuple(args, "On", &object, &address))
        return NULL;
    gp_pool *pool = gp->pool_of(object);
    if (pool == NULL)
        return NULL;
    gp_error error = {0};
    gp_status status = gp->pool_free(pool, (uintptr_t)address, NULL, 0, &error);
    gp->pool_release(pool);
    if (status != GP_OK)
        return raise_status(status, &error);
    Py_RETURN_NONE;
}

/* trim(pool) -> bytes released. Detached. */
static PyObject *py_trim(PyObject *module, PyObject *object)
{
    (void)module;
    gp_pool *pool = gp->pool_of(object);
    if (pool == NULL)
        return NULL;
    gp_error error = {0};
    size_t released = 0;
    gp_status status;
    Py_BEGIN_ALLOW_THREADS status = gp->pool_trim(pool, 0, 0, &released, &error);
    Py_END_ALLOW_THREADS gp->pool_release(pool);
    return status == GP_OK ? PyLong_FromSize_t(released) : raise_status(status, &error);
}

/* ---- a reference that outlives the Python object ----------------------------------------------- */

static gp_pool *held;

static PyObject *py_hold(PyObject *module, PyObject *object)
{
    (void)module;
    held = gp->pool_of(object);
    if (held == NULL)
        return NULL;
    Py_RETURN_NONE;
}

/* held_physical_bytes() of the pool that is held. */
static PyObject *py_held_physical_bytes(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    gp_pool_stats stats;
    gp->pool_get_stats(held, &stats);
    return PyLong_FromSize_t(stats.physical_bytes);
}

/* close_held(): closes it and lets go of it. */
static PyObject *py_close_held(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    gp_error error = {0};
    gp_status status;
    Py_BEGIN_ALLOW_THREADS status = gp->pool_close(held, &error);
    gp->pool_release(held);
    held = NULL;
    Py_END_ALLOW_THREADS if (status != GP_OK) return raise_status(status, &error);
    Py_RETURN_NONE;
}

/* ---- versions ---------------------------------------------------------------------------------- */

/* import_table(wanted) -> (version, size) of what gp_c_api_import() gives. */
static PyObject *py_import_table(PyObject *module, PyObject *wanted)
{
    (void)module;
    const struct gp_c_api *table = gp_c_api_import((uint32_t)PyLong_AsUnsignedLong(wanted));
    return table != NULL ? Py_BuildValue("II", (unsigned)table->version, (unsigned)table->size)
                         : NULL;
}

/* fake_capsule(version, size): a capsule as another growpool would have it. */
static PyObject *py_fake_capsule(PyObject *module, PyObject *args)
{
    static struct gp_c_api fake;
    unsigned version, size;
    (void)module;
    if (!PyArg_ParseTuple(args, "II", &version, &size))
        return NULL;
    fake.version = version;
    fake.size = size;
    return PyCapsule_New(&fake, GP_C_API_CAPSULE, NULL);
}

static PyMethodDef methods[] = {
    {"allocate", py_allocate, METH_VARARGS, NULL},
    {"try_allocate", py_try_allocate, METH_VARARGS, NULL},
    {"free", py_free, METH_VARARGS, NULL},
    {"trim", py_trim, METH_O, NULL},
    {"hold", py_hold, METH_O, NULL},
    {"held_physical_bytes", py_held_physical_bytes, METH_NOARGS, NULL},
    {"close_held", py_close_held, METH_NOARGS, NULL},
    {"import_table", py_import_table, METH_O, NULL},
    {"fake_capsule", py_fake_capsule, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "extension", .m_size = -1,
                                        .m_methods = methods};

PyMODINIT_FUNC PyInit_extension(void)
{
    gp = gp_c_api_import(GP_C_API_VERSION);
    PyObject *module = gp != NULL ? PyModule_Create(&definition) : NULL;
    if (module != NULL &&
        PyModule_AddIntConstant(module, "TABLE_BYTES", (long)sizeof(struct gp_c_api)) < 0)
        Py_CLEAR(module);
    return module;
}
