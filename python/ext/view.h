/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.View as other files of the extension see it.
 */
#ifndef EXT_VIEW_H
#define EXT_VIEW_H

#include "dtype.h"
#include "memory.h"

/* Guarded by the GIL. */
struct view_object {
    struct memory_object memory; /* kind EXT_VIEW; address and size are those of the part */
    struct memory_object *base; /* a Buffer, Growable or Range */
    struct ext_pin pin; /* until it is closed */
    size_t offset; /* in the base, bytes */
    size_t exports; /* memoryviews and the like on this view */
    const struct ext_dtype *dtype;
    int dimensions;
    Py_ssize_t *shape; /* then as many strides, in bytes; NULL without dimensions */
};

/* The part of its base that an open view shows. */
void ext_view_part(struct memory_object *view, struct ext_part *out);
int ext_view_close(struct memory_object *view);

/* view() of every memory object. */
extern const char ext_view_method_doc[];
PyObject *ext_view_method(struct memory_object *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames);

#endif
