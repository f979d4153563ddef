/* SPDX-License-Identifier: Apache-2.0
 *
 * What fence.c, capture.c and wait.c share: fences as objects, and which streams can be fenced. What takes a
 * timeline wants its lock held.
 */
#ifndef GP__FENCE_H
#define GP__FENCE_H

#include "timeline.h"

/* A fence with an event of `context`; a new one when none is spare. The lock is dropped inside. */
gp_status gp__fence_get(struct gp__timeline *timeline, uintptr_t context, struct gp__fence **out,
                        gp_error *error);
/* A fence that is in no stream's list: spare, unless threads still wait for its event. */
void gp__fence_let_go(struct gp__timeline *timeline, struct gp__fence *fence);
/* The stream has passed `ticket`. */
void gp__fence_pass(struct gp__timeline *timeline, gp_stream *stream, uint64_t ticket);
/* Computes a slot's `passed` from its streams'. */
void gp__fence_update_slot(struct gp__timeline *timeline, int slot);
/* What became of a stream: a fence may only go into the very stream that was resolved. */
enum gp__fate {
    GP__FATE_HERE,
    GP__FATE_ENDED,
    GP__FATE_REPLACED /* its handle names another stream */
};
/* Asks the device; *id is the stream's. One that captures cannot be told apart and is not fenced anyway. A
 * device that cannot answer is asked to record all the same, and says itself what is wrong. */
enum gp__fate gp__stream_fate(gp_device *device, const gp_stream *stream, uint64_t *id);
/* Keeps what was learnt; an ended stream has passed `ticket` where the device says so. */
void gp__stream_note_fate(struct gp__timeline *timeline, gp_stream *stream, enum gp__fate fate,
                          uint64_t id, uint64_t ticket);
/* GP_ERR_CAPTURE, in words. */
gp_status gp__capture_error(gp_error *error, uintptr_t handle);
/* Whether this thread can put a fence on the stream. */
bool gp__fence_can_record(const gp_stream *stream);
/* Puts one fence on the stream, whose reference the caller holds. GP_ERR_CAPTURE; GP_OK also when the
 * stream turned out to be gone, and then it is marked so. The lock is dropped inside. */
gp_status gp__fence_record(struct gp__timeline *timeline, gp_stream *stream, gp_error *error);

#endif
