/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Range and growpool.Growable as other files of the extension see them.
 */
#ifndef EXT_RANGE_H
#define EXT_RANGE_H

#include "memory.h"

/* pool.growable() and pool.range(): new objects, or NULL with an exception. */
PyObject *ext_growable_new(struct pool_object *pool, size_t max_size, PyObject *stream);
PyObject *ext_range_new(struct pool_object *pool, size_t size, PyObject *stream);

/* What both have: a gp_range of so many bytes as an object of the type. */
struct memory_object *ext_range_make(struct pool_object *pool, PyTypeObject *type,
                                     enum ext_memory_kind kind, size_t bytes, PyObject *stream);
/* One call that changes a range: its stream, and the way into the core and back. The object is open
 * after ext_change_begin(); between the two calls the thread is detached. */
struct ext_change {
    struct ext_call call;
    gp_stream *stream; /* NULL: the range's own */
    unsigned flags; /* GP_TRIM_NO_WAIT */
};
/* `wait` NULL: as if True. stream_flags: EXT_STREAM_*. -1 with an exception: do not end it. */
int ext_change_begin(struct memory_object *self, PyObject *stream, unsigned stream_flags,
                     PyObject *wait, struct ext_change *change);
int ext_change_end(struct ext_change *change, gp_status status);
/* The committed intervals, memory of PyMem_Malloc(); NULL with an exception. */
gp_interval *ext_range_committed(const struct memory_object *self, size_t *count);
PyObject *ext_range_get_physical_bytes(struct memory_object *self, void *unused);
PyObject *ext_range_get_granularity(struct memory_object *self, void *unused);

#endif
