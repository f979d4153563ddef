/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool._core: the module itself, its state, and the end of the process. Importing it touches no
 * driver.
 */
#include "module.h"

#include "../../sync/reaper.h"
#include "backing.h"
#include "errors.h"
#include "gate.h"
#include "pool.h"

#ifndef GROWPOOL_VERSION
#define GROWPOOL_VERSION "0"
#endif

#define SECOND_NS UINT64_C(1000000000)

PyMODINIT_FUNC PyInit__core(void);

int ext_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base, PyTypeObject **slot)
{
    *slot = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, (PyObject *)base);
    return *slot == NULL ? -1 : PyModule_AddType(module, *slot);
}

/* ---- functions ------------------------------------------------------------------------------- */

static gp_status ask_cuda(gp_error *error)
{
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_cuda_available(error);
    ext_reenter_python(saved);
    return status;
}

PyDoc_STRVAR(
    is_cuda_available_doc,
    "is_cuda_available()\n--\n\n"
    "True when a pool can be made on 'cuda:0'. Never raises, and makes no CUDA context.\n\n"
    "Notes\n-----\nAny thread. Asking is a use of growpool: processes forked afterwards cannot use "
    "it.");

static PyObject *is_cuda_available(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(ask_cuda(NULL) == GP_OK);
}

PyDoc_STRVAR(cuda_unavailable_reason_doc, "cuda_unavailable_reason()\n--\n\n"
                                          "What is missing for 'cuda:0', in a sentence: no driver, "
                                          "too old, no device, no virtual memory\n"
                                          "management. None when nothing is.\n\n"
                                          "Notes\n-----\nAny thread. Asking is a use of growpool: "
                                          "processes forked afterwards cannot use it.");

static PyObject *cuda_unavailable_reason(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    gp_error error = {0};
    gp_status status = ask_cuda(&error);
    if (status == GP_OK)
        Py_RETURN_NONE;
    const char *text = error.message[0] != '\0' ? error.message : gp_status_text(status);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

PyDoc_STRVAR(bookkeeping_bytes_doc,
             "bookkeeping_bytes()\n--\n\n"
             "Bytes of host memory that growpool's C core holds for its own records, all pools "
             "together.\n\n"
             "Python objects, such as chunks and buffers, are not in it. Reserved addresses are, "
             "with 16 bytes\n"
             "for each page, though only what was used of that becomes memory.\n\n"
             "Notes\n-----\nAny thread.");

static PyObject *bookkeeping_bytes(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromSize_t(gp_bookkeeping_bytes());
}

PyDoc_STRVAR(
    shut_down_doc,
    "_shut_down()\n--\n\n"
    "The end of the process, called by atexit: close the pools, let deliveries finish, close the "
    "gate\n"
    "between C and Python. Bounded in time, silent unless a callback raised, and irreversible.");

static PyObject *shut_down(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (ext_gate_is_closed())
        Py_RETURN_NONE;
    ext_gate_begin_end();
    uint64_t deadline = ext_now_ns() + 3 * SECOND_NS;
    ext_pool_close_all(deadline);
    PyThreadState *saved = ext_leave_python();
    /* The reaper first: once the gate is closed it would be parked in the middle of a delivery. It closes
     * the pools that were dropped. */
    uint64_t now = ext_now_ns();
    (void)gp__reaper_stop((now < deadline ? deadline - now : 0) + SECOND_NS / 2);
    ext_run_deferred();
    ext_gate_close(EXT_GATE_LONGEST_NS);
    gp_begin_exit();
    ext_reenter_python(saved);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"is_cuda_available", is_cuda_available, METH_NOARGS, is_cuda_available_doc},
    {"cuda_unavailable_reason", cuda_unavailable_reason, METH_NOARGS, cuda_unavailable_reason_doc},
    {"bookkeeping_bytes", bookkeeping_bytes, METH_NOARGS, bookkeeping_bytes_doc},
    {"_shut_down", shut_down, METH_NOARGS, shut_down_doc},
    {NULL, NULL, 0, NULL},
};

/* ---- the module ------------------------------------------------------------------------------ */

static int intern_names(struct module_state *state)
{
    const struct {
        const char *text;
        PyObject **slot;
    } names[] = {
        {"alloc", &state->name_alloc},
        {"free", &state->name_free},
        {"__cuda_stream__", &state->name_cuda_stream_protocol},
        {"cuda_stream", &state->name_cuda_stream},
        {"ptr", &state->name_ptr},
        {"device_id", &state->name_device_id},
        {"index", &state->name_index},
        {"id", &state->name_id},
        {"type", &state->name_type},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        *names[i].slot = PyUnicode_InternFromString(names[i].text);
        if (*names[i].slot == NULL)
            return -1;
    }
    return 0;
}

/* Callbacks enter the main interpreter, from threads that know no other. CPython 3.11 has no slot to say
 * so, and later versions can be told to import all the same. */
static int refuse_subinterpreter(void)
{
    if (PyInterpreterState_Get() == PyInterpreterState_Main())
        return 0;
    PyErr_SetString(PyExc_ImportError,
                    "growpool cannot be imported in a subinterpreter: its callbacks enter the main "
                    "interpreter; import and use it there");
    return -1;
}

static int module_exec(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    if (refuse_subinterpreter() < 0 || intern_names(state) < 0 || ext_load_errors(state) < 0 ||
        ext_add_chunk(module, state) < 0 || ext_add_backings(module, state) < 0 ||
        ext_add_host_stream(module, state) < 0 || ext_add_cuda_stream(module, state) < 0 ||
        ext_add_pool(module, state) < 0 || ext_add_pool_views(module, state) < 0 ||
        ext_add_memory(module, state) < 0 || ext_add_buffer(module, state) < 0 ||
        ext_add_growable(module, state) < 0 || ext_add_range(module, state) < 0 ||
        ext_add_view(module, state) < 0)
        return -1;
#ifdef GROWPOOL_TESTING
    if (ext_add_sim(module, state) < 0 || ext_add_testing(module) < 0)
        return -1;
#endif
    if (ext_add_capi(module) < 0)
        return -1;
    return PyModule_AddStringConstant(module, "__version__", GROWPOOL_VERSION);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct module_state *state = PyModule_GetState(module);
    PyObject **objects = (PyObject **)state;
    for (size_t i = 0; i < sizeof(*state) / sizeof(PyObject *); i++)
        Py_VISIT(objects[i]);
    return 0;
}

static int module_clear(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    PyObject **objects = (PyObject **)state;
    for (size_t i = 0; i < sizeof(*state) / sizeof(PyObject *); i++)
        Py_CLEAR(objects[i]);
    return 0;
}

static void module_free(void *module)
{
    (void)module_clear(module);
}

/* What interpreters newer than 3.11 are told.
 * One interpreter: pools, callbacks and the gate belong to the process. Run on 3.12 and 3.13, which refuse
 * the import in a subinterpreter.
 * The GIL is used: it guards adapters and objects. Declared, not run: no free-threaded build, the only kind
 * to which it means anything, has run growpool. Such a build switches its GIL on for the whole process. */
static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "growpool._core",
    .m_doc = "The C side of growpool; use it through the growpool package.",
    .m_size = sizeof(struct module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

struct module_state *ext_state_of_type(PyTypeObject *type)
{
    PyObject *module = PyType_GetModuleByDef(type, &module_def);
    if (module == NULL)
        PyErr_Clear();
    return module != NULL ? PyModule_GetState(module) : NULL;
}

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
