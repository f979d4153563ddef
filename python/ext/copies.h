/* SPDX-License-Identifier: Apache-2.0
 *
 * copy_from(), copy_to() and fill() of every memory object.
 */
#ifndef EXT_COPIES_H
#define EXT_COPIES_H

#include "memory.h"

extern const char ext_copy_from_doc[];
extern const char ext_copy_to_doc[];
extern const char ext_fill_doc[];
PyObject *ext_memory_copy_from(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames);
PyObject *ext_memory_copy_to(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames);
PyObject *ext_memory_fill(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames);

#endif
