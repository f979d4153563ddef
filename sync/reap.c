/* SPDX-License-Identifier: Apache-2.0
 *
 * gp__reap: wait for a chunk's owners, unmap it, hand it back. Nothing else in growpool unmaps memory
 * that users have seen.
 */
#include "reap.h"

#include "../backing/backing_internal.h"

static void push(struct gp__retired **list, struct gp__retired *item)
{
    item->next = *list;
    *list = item;
}

/* Whether the chunk may be unmapped now; waits if the mode says so. In a forked child none may. */
static gp_status await(struct gp__timeline *timeline, const struct gp__retired *item,
                       enum gp__reap_mode mode, const struct gp__interrupt *interrupt,
                       gp_error *error)
{
    gp_status status = gp__check_fork(error);
    if (status != GP_OK)
        return status;
    if (mode != GP__REAP_READY) {
        enum gp__reach reach = mode == GP__REAP_SEEN ? GP__REACH_SEEN : GP__REACH_ALL;
        return gp__timeline_wait(timeline, item->owners, reach, interrupt, error);
    }
    gp__mutex_lock(timeline->lock);
    uint64_t remaining = gp__timeline_remaining(timeline, item->owners).slots;
    gp__mutex_unlock(timeline->lock);
    return remaining == 0 ? GP_OK : GP_NOT_READY;
}

static gp_status unmap(struct gp__timeline *timeline, struct gp__retired *item,
                       enum gp__reap_mode mode, struct gp__reaped *out, gp_error *error)
{
    gp_device *device = timeline->device;
    gp__memory memory = gp__chunk_memory(item->chunk);
    gp_status status = device->driver->unmap(device, item->va, item->bytes, memory, error);
    if (status != GP_OK && mode == GP__REAP_FINAL)
        status = device->driver->unmap(device, item->va, item->bytes, memory, error);
    if (status == GP_OK) {
        gp__chunk_move(item->chunk, GP__CHUNK_RETIRING, GP__CHUNK_UNMAPPED);
        push(&out->unmapped, item);
    } else if (mode == GP__REAP_FINAL) {
        gp__chunk_move(item->chunk, GP__CHUNK_RETIRING, GP__CHUNK_ABANDONED);
        push(&out->abandoned, item);
    } else {
        push(&out->kept, item);
    }
    return status;
}

gp_status gp__reap(struct gp__timeline *timeline, struct gp__retired *list, enum gp__reap_mode mode,
                   const struct gp__interrupt *interrupt, struct gp__reaped *out, gp_error *error)
{
    gp__assert_no_lock();
    *out = (struct gp__reaped){NULL, NULL, NULL};
    struct gp__entry entry;
    gp_status first = gp__check_fork(error);
    if (first == GP_OK)
        first = timeline->device->driver->enter(timeline->device, &entry, error);
    if (first != GP_OK) {
        out->kept = list;
        return first;
    }
    bool stopped = false;
    while (list != NULL) {
        struct gp__retired *item = list;
        list = item->next;
        enum gp__reap_mode now = stopped ? GP__REAP_READY : mode;
        gp_error *report = first == GP_OK ? error : NULL;
        gp_status status = await(timeline, item, now, interrupt, report);
        if (status == GP_OK)
            status = unmap(timeline, item, mode, out, report);
        else
            push(&out->kept, item);
        if (status == GP_ERR_INTERRUPTED)
            stopped = true;
        if (first == GP_OK && status != GP_NOT_READY)
            first = status;
    }
    timeline->device->driver->leave(timeline->device, &entry);
    return first;
}
