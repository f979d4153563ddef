/* SPDX-License-Identifier: Apache-2.0
 *
 * What a growpool.Pool shows: Stats, LimitResult, the snapshot, unreturned chunks. Copies only; nothing
 * here changes a pool.
 */
#include "errors.h"
#include "pool.h"

/* ---- Stats and LimitResult ------------------------------------------------------------------- */

static PyStructSequence_Field stats_fields[] = {
    {"used_bytes", "Bytes in blocks."},
    {"free_bytes", "Bytes mapped and in no block; retiring ones are not counted."},
    {"physical_bytes", "Bytes of all chunks that count against the limit."},
    {"retiring_bytes", "Bytes retiring, being unmapped or being given back."},
    {"unreturned_bytes", "Bytes of chunks whose free failed."},
    {"abandoned_bytes", "Bytes of chunks that the driver would not unmap."},
    {"address_bytes", "Bytes of reserved addresses."},
    {"peak_used_bytes",
     "The most used_bytes since reset_peak_stats(). With several streams it can be a little more."},
    {"peak_physical_bytes", "The most physical_bytes since reset_peak_stats()."},
    {"limit", "The limit in bytes, or None."},
    {"chunk_count", "Chunks mapped or retiring now."},
    {"grow_count", "Growths that succeeded."},
    {"trim_count", "Chunks given back."},
    {"wait_count", "Waits for streams."},
    {"callback_errors", "Backing calls that failed for another reason than memory."},
    {NULL, NULL},
};

static PyStructSequence_Desc stats_desc = {
    "growpool.Stats",
    "A pool's figures at one moment. Immutable; sizes are bytes.",
    stats_fields,
    15,
};

static PyStructSequence_Field limit_result_fields[] = {
    {"limit", "The limit in bytes, or None."},
    {"physical_bytes", "Bytes of all chunks that count against it."},
    {"overage_bytes", "Physical bytes above the limit."},
    {"deferred_bytes", "Overage that is retiring already and will go by itself."},
    {NULL, NULL},
};

static PyStructSequence_Desc limit_result_desc = {
    "growpool.LimitResult",
    "What set_limit() found. Immutable; sizes are bytes.",
    limit_result_fields,
    4,
};

static PyStructSequence_Field release_result_fields[] = {
    {"released_bytes", "Bytes given back, or with wait=False set retiring."},
    {"kept_bytes", "Bytes of the part that are still mapped: in chunks that other pages share, or "
                   "that only an explicit trim(), drain() or close() gives back."},
    {NULL, NULL},
};

static PyStructSequence_Desc release_result_desc = {
    "growpool.ReleaseResult",
    "What resize() or decommit() gave back. Immutable; sizes are bytes.",
    release_result_fields,
    2,
};

/* Sets the next item, which may be NULL with an exception. */
static void set_next(PyObject *sequence, Py_ssize_t *index, PyObject *value)
{
    PyStructSequence_SetItem(sequence, (*index)++, value);
}

static PyObject *if_complete(PyObject *sequence)
{
    if (PyErr_Occurred())
        Py_CLEAR(sequence);
    return sequence;
}

static PyObject *stats_object(struct module_state *state, const gp_pool_stats *stats)
{
    PyObject *result = PyStructSequence_New(state->stats_type);
    if (result == NULL)
        return NULL;
    const size_t sizes[] = {
        stats->used_bytes,     stats->free_bytes,       stats->physical_bytes,
        stats->retiring_bytes, stats->unreturned_bytes, stats->abandoned_bytes,
        stats->address_bytes,  stats->peak_used_bytes,  stats->peak_physical_bytes};
    const uint64_t counts[] = {stats->chunk_count, stats->grow_count, stats->trim_count,
                               stats->wait_count, stats->callback_errors};
    Py_ssize_t next = 0;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        set_next(result, &next, PyLong_FromSize_t(sizes[i]));
    set_next(result, &next, ext_limit_object(stats->limit));
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        set_next(result, &next, PyLong_FromUnsignedLongLong(counts[i]));
    return if_complete(result);
}

PyObject *ext_limit_result(struct module_state *state, const gp_limit_result *limit)
{
    PyObject *result = PyStructSequence_New(state->limit_result_type);
    if (result == NULL)
        return NULL;
    Py_ssize_t next = 0;
    set_next(result, &next, ext_limit_object(limit->limit));
    set_next(result, &next, PyLong_FromSize_t(limit->physical_bytes));
    set_next(result, &next, PyLong_FromSize_t(limit->overage_bytes));
    set_next(result, &next, PyLong_FromSize_t(limit->deferred_bytes));
    return if_complete(result);
}

PyObject *ext_release_result(struct module_state *state, const gp_release_result *release)
{
    PyObject *result = PyStructSequence_New(state->release_result_type);
    if (result == NULL)
        return NULL;
    Py_ssize_t next = 0;
    set_next(result, &next, PyLong_FromSize_t(release->released_bytes));
    set_next(result, &next, PyLong_FromSize_t(release->kept_bytes));
    return if_complete(result);
}

gp_pool *ext_pool_readable(struct pool_object *self)
{
    if (self->pool == NULL)
        ext_raise_closed(ext_state((PyObject *)self), "the pool");
    return self->pool;
}

PyObject *ext_pool_get_stats(struct pool_object *self, void *unused)
{
    (void)unused;
    gp_pool *pool = ext_pool_readable(self);
    if (pool == NULL)
        return NULL;
    gp_pool_stats stats;
    gp_pool_get_stats(pool, &stats);
    return stats_object(ext_state((PyObject *)self), &stats);
}

PyObject *ext_pool_get_limit(struct pool_object *self, void *unused)
{
    (void)unused;
    gp_pool *pool = ext_pool_readable(self);
    if (pool == NULL)
        return NULL;
    gp_pool_stats stats;
    gp_pool_get_stats(pool, &stats);
    return ext_limit_object(stats.limit);
}

/* ---- unreturned ------------------------------------------------------------------------------ */

/* Chunk objects of chunks[0..count); takes the references to the chunks. */
static PyObject *list_of_chunks(struct module_state *state, gp_chunk **chunks, size_t count)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; i < count; i++) {
        PyObject *object = list != NULL ? ext_chunk_object(state, chunks[i]) : NULL;
        if (object == NULL || PyList_Append(list, object) < 0)
            Py_CLEAR(list);
        Py_XDECREF(object);
        gp_chunk_release(chunks[i]); /* never the last reference: the pool has one */
    }
    return list;
}

PyObject *ext_pool_get_unreturned(struct pool_object *self, void *unused)
{
    (void)unused;
    gp_pool *pool = ext_pool_readable(self);
    if (pool == NULL)
        return NULL;
    size_t capacity = gp_pool_unreturned(pool, NULL, 0);
    if (capacity == 0)
        return PyList_New(0);
    gp_chunk **chunks = PyMem_Calloc(capacity, sizeof(gp_chunk *));
    if (chunks == NULL)
        return PyErr_NoMemory();
    size_t count = gp_pool_unreturned(pool, chunks, capacity);
    PyObject *list =
        list_of_chunks(ext_state((PyObject *)self), chunks, count < capacity ? count : capacity);
    PyMem_Free(chunks);
    return list;
}

/* ---- snapshot -------------------------------------------------------------------------------- */

static const char *span_state_text(gp_span_state state)
{
    switch (state) {
    case GP_SPAN_USED:
        return "used";
    case GP_SPAN_FREE:
        return "free";
    case GP_SPAN_CLAIMED:
        return "claimed";
    case GP_SPAN_RETIRING:
        return "retiring";
    case GP_SPAN_HOLE:
        return "hole";
    case GP_SPAN_ABANDONED:
        return "abandoned";
    case GP_SPAN_HELD:
        return "held";
    }
    return "unknown";
}

static PyObject *span_dict(const gp_span_info *span)
{
    return Py_BuildValue("{sKsKsssKsI}", "address", (unsigned long long)span->address, "bytes",
                         (unsigned long long)span->bytes, "state", span_state_text(span->state),
                         "stream", (unsigned long long)span->stream_id, "owners",
                         span->owner_count);
}

static PyObject *chunk_dict(const gp_chunk_info *chunk)
{
    return Py_BuildValue("{sKsKsKsO}", "address", (unsigned long long)chunk->address, "bytes",
                         (unsigned long long)chunk->bytes, "id", (unsigned long long)chunk->id,
                         "retiring", chunk->retiring ? Py_True : Py_False);
}

/* Appends and lets go of `item`, which may be NULL with an exception. */
static int append(PyObject *list, PyObject *item)
{
    int result = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return result;
}

/* The segment that begins at spans[0]; *used is how many of `count` spans it has. */
static PyObject *segment_dict(const gp_span_info *spans, size_t count, size_t *used)
{
    PyObject *list = PyList_New(0);
    unsigned long long bytes = 0;
    size_t i = 0;
    while (list != NULL && i < count && (i == 0 || !spans[i].segment_start)) {
        bytes += spans[i].bytes;
        if (append(list, span_dict(&spans[i])) < 0)
            Py_CLEAR(list);
        i++;
    }
    *used = i;
    if (list == NULL)
        return NULL;
    return Py_BuildValue("{sKsKsN}", "address", (unsigned long long)spans[0].address, "bytes",
                         bytes, "spans", list);
}

static PyObject *segment_list(const gp_pool_snapshot *snapshot)
{
    PyObject *list = PyList_New(0);
    size_t used = 0;
    for (size_t i = 0; list != NULL && i < snapshot->span_count; i += used) {
        if (append(list, segment_dict(snapshot->spans + i, snapshot->span_count - i, &used)) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *chunk_list(const gp_pool_snapshot *snapshot)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < snapshot->chunk_count; i++) {
        if (append(list, chunk_dict(&snapshot->chunks[i])) < 0)
            Py_CLEAR(list);
    }
    return list;
}

PyObject *ext_pool_snapshot(struct pool_object *self, PyObject *unused)
{
    (void)unused;
    gp_pool *pool = ext_pool_get(self);
    if (pool == NULL)
        return NULL;
    gp_error error = {0};
    gp_pool_snapshot snapshot;
    gp_status status = gp_pool_take_snapshot(pool, &snapshot, &error);
    if (status != GP_OK) {
        ext_raise(ext_state((PyObject *)self), status, &error, NULL);
        return NULL;
    }
    PyObject *segments = segment_list(&snapshot);
    PyObject *chunks = segments != NULL ? chunk_list(&snapshot) : NULL;
    gp_pool_snapshot_free(&snapshot);
    if (chunks == NULL) {
        Py_XDECREF(segments);
        return NULL;
    }
    return Py_BuildValue("{sNsN}", "segments", segments, "chunks", chunks);
}

/* ---- the module ------------------------------------------------------------------------------ */

static int add_sequence(PyObject *module, const char *name, PyStructSequence_Desc *desc,
                        PyTypeObject **slot)
{
    *slot = PyStructSequence_NewType(desc);
    if (*slot == NULL)
        return -1;
    return PyModule_AddObjectRef(module, name, (PyObject *)*slot);
}

int ext_add_pool_views(PyObject *module, struct module_state *state)
{
    if (add_sequence(module, "Stats", &stats_desc, &state->stats_type) < 0)
        return -1;
    if (add_sequence(module, "LimitResult", &limit_result_desc, &state->limit_result_type) < 0)
        return -1;
    return add_sequence(module, "ReleaseResult", &release_result_desc, &state->release_result_type);
}
