/* SPDX-License-Identifier: Apache-2.0
 *
 * DLPack exports of every memory object.
 */
#ifndef EXT_DLPACK_H
#define EXT_DLPACK_H

#include "memory.h"

extern const char ext_dlpack_doc[];
extern const char ext_dlpack_device_doc[];
PyObject *ext_memory_dlpack(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames);
PyObject *ext_memory_dlpack_device(struct memory_object *self, PyObject *unused);

#endif
