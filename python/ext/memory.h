/* SPDX-License-Identifier: Apache-2.0
 *
 * What growpool.Buffer, Growable, Range and View share: their common base type, the struct that each of
 * them begins with, and pins.
 *
 * LIFE. An object holds its pool object, so the pool lives as long as any of its objects. What outlives
 * them both is memory that is exported: a pin holds the gp_pool, or the gp_range and with it the pool,
 * and nothing of Python's. Dropping a Buffer ends its block with the last pin at the latest, dropping a
 * Growable or a Range lets go of its gp_range, whose pins keep it. A View holds the object that it was
 * made of and one pin, and keeps both until it is closed or goes.
 */
#ifndef EXT_MEMORY_H
#define EXT_MEMORY_H

#include "pool.h"

enum ext_memory_kind { EXT_BLOCK, EXT_GROWABLE, EXT_RANGE, EXT_VIEW };

/* Guarded by the GIL. */
struct memory_object {
    PyObject_HEAD struct pool_object *pool;
    enum ext_memory_kind kind;
    gp_range *range; /* of EXT_GROWABLE and EXT_RANGE; NULL once finalised */
    uintptr_t address; /* 0 when empty */
    size_t size; /* bytes; EXT_GROWABLE: see ext_memory_size() */
    bool closed; /* of itself; see ext_memory_is_closed() */
    PyObject *weak_references;
};

/* Bytes of one Buffer, Growable or Range that an operation is about. */
struct ext_part {
    struct memory_object *root; /* borrowed; never a View */
    gp_range *range; /* borrowed: the root's; NULL of a block, and of no bytes */
    uintptr_t address; /* of the part */
    size_t offset; /* of the part in the root, bytes */
    size_t bytes;
};

/* A new object of the type, still without memory: `closed` until the caller made it whole. */
struct memory_object *ext_memory_new(struct pool_object *pool, PyTypeObject *type,
                                     enum ext_memory_kind kind);
/* A growpool memory object of any kind (borrowed cast), or NULL without an exception. */
struct memory_object *ext_memory_of(struct module_state *state, PyObject *object);
bool ext_memory_is_closed(const struct memory_object *self);
/* -1 with PoolStateError when it is closed, or its pool takes no more work. */
int ext_memory_check_open(const struct memory_object *self);
/* Bytes: of a Growable its present size. */
size_t ext_memory_size(const struct memory_object *self);
/* All of an open object. -1 with PoolStateError. */
int ext_memory_whole(struct memory_object *self, struct ext_part *out);
/* `bytes` at `offset` of a part, into itself as well. -1 with ValueError that tells both sizes. */
int ext_memory_within(const struct ext_part *part, size_t offset, size_t bytes,
                      struct ext_part *out);
/* The stream that the memory was made for; a new reference, NULL for an empty one. */
int ext_memory_own_stream(const struct ext_part *part, gp_stream **out);
/* The stream becomes an owner of all of the root. */
gp_status ext_memory_record(const struct ext_part *part, gp_stream *stream, gp_error *error);
/* Ends the object; NULL and None mean its own stream. -1 with an exception, and it is as before. */
int ext_memory_close(struct memory_object *self, PyObject *stream);

/* ---- pins ---------------------------------------------------------------------------------- */

/* While a pin lives, its memory is neither freed, decommitted nor unmapped. Holds nothing of Python's. */
struct ext_pin {
    gp_pool *pool; /* both NULL: no memory, nothing to end */
    gp_range *range;
    uintptr_t address; /* of the block */
    size_t offset;
    size_t bytes;
};

enum {
    EXT_PIN_UNKNOWN = 1, /* used on streams that growpool cannot see */
    EXT_PIN_EXPORT = 2 /* parts that are not committed are a BufferError instead of ValueError */
};
/* The flags for memory that another library will use. On the host a use is over when its export is. */
unsigned ext_pin_flags_for_export(const struct memory_object *root);
int ext_pin(const struct ext_part *part, unsigned flags, struct ext_pin *out);
/* Any thread, attached or not, at the end of the process too. A second call does nothing. */
void ext_unpin(struct ext_pin *pin);

/* ---- slots of each type --------------------------------------------------------------------- */

int ext_memory_traverse(struct memory_object *self, visitproc visit, void *arg);
void ext_memory_finalize(PyObject *self);
void ext_memory_dealloc(struct memory_object *self);
PyObject *ext_memory_get_size(struct memory_object *self, void *unused);
int ext_memory_getbuffer(struct memory_object *self, Py_buffer *view, int flags);
void ext_memory_releasebuffer(struct memory_object *self, Py_buffer *view);

#define EXT_MEMORY_SLOTS                                                                           \
    {Py_tp_traverse, ext_memory_traverse}, {Py_tp_finalize, ext_memory_finalize},                  \
        {Py_tp_dealloc, ext_memory_dealloc}, {Py_bf_getbuffer, ext_memory_getbuffer},              \
    {                                                                                              \
        Py_bf_releasebuffer, ext_memory_releasebuffer                                              \
    }

#define EXT_MEMORY_FLAGS                                                                           \
    (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |                 \
     Py_TPFLAGS_IMMUTABLETYPE)

#endif
