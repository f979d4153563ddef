/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Pool as the files of the extension that make it up see it: pool.c owns its life, pool_calls.c
 * what it does, pool_streams.c its streams and the blocks on them, pool_views.c what it shows.
 *
 * LIFE. The object holds one reference to its gp_pool and one to the adapter's gp_backing, and shows the
 * adapter's Python references to the collector (backing.h). Only its finaliser ends that, all three at
 * once: from then on the delivery thread closes the pool, and an object that is resurrected is a husk
 * that says "closed". A pool that leaves its with block under live exports is finishing: it takes no
 * more work, and after the last export the delivery thread closes it while the object stays whole. Each
 * export holds the gp_pool too (memory.h), so nothing is unmapped under it, whichever of the objects are
 * still there. Should the callables themselves refer to such an export, the pool stays until it is
 * released: free must find its closure whole, so the collector may not take that cycle apart.
 */
#ifndef EXT_POOL_H
#define EXT_POOL_H

#include "../../vmm/growpool.h"
#include "backing.h"
#include "call.h"
#include "module.h"

#include <stdbool.h>

/* Guarded by the GIL. */
struct pool_object {
    PyObject_HEAD gp_pool *pool; /* NULL once finalised */
    gp_backing *backing; /* the adapter's */
    struct ext_adapter *adapter; /* NULL once finalised */
    gp_device *device;
    bool finishing; /* takes no more work and is closed after its last export */
    /* What a block was last made on, a reference; NULL: nothing yet, or no more. pool_streams.c's own. */
    gp_stream *recent;
    PyObject
        *recent_object; /* borrowed from adapter->streams: a stream of our own kinds, or NULL */
    bool recent_is_kept; /* adapter->streams has an object for it */
    struct pool_object *next; /* all pools that were not finalised, for the end of the process */
    struct pool_object *previous;
    PyObject *weak_references;
};

/* The gp_pool (borrowed), or NULL with PoolStateError: closed, or finishing. */
gp_pool *ext_pool_get(struct pool_object *self);
/* Of a finishing or closed pool too: what was left. NULL with PoolStateError once it was finalised. */
gp_pool *ext_pool_readable(struct pool_object *self);
/* Closes every pool that is left, until the deadline (CLOCK_MONOTONIC ns). Attached; raises nothing. */
void ext_pool_close_all(uint64_t deadline);
PyObject *ext_pool_close(struct pool_object *self, PyObject *unused);
PyObject *ext_pool_enter(struct pool_object *self, PyObject *unused);
PyObject *ext_pool_exit(struct pool_object *self, PyObject *const *args, Py_ssize_t nargs);
/* What close() does to the object once the pool inside is closed. */
void ext_pool_drop_streams(struct pool_object *self);

enum {
    EXT_STREAM_OPTIONAL = 1, /* None, or left out, gives NULL: the memory's own stream */
    /* The same, for the end of a use: so does a closed growpool stream that has no work left. */
    EXT_STREAM_LAST_USE = 2
};
/* The pool's stream for an argument; the stream object is kept alive. *out is a new reference. 0, or -1
 * with an exception. */
int ext_pool_stream(struct pool_object *self, gp_pool *pool, PyObject *object, unsigned flags,
                    gp_stream **out);
/* `stream` of this pool is `known` of the other: the object that the other pool keeps alive for it, if
 * there is one, lives as long as this pool needs it too. 0, or -1 with an exception. */
int ext_pool_keep_from(struct pool_object *self, const gp_stream *stream,
                       const struct pool_object *other, const gp_stream *known);
/* Before an object that adapter->streams keeps goes. */
void ext_pool_forget_recent(struct pool_object *self);
/* Frees a block of the stream of last time without more ado, if `stream` (None: the block's own) is that;
 * false: ask gp_pool_free(). */
bool ext_pool_quick_free(struct pool_object *self, uintptr_t address, PyObject *stream,
                         unsigned flags);
/* A block, first by the way that never blocks, then detached. 0, or -1 with an exception. */
int ext_pool_block(struct pool_object *self, size_t size, PyObject *stream, unsigned flags,
                   uintptr_t *address);

/* pool_peers.c. *devices is an array for PyMem_Free() (NULL: no peers). 0, or -1 with an exception. */
int ext_pool_parse_peers(struct module_state *state, PyObject *object, gp_device ***devices,
                         size_t *count);
PyObject *ext_pool_get_peers(struct pool_object *self, void *unused);

extern PyMethodDef ext_pool_call_methods[];
PyObject *ext_pool_get_stats(struct pool_object *self, void *unused);
PyObject *ext_pool_get_limit(struct pool_object *self, void *unused);
PyObject *ext_pool_get_unreturned(struct pool_object *self, void *unused);
PyObject *ext_pool_snapshot(struct pool_object *self, PyObject *unused);
PyObject *ext_limit_result(struct module_state *state, const gp_limit_result *result);
PyObject *ext_release_result(struct module_state *state, const gp_release_result *result);

#endif
