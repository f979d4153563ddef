/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool's public functions as a table that the Python extension hands out, so that C code can use
 * pools made in Python. It owns the list of entries and never includes Python.h.
 *
 * WHY A TABLE. The extension carries a growpool of its own and shows no symbol of it. A libgrowpool
 * that a program links besides is another growpool: it knows nothing of the extension's pools, and an
 * object of one must never be given to the other. C code that wants the extension's pools links to
 * nothing and calls through the table.
 *
 *     #include <Python.h>               before this header, so that gp_c_api_import() is there
 *     #include <growpool/capi.h>        in the folder that growpool.get_include() names
 *
 *     static const struct gp_c_api *gp;
 *     gp = gp_c_api_import(GP_C_API_VERSION);               once, in the module's init
 *     gp_pool *pool = gp->pool_of(object);                  attached; a reference of your own
 *     Py_BEGIN_ALLOW_THREADS
 *     status = gp->pool_malloc(pool, bytes, stream, 0, &address, &error);
 *     Py_END_ALLOW_THREADS
 *
 * THREADS AND THE GIL
 *   1. With the GIL or without it: gp_pool_try_malloc(), gp_pool_try_free(), gp_pool_free(), gp_pool_stream(),
 *      gp_pool_record_stream(), gp_pool_finish(), gp_pool_abandon(), gp_range_close(),
 *      gp_range_record_stream(), pins, statistics, snapshots, gp_error_set(), retaining anything,
 *      releasing pools, ranges and streams, and all that only reads. On a thread that uses its own
 *      default stream (CUDA handle 2) what ends the use of memory records an event, which can block
 *      behind another thread's driver call: let go of the GIL there.
 *   2. Without the GIL: everything else. It may wait in a driver, for a stream, or for a chunk that
 *      another thread gives back, and may call a backing; what it waits for may need the GIL to go on,
 *      and then neither does. GP_NOT_READY from gp_pool_try_malloc() is the sign to let go of the GIL
 *      and call gp_pool_malloc(). gp_device_memory() reads in the driver, so it belongs here.
 *   3. Callbacks in Python take the GIL by themselves, also on threads that Python did not start, and on
 *      a thread that holds it already. So a call of the second kind that holds the GIL works as long as
 *      nothing has to be waited for: a program with one thread and no work on streams may know that.
 *   4. The entries that take a Python object (PYTHON in the list) and gp_c_api_import() want the GIL.
 *
 * EXCEPTIONS. A call through the table never raises, the PYTHON entries apart. What a callback raised
 * goes to sys.unraisablehook and is a status here (MemoryError: GP_ERR_OUT_OF_MEMORY, others:
 * GP_ERR_CALLBACK); inside a growpool call from Python on the same thread it is kept for that call. A
 * wait here notices no signal.
 *
 * LIFETIME. The table lives as long as the process. A reference from pool_of() keeps the pool's memory
 * and its callables when the Python object goes, but not against close() of that object, the end of a
 * with block, or the end of the process: then calls report GP_ERR_STATE. Pools and ranges made through
 * the table are the maker's to close before the interpreter ends. A thread that calls in after that may
 * be stopped for good, as any thread that wants to enter Python then. gp_begin_exit() is the
 * extension's to call, and so is gp_chunk_set_user() on chunks that Python sees.
 *
 * VERSIONS. Entries are only ever added at the end; `size` says how many there are. `version` changes
 * when an entry's meaning or the layout of a public struct does, and nothing works across that.
 */
#ifndef GROWPOOL_CAPI_H
#define GROWPOOL_CAPI_H

#include "growpool.h"

#define GP_C_API_VERSION 1
#define GP_C_API_CAPSULE "growpool._core._C_API"

/* Every entry in order. FUNCTION(x) stands for the public function gp_x(). PYTHON(type, x) is a
 * conversion from a Python object: it returns a new reference that is the caller's to release, or NULL
 * with an exception.
 *   pool_of    growpool.Pool
 *   range_of   growpool.Range or Growable; the latter is only changed by gp_range_resize()
 * TypeError for anything else, PoolStateError once it is closed.
 * Append only, and each new entry last: consumers in the field know the entries by their places. */
#define GP_C_API_TABLE(FUNCTION, PYTHON)                                                           \
    PYTHON(gp_pool *, pool_of)                                                                     \
    PYTHON(gp_range *, range_of)                                                                   \
    FUNCTION(error_set)                                                                            \
    FUNCTION(status_text)                                                                          \
    FUNCTION(device_open)                                                                          \
    FUNCTION(device_kind_of)                                                                       \
    FUNCTION(device_ordinal)                                                                       \
    FUNCTION(device_id)                                                                            \
    FUNCTION(device_name)                                                                          \
    FUNCTION(device_granularity)                                                                   \
    FUNCTION(device_is_host_accessible)                                                            \
    FUNCTION(device_is_device_accessible)                                                          \
    FUNCTION(device_memory)                                                                        \
    FUNCTION(cuda_available)                                                                       \
    FUNCTION(chunk_create)                                                                         \
    FUNCTION(chunk_export_fd)                                                                      \
    FUNCTION(chunk_import_fd)                                                                      \
    FUNCTION(chunk_flags)                                                                          \
    FUNCTION(chunk_adopt)                                                                          \
    FUNCTION(chunk_retain)                                                                         \
    FUNCTION(chunk_release)                                                                        \
    FUNCTION(chunk_close)                                                                          \
    FUNCTION(chunk_is_closed)                                                                      \
    FUNCTION(chunk_is_in_use)                                                                      \
    FUNCTION(chunk_size)                                                                           \
    FUNCTION(chunk_device)                                                                         \
    FUNCTION(chunk_location)                                                                       \
    FUNCTION(chunk_handle)                                                                         \
    FUNCTION(chunk_id)                                                                             \
    FUNCTION(chunk_generation)                                                                     \
    FUNCTION(chunk_set_user)                                                                       \
    FUNCTION(chunk_user)                                                                           \
    FUNCTION(backing_create)                                                                       \
    FUNCTION(backing_retain)                                                                       \
    FUNCTION(backing_release)                                                                      \
    FUNCTION(backing_device)                                                                       \
    FUNCTION(backing_caching)                                                                      \
    FUNCTION(backing_cached_bytes)                                                                 \
    FUNCTION(backing_trim)                                                                         \
    FUNCTION(backing_alloc)                                                                        \
    FUNCTION(backing_free)                                                                         \
    FUNCTION(begin_exit)                                                                           \
    FUNCTION(stream_retain)                                                                        \
    FUNCTION(stream_release)                                                                       \
    FUNCTION(stream_handle)                                                                        \
    FUNCTION(stream_id)                                                                            \
    FUNCTION(pool_create)                                                                          \
    FUNCTION(pool_retain)                                                                          \
    FUNCTION(pool_release)                                                                         \
    FUNCTION(pool_close)                                                                           \
    FUNCTION(pool_finish)                                                                          \
    FUNCTION(pool_is_closed)                                                                       \
    FUNCTION(pool_device)                                                                          \
    FUNCTION(pool_name)                                                                            \
    FUNCTION(pool_peer_count)                                                                      \
    FUNCTION(pool_peer)                                                                            \
    FUNCTION(pool_stream)                                                                          \
    FUNCTION(pool_malloc)                                                                          \
    FUNCTION(pool_try_malloc)                                                                      \
    FUNCTION(pool_free)                                                                            \
    FUNCTION(pool_record_stream)                                                                   \
    FUNCTION(pool_pin)                                                                             \
    FUNCTION(pool_unpin)                                                                           \
    FUNCTION(pool_abandon)                                                                         \
    FUNCTION(pool_copy)                                                                            \
    FUNCTION(pool_fill)                                                                            \
    FUNCTION(pool_synchronize)                                                                     \
    FUNCTION(pool_join)                                                                            \
    FUNCTION(pool_block_stream)                                                                    \
    FUNCTION(range_create)                                                                         \
    FUNCTION(range_retain)                                                                         \
    FUNCTION(range_release)                                                                        \
    FUNCTION(range_close)                                                                          \
    FUNCTION(range_is_closed)                                                                      \
    FUNCTION(range_address)                                                                        \
    FUNCTION(range_max_bytes)                                                                      \
    FUNCTION(range_granularity)                                                                    \
    FUNCTION(range_size)                                                                           \
    FUNCTION(range_pool)                                                                           \
    FUNCTION(range_stream)                                                                         \
    FUNCTION(range_committed_bytes)                                                                \
    FUNCTION(range_physical_bytes)                                                                 \
    FUNCTION(range_committed)                                                                      \
    FUNCTION(range_commit)                                                                         \
    FUNCTION(range_decommit)                                                                       \
    FUNCTION(range_resize)                                                                         \
    FUNCTION(range_record_stream)                                                                  \
    FUNCTION(range_pin)                                                                            \
    FUNCTION(range_unpin)                                                                          \
    FUNCTION(pool_trim)                                                                            \
    FUNCTION(pool_drain)                                                                           \
    FUNCTION(pool_set_limit)                                                                       \
    FUNCTION(pool_forget_stream)                                                                   \
    FUNCTION(pool_return_unreturned)                                                               \
    FUNCTION(pool_unreturned)                                                                      \
    FUNCTION(pool_get_stats)                                                                       \
    FUNCTION(pool_reset_peak_stats)                                                                \
    FUNCTION(pool_take_snapshot)                                                                   \
    FUNCTION(pool_snapshot_free)                                                                   \
    FUNCTION(pool_try_free)                                                                        \
    FUNCTION(bookkeeping_bytes)

/* Members are named as the functions are, without gp_: table->pool_malloc is gp_pool_malloc. The
 * headers say what each does. */
struct gp_c_api {
    uint32_t version; /* GP_C_API_VERSION of the extension */
    uint32_t size; /* bytes of this struct in the extension */
#define GP_C_API_FUNCTION(name)     __typeof__(gp_##name) *name;
#define GP_C_API_PYTHON(type, name) type (*name)(void *object);
    GP_C_API_TABLE(GP_C_API_FUNCTION, GP_C_API_PYTHON)
#undef GP_C_API_FUNCTION
#undef GP_C_API_PYTHON
};

#endif

/* The import, for whoever included Python.h before this header. */
#if defined(Py_PYTHON_H) && !defined(GROWPOOL_CAPI_IMPORT)
#define GROWPOOL_CAPI_IMPORT

/* The extension's table (imports growpool), or NULL with ImportError: growpool is not there, has
 * another version than `wanted_version` (GP_C_API_VERSION), or has fewer entries than this header.
 * Attached. */
static inline const struct gp_c_api *gp_c_api_import(uint32_t wanted_version)
{
    const struct gp_c_api *table = (const struct gp_c_api *)PyCapsule_Import(GP_C_API_CAPSULE, 0);
    if (table == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_SetString(PyExc_ImportError,
                            "the installed growpool offers no C API: install a newer one");
        return NULL;
    }
    if (table->version != wanted_version) {
        PyErr_Format(PyExc_ImportError,
                     "the installed growpool offers version %u of its C API, and this module was "
                     "built for version %u: %s",
                     (unsigned)table->version, (unsigned)wanted_version,
                     table->version < wanted_version ? "install a newer growpool"
                                                     : "build the module anew");
        return NULL;
    }
    if (table->size < sizeof(struct gp_c_api)) {
        PyErr_Format(
            PyExc_ImportError,
            "the installed growpool's C API has %u bytes, and this module was built for %u: "
            "install a newer growpool",
            (unsigned)table->size, (unsigned)sizeof(struct gp_c_api));
        return NULL;
    }
    return table;
}

#endif
