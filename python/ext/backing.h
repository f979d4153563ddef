/* SPDX-License-Identifier: Apache-2.0
 *
 * The adapter: Python callables, or a backing in C, as one gp_backing that belongs to one Python object
 * (a Pool, or a CachingBacking).
 *
 * WHO OWNS THE CALLABLES. The adapter holds them for as long as the gp_backing lives, which is longer
 * than the Python object: chunks are given back after the object is gone. The collector must still see
 * the cycle pool -> callables -> closure -> pool. So the Python object visits the adapter's references
 * as if they were its own, as long as it lives; each reference is shown by exactly one object. Its
 * finaliser stops showing them. From then on they count as coming from outside, and whatever the
 * closure refers to stays alive and intact until the last chunk was delivered and the adapter is
 * destroyed.
 */
#ifndef EXT_BACKING_H
#define EXT_BACKING_H

#include "../../backing/backing.h"
#include "chunk.h"
#include "module.h"

#include <stdbool.h>

struct ext_deferred;

struct ext_adapter {
    struct module_state *state;
    PyObject *module; /* keeps the state; held from the start, shown like the rest */
    gp_backing *inner; /* a backing in C that calls are passed on to; NULL with callables */
    PyObject *alloc; /* callables; NULL with inner */
    PyObject *free;
    PyObject *object; /* the backing object, NULL without one */
    PyObject *streams; /* dict: stream id -> the stream object that must live, for a Pool */
    struct ext_hold *accepted; /* chunk objects between alloc and free */
    bool lends; /* a CachingBacking's: what it accepted may be passed on to a pool by Python code */
    struct ext_deferred *deferred; /* for letting go of an inner that may call Python; else NULL */
    char name[64]; /* who it works for, in messages */
};

/* What a backing argument turned out to be; new references. */
struct ext_supplier {
    gp_backing *inner;
    PyObject *alloc;
    PyObject *free;
    PyObject *object;
};
/* A backing object: one of growpool's own, or any object with alloc and free. -1 with TypeError. */
int ext_supplier_of_object(struct module_state *state, PyObject *object,
                           struct ext_supplier *supplier);
void ext_supplier_clear(struct ext_supplier *supplier);

/* Takes over what the supplier holds. The adapter lives as long as *out; NULL with an exception. */
struct ext_adapter *ext_adapter_create(PyObject *module, struct ext_supplier *supplier,
                                       const char *name, gp_backing **out);
int ext_adapter_traverse(struct ext_adapter *adapter, visitproc visit, void *arg);

/* The gp_backing inside one of growpool's own backing objects (borrowed), or NULL: not one of them. A
 * finalised object gives NULL too, with PoolStateError raised. */
gp_backing *ext_backing_of(struct module_state *state, PyObject *object);

/* True for a backing object whose last reference may call a Python free. */
bool ext_backing_may_call(struct module_state *state, PyObject *object);

/* Lets go of a backing on the delivery thread: the last reference may call a Python free, which no
 * finaliser may do. `node` is memory from PyMem_RawMalloc, so that nothing can fail here; it is freed. */
struct ext_deferred {
    gp_backing *backing;
    struct ext_deferred *next;
};
void ext_defer_release(struct ext_deferred *node, gp_backing *backing);
/* Does what was deferred. Detached; for the end of the process. */
void ext_run_deferred(void);

#endif
