/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Chunk as other files of the extension see it: the object around one gp_chunk.
 */
#ifndef EXT_CHUNK_H
#define EXT_CHUNK_H

#include "../../backing/backing.h"
#include "module.h"

struct ext_adapter;

struct chunk_object;

/* An adapter (backing.h) has the chunk accepted: it holds one reference to the object meanwhile. In two
 * lists, the adapter's and the chunk's. */
struct ext_hold {
    struct ext_adapter *adapter; /* NULL: not in use */
    struct chunk_object *chunk;
    struct ext_hold *next; /* the adapter's */
    struct ext_hold *previous;
    struct ext_hold *other; /* of the same chunk */
};

/* `chunk` is the object's own reference. gp_chunk_user(chunk) points back while the object lives, so a
 * pool gives the very same object back to free. Everything here is guarded by the GIL.
 *
 * Mostly one adapter at a time has a chunk: `first`, so that accepting allocates nothing. Backings made of
 * backings in Python are several; what they need beyond the first is allocated. */
struct chunk_object {
    PyObject_HEAD gp_chunk *chunk;
    PyObject *weak_references;
    struct ext_hold *holds;
    struct ext_hold first;
};

/* The object of a chunk: the living one or a new one. New reference; NULL with an exception. */
PyObject *ext_chunk_object(struct module_state *state, gp_chunk *chunk);
/* The gp_chunk in a growpool.Chunk (borrowed); NULL with TypeError for anything else. */
gp_chunk *ext_chunk_of(struct module_state *state, PyObject *object, const char *what);
/* The object of a chunk made just now; takes the reference. */
PyObject *ext_chunk_wrap(struct module_state *state, gp_chunk *chunk);

/* chunk_share.c */
/* GP_CHUNK_* from the arguments handle_type and gpu_direct_rdma (NULL: left out). */
int ext_chunk_flags(PyObject *handle_type, PyObject *gpu_direct_rdma, unsigned *flags);
extern const char ext_chunk_export_fd_doc[];
PyObject *ext_chunk_export_fd(struct chunk_object *self, PyObject *unused);
extern const char ext_chunk_from_fd_doc[];
PyObject *ext_chunk_from_fd(PyTypeObject *type, PyTypeObject *defining, PyObject *const *args,
                            Py_ssize_t nargs, PyObject *kwnames);
PyObject *ext_chunk_get_handle_type(struct chunk_object *self, void *unused);
PyObject *ext_chunk_get_gpu_direct_rdma(struct chunk_object *self, void *unused);

/* gp_chunk_release(), detached: releasing physical memory can block. */
void ext_chunk_release(gp_chunk *chunk);
/* Takes a chunk that was closed off its adapters' lists, if it is on one: a close() that began before an
 * adapter accepted the chunk may win, and then the pool refuses it. */
void ext_adapter_forget(struct chunk_object *chunk);

#endif
