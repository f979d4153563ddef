/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Chunk between processes: export_fd(), from_fd(), and the arguments and properties that say
 * what a chunk can be used for. The descriptors are the caller's, always.
 */
#include "chunk.h"

#include <unistd.h>

#include "args.h"
#include "errors.h"
#include "gate.h"

int ext_chunk_flags(PyObject *handle_type, PyObject *gpu_direct_rdma, unsigned *flags)
{
    *flags = 0;
    if (handle_type != NULL && handle_type != Py_None) {
        if (!PyUnicode_Check(handle_type)) {
            PyErr_Format(PyExc_TypeError, "handle_type must be None or 'posix_fd', not %.200s",
                         Py_TYPE(handle_type)->tp_name);
            return -1;
        }
        if (PyUnicode_CompareWithASCIIString(handle_type, "posix_fd") != 0) {
            PyErr_Format(PyExc_ValueError, "handle_type must be None or 'posix_fd', not %R",
                         handle_type);
            return -1;
        }
        *flags |= GP_CHUNK_EXPORTABLE;
    }
    int rdma = gpu_direct_rdma != NULL ? PyObject_IsTrue(gpu_direct_rdma) : 0;
    if (rdma > 0)
        *flags |= GP_CHUNK_GPU_DIRECT_RDMA;
    return rdma < 0 ? -1 : 0;
}

const char ext_chunk_export_fd_doc[] =
    "export_fd($self, /)\n--\n\n"
    "Make a file descriptor that stands for the memory, for another process.\n\n"
    "Returns\n-------\n"
    "int\n    A new descriptor, not inherited by programs that are executed. It is yours to close; "
    "the chunk\n    does not need it. It keeps the memory alive.\n\n"
    "Raises\n------\n"
    "ValueError\n    The chunk was made without handle_type='posix_fd', or was imported itself.\n"
    "PoolStateError\n    The chunk is closed, or this process is a fork.\n"
    "DriverError\n    The device refused.\n\n"
    "Notes\n-----\n"
    "Any thread, while a pool uses the chunk too. Send the descriptor over a Unix socket "
    "(socket.send_fds)\n"
    "and give it to Chunk.from_fd() there. Nothing orders the work of the two processes: that is "
    "yours to do.";

PyObject *ext_chunk_export_fd(struct chunk_object *self, PyObject *unused)
{
    (void)unused;
    gp_error error = {0};
    int fd = -1;
    gp_chunk *chunk = gp_chunk_retain(self->chunk);
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_chunk_export_fd(chunk, &fd, &error);
    gp_chunk_release(chunk);
    ext_reenter_python(saved);
    if (status == GP_OK) {
        PyObject *number = PyLong_FromLong(fd);
        if (number == NULL)
            (void)close(fd);
        return number;
    }
    ext_raise(ext_state((PyObject *)self), status, &error, NULL);
    return NULL;
}

const char ext_chunk_from_fd_doc[] =
    "from_fd($type, /, fd, size, device)\n--\n\n"
    "Make a chunk of the memory that a descriptor of export_fd() stands for.\n\n"
    "Parameters\n----------\n"
    "fd : int or object with fileno()\n"
    "    The descriptor, from this process or another. It stays yours: close it whenever you "
    "like.\n"
    "size : int or str\n    Bytes, exactly those of the chunk that was exported.\n"
    "device : str, int or object\n    The device the memory lives on.\n\n"
    "Returns\n-------\nChunk\n    The same memory. It cannot be exported again.\n\n"
    "Raises\n------\n"
    "ValueError\n    Another size, no open descriptor, or memory of another device.\n"
    "TypeError, OverflowError\n    A wrong argument.\n"
    "DriverError\n    The device refused: what the descriptor holds is no memory of its.\n\n"
    "Notes\n-----\n"
    "Any thread. The memory lives until the last chunk of it, in any process, is released. On the "
    "host a\nforked child cannot reach such memory while it is mapped in the parent.";

/* A bool would be descriptor 0 or 1, which is never what was meant. */
static int parse_fd(PyObject *object, int *fd)
{
    if (PyBool_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "fd must be a file descriptor, not a bool");
        return -1;
    }
    *fd = PyObject_AsFileDescriptor(object);
    return *fd < 0 ? -1 : 0;
}

PyObject *ext_chunk_from_fd(PyTypeObject *type, PyTypeObject *defining, PyObject *const *args,
                            Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"fd", "size", "device", NULL};
    static const struct ext_signature signature = {"from_fd", names, 3, 3};
    (void)type;
    struct module_state *state = PyType_GetModuleState(defining);
    PyObject *given[3];
    int fd;
    size_t size;
    gp_device *device;
    if (ext_parse(&signature, args, nargs, kwnames, given) < 0 || parse_fd(given[0], &fd) < 0 ||
        ext_size(given[1], "size", &size) < 0 ||
        ext_device(state, given[2], EXT_DEVICE_CALLBACK_IDS, &device) < 0)
        return NULL;
    gp_error error = {0};
    gp_chunk *chunk = NULL;
    PyThreadState *saved = ext_leave_python();
    gp_status status = gp_chunk_import_fd(device, fd, size, &chunk, &error);
    ext_reenter_python(saved);
    if (status == GP_OK)
        return ext_chunk_wrap(state, chunk);
    ext_raise(state, status, &error, NULL);
    return NULL;
}

PyObject *ext_chunk_get_handle_type(struct chunk_object *self, void *unused)
{
    (void)unused;
    if ((gp_chunk_flags(self->chunk) & GP_CHUNK_EXPORTABLE) == 0)
        Py_RETURN_NONE;
    return PyUnicode_FromString("posix_fd");
}

PyObject *ext_chunk_get_gpu_direct_rdma(struct chunk_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong((gp_chunk_flags(self->chunk) & GP_CHUNK_GPU_DIRECT_RDMA) != 0);
}
