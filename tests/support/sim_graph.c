/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's captures and the graphs they become: what belongs to one, what invalidates
 * it, who is told when it is gone. It completes no work.
 */
#include "sim_internal.h"

#include <stdlib.h>

static const struct gp__sim_kind id_kind = {"capture_id", false, GP_ERR_DRIVER, GP__SIM_UNKNOWN};
static const struct gp__sim_kind keep_kind = {"capture_keep", true, GP_ERR_DRIVER,
                                              GP__SIM_OUT_OF_MEMORY};

/* ---- who is told ----------------------------------------------------------------------------- */

struct gp__sim_keep *gp__sim_take_gone(gp__sim *sim)
{
    struct gp__sim_keep *gone = sim->gone;

    sim->gone = NULL;
    return gone;
}

void gp__sim_tell_gone(struct gp__sim_keep *gone)
{
    while (gone != NULL) {
        struct gp__sim_keep *keep = gone;

        gone = keep->next;
        keep->gone(keep->context);
        free(keep);
    }
}

static void release_if_gone(gp__sim *sim, struct gp__sim_graph *graph)
{
    if (graph->capturing || !graph->destroyed || graph->launches > 0)
        return;
    while (graph->keeps != NULL) {
        struct gp__sim_keep *keep = graph->keeps;

        graph->keeps = keep->next;
        keep->next = sim->gone;
        sim->gone = keep;
        sim->keep_count--;
    }
    free(graph->ranges);
    graph->ranges = NULL;
    graph->range_count = graph->range_room = 0;
}

void gp__sim_launch_ended(gp__sim *sim, struct gp__sim_graph *graph)
{
    graph->launches--;
    release_if_gone(sim, graph);
}

void gp__sim_free_graphs(gp__sim *sim)
{
    while (sim->graphs != NULL) {
        struct gp__sim_graph *graph = sim->graphs;

        sim->graphs = graph->next;
        while (graph->keeps != NULL) {
            struct gp__sim_keep *keep = graph->keeps;

            graph->keeps = keep->next;
            free(keep);
        }
        free(graph->ranges);
        free(graph);
    }
}

/* ---- what invalidates a capture --------------------------------------------------------------- */

bool gp__sim_is_implicit(const gp__sim *sim, const struct gp__sim_stream *stream)
{
    if (stream != sim->streams)
        return false;
    for (const struct gp__sim_stream *other = sim->streams; other != NULL; other = other->next)
        if (other != stream && other->capture != NULL && (other->flags & GP__SIM_STREAM_BLOCKING))
            return true;
    return false;
}

bool gp__sim_hits_implicit(struct gp__sim_call *call, const struct gp__sim_stream *stream)
{
    if (!gp__sim_is_implicit(call->sim, stream))
        return false;
    for (struct gp__sim_stream *other = call->sim->streams; other != NULL; other = other->next)
        if (other->capture != NULL && (other->flags & GP__SIM_STREAM_BLOCKING))
            other->capture->valid = false;
    gp__sim_violate(call, "the legacy stream, beside a blocking stream that captures");
    return true;
}

bool gp__sim_invalidate(gp__sim *sim, bool in_any_mode)
{
    bool hit = false;

    for (struct gp__sim_graph *graph = sim->graphs; graph != NULL; graph = graph->next) {
        bool own = graph->thread == gp__sim_thread();
        bool reached = graph->mode == GP__SIM_CAPTURE_GLOBAL ||
                       (own && graph->mode == GP__SIM_CAPTURE_THREAD_LOCAL);

        if (!graph->capturing || !(in_any_mode || (!gp__sim_thread_is_relaxed() && reached)))
            continue;
        graph->valid = false;
        hit = true;
    }
    return hit;
}

/* ---- a capture's life -------------------------------------------------------------------------- */

static void end_capture(gp__sim *sim, struct gp__sim_graph *graph)
{
    for (struct gp__sim_stream *stream = sim->streams; stream != NULL; stream = stream->next)
        if (stream->capture == graph)
            stream->capture = NULL;
    graph->capturing = false;
    graph->destroyed = !graph->valid;
    release_if_gone(sim, graph);
}

void gp__sim_leave_capture(gp__sim *sim, struct gp__sim_stream *stream)
{
    struct gp__sim_graph *graph = stream->capture;

    if (graph == NULL)
        return;
    graph->valid = false;
    stream->capture = NULL;
    if (graph->origin == stream)
        end_capture(sim, graph);
}

void gp__sim_capture_begin(gp__sim *sim, uintptr_t handle, enum gp__sim_capture_mode mode)
{
    struct gp__sim_call call;
    struct gp__sim_stream *stream;
    struct gp__sim_graph *graph;

    if (!gp__sim_begin(&call, sim, NULL, NULL, "# capture begins on stream=0x%zx",
                       (size_t)handle)) {
        gp__sim_end_ok(&call);
        return;
    }
    stream = gp__sim_find(sim, handle);
    if (stream == NULL || handle <= 1 || stream->capture != NULL) {
        gp__sim_violate(&call, "that stream cannot begin a capture now");
    } else {
        graph = gp__sim_calloc(sizeof *graph);
        *graph = (struct gp__sim_graph){.id = ++sim->capture_count,
                                        .capturing = true,
                                        .valid = true,
                                        .mode = mode,
                                        .thread = gp__sim_thread(),
                                        .origin = stream,
                                        .next = sim->graphs};
        sim->graphs = graph;
        stream->capture = graph;
    }
    gp__sim_end_ok(&call);
}

void gp__sim_capture_join(gp__sim *sim, uintptr_t handle, uintptr_t of_handle)
{
    struct gp__sim_call call;
    struct gp__sim_stream *stream, *of;

    if (gp__sim_begin(&call, sim, NULL, NULL, "# stream=0x%zx joins the capture of stream=0x%zx",
                      (size_t)handle, (size_t)of_handle)) {
        stream = gp__sim_find(sim, handle);
        of = gp__sim_find(sim, of_handle);
        if (stream == NULL || handle <= 1 || stream->capture != NULL)
            gp__sim_violate(&call, "that stream cannot join a capture now");
        else if (of == NULL || of->capture == NULL)
            gp__sim_violate(&call, "there is no capture to join");
        else
            stream->capture = of->capture;
    }
    gp__sim_end_ok(&call);
}

/* The graph of a valid end, else NULL. lock: held. */
static struct gp__sim_graph *end_on(struct gp__sim_call *call, const struct gp__sim_stream *stream)
{
    struct gp__sim_graph *graph = stream == NULL ? NULL : stream->capture;

    if (graph == NULL) {
        gp__sim_violate(call, "that stream does not capture");
        return NULL;
    }
    if (graph->origin != stream) {
        gp__sim_violate(call, "the capture began on another stream");
        return NULL;
    }
    end_capture(call->sim, graph);
    return graph->valid ? graph : NULL;
}

gp__sim_graph *gp__sim_capture_end_graph(gp__sim *sim, uintptr_t handle)
{
    struct gp__sim_call call;
    struct gp__sim_graph *graph = NULL;

    if (gp__sim_begin(&call, sim, NULL, NULL, "# capture ends on stream=0x%zx", (size_t)handle))
        graph = end_on(&call, gp__sim_find(sim, handle));
    gp__sim_end_ok(&call);
    return graph;
}

bool gp__sim_capture_end(gp__sim *sim, uintptr_t handle)
{
    struct gp__sim_graph *graph = gp__sim_capture_end_graph(sim, handle);

    if (graph == NULL)
        return false;
    gp__sim_graph_destroy(sim, graph);
    return true;
}

/* ---- graphs ------------------------------------------------------------------------------------ */

void gp__sim_add_range(struct gp__sim_graph *graph, const struct gp__sim_range *range)
{
    if (range->bytes == 0)
        return;
    graph->ranges =
        gp__sim_room(graph->ranges, graph->range_count, &graph->range_room, sizeof *graph->ranges);
    graph->ranges[graph->range_count++] = *range;
}

/* True when the graph can be used; otherwise notes the violation. */
static bool check_graph(struct gp__sim_call *call, const struct gp__sim_graph *graph)
{
    const struct gp__sim_graph *known = call->sim->graphs;

    while (known != NULL && known != graph)
        known = known->next;
    if (known == NULL || known->capturing)
        gp__sim_violate(call, "not a graph of this device");
    else if (known->destroyed)
        gp__sim_violate(call, "a destroyed graph");
    else
        return true;
    return false;
}

static bool graph_is_mapped(struct gp__sim_call *call, const struct gp__sim_graph *graph)
{
    for (size_t i = 0; i < graph->range_count; i++) {
        const struct gp__sim_range *range = &graph->ranges[i];

        if (gp__sim_covered_for(call->sim, range->va, range->bytes, range->from))
            continue;
        gp__sim_violate(call, "va=0x%zx bytes=%zu in the graph is not mapped with access",
                        (size_t)range->va, range->bytes);
        return false;
    }
    return true;
}

void gp__sim_graph_launch(gp__sim *sim, gp__sim_graph *graph, uintptr_t handle)
{
    struct gp__sim_call call;
    struct gp__sim_stream *stream;
    struct gp__sim_item item = {.graph = graph};

    if (gp__sim_begin(&call, sim, NULL, NULL, "# launch a graph on stream=0x%zx", (size_t)handle) &&
        check_graph(&call, graph)) {
        stream = gp__sim_find(sim, handle);
        if (stream == NULL) {
            gp__sim_violate(&call, "a destroyed stream");
        } else if (stream->capture != NULL) {
            gp__sim_violate(&call, "into a capture: graphs inside graphs are not simulated");
        } else if (graph_is_mapped(&call, graph) && !sim->dead) {
            graph->launches++;
            gp__sim_push(stream, &item);
        }
    }
    gp__sim_end_ok(&call);
}

void gp__sim_graph_destroy(gp__sim *sim, gp__sim_graph *graph)
{
    struct gp__sim_call call;

    if (gp__sim_begin(&call, sim, NULL, NULL, "# destroy a graph") && check_graph(&call, graph)) {
        graph->destroyed = true;
        release_if_gone(sim, graph);
    }
    gp__sim_end_ok(&call);
}

static bool touches(const struct gp__sim_graph *graph, uintptr_t va, size_t bytes)
{
    for (size_t i = 0; i < graph->range_count; i++)
        if (graph->ranges[i].va < va + bytes && va < graph->ranges[i].va + graph->ranges[i].bytes)
            return true;
    return false;
}

bool gp__sim_in_graph(const gp__sim *sim, uintptr_t va, size_t bytes, uintptr_t except_handle)
{
    gp__sim *mutable_sim = (gp__sim *)sim;
    const struct gp__sim_stream *except;
    bool found = false;

    gp__mutex_lock(&mutable_sim->mutex);
    except = gp__sim_find(mutable_sim, except_handle);
    for (const struct gp__sim_graph *graph = sim->graphs; graph != NULL && !found;
         graph = graph->next)
        found = (except == NULL || except->capture != graph) && touches(graph, va, bytes);
    gp__mutex_unlock(&mutable_sim->mutex);
    return found;
}

bool gp__sim_graphs_are_mapped(const gp__sim *sim)
{
    struct gp__mutex *mutex = (struct gp__mutex *)&sim->mutex;
    bool mapped = true;

    gp__mutex_lock(mutex);
    for (const struct gp__sim_graph *graph = sim->graphs; graph != NULL; graph = graph->next)
        for (size_t i = 0; i < graph->range_count; i++)
            mapped = mapped && gp__sim_covered_for(sim, graph->ranges[i].va, graph->ranges[i].bytes,
                                                   graph->ranges[i].from);
    gp__mutex_unlock(mutex);
    return mapped;
}

/* ---- the table --------------------------------------------------------------------------------- */

/* What both begin with. GP_OK and *graph NULL: no capture. */
static gp_status find_capture(struct gp__sim_call *call, const struct gp__stream_key *key,
                              struct gp__sim_graph **graph, int *code)
{
    const struct gp__sim_stream *stream = gp__sim_find(call->sim, key->handle);

    *graph = NULL;
    gp__sim_require_entered(call);
    if (call->sim->dead)
        return GP_OK;
    if (stream == NULL) {
        gp__sim_violate(call, "a destroyed stream");
        *code = GP__SIM_INVALID_HANDLE;
        return GP_ERR_DRIVER;
    }
    if (stream->capture != NULL && !stream->capture->valid) {
        *code = GP__SIM_CAPTURE_INVALIDATED;
        return GP_ERR_CAPTURE;
    }
    *graph = stream->capture;
    return GP_OK;
}

gp_status gp__sim_capture_id(gp_device *device, const struct gp__stream_key *key, uint64_t *id,
                             gp_error *error)
{
    struct gp__sim_call call;
    struct gp__sim_graph *graph;
    gp_status status;
    int code = GP__SIM_SUCCESS;

    if (!gp__sim_begin(&call, device->state, &id_kind, error, "capture_id handle=0x%zx",
                       (size_t)key->handle))
        return gp__sim_decided(&call);
    status = find_capture(&call, key, &graph, &code);
    if (status != GP_OK)
        return gp__sim_end(&call, status, code, 0, 0);
    *id = graph == NULL ? 0 : graph->id;
    gp__sim_note(&call, " capture=%llu", (unsigned long long)*id);
    return gp__sim_end_ok(&call);
}

gp_status gp__sim_capture_keep(gp_device *device, const struct gp__stream_key *key,
                               void (*gone)(void *context), void *context, gp_error *error)
{
    struct gp__sim_call call;
    gp__sim *sim = device->state;
    struct gp__sim_graph *graph;
    struct gp__sim_keep *keep;
    gp_status status;
    int code = GP__SIM_SUCCESS;

    if (!gp__sim_begin(&call, sim, &keep_kind, error, "capture_keep handle=0x%zx",
                       (size_t)key->handle))
        return gp__sim_decided(&call);
    status = find_capture(&call, key, &graph, &code);
    if (status != GP_OK)
        return gp__sim_end(&call, status, code, 0, 0);
    if (graph == NULL)
        return gp__sim_end(&call, GP_ERR_CAPTURE, GP__SIM_INVALID_VALUE, 0, 0);
    keep = gp__sim_calloc(sizeof *keep);
    *keep = (struct gp__sim_keep){gone, context, graph->keeps};
    graph->keeps = keep;
    sim->keep_count++;
    gp__sim_note(&call, " capture=%llu", (unsigned long long)graph->id);
    return gp__sim_end_ok(&call);
}
