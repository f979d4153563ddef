/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside a chunk: its state and the counters that pools read. States and their legal steps are drawn
 * in backing.h; gp__chunk_move() is the only function that changes one (V4).
 */
#ifndef GP__CHUNK_H
#define GP__CHUNK_H

#include "driver.h"

enum gp__chunk_state {
    GP__CHUNK_IDLE,
    GP__CHUNK_SUPPLIED,
    GP__CHUNK_MAPPED,
    GP__CHUNK_RETIRING,
    GP__CHUNK_UNMAPPED,
    GP__CHUNK_UNRETURNED,
    GP__CHUNK_ABANDONED,
    GP__CHUNK_CLOSED
};

/* Takes the step from -> to atomically. False, and nothing changed, when the chunk is not in `from`:
 * only the steps from IDLE may lose such a race; elsewhere the pool is sole owner and
 * callers assert the result. Asserts that the step is in the drawing. Moving to SUPPLIED counts a
 * generation. */
bool gp__chunk_move(gp_chunk *chunk, enum gp__chunk_state from, enum gp__chunk_state to);
enum gp__chunk_state gp__chunk_state_of(const gp_chunk *chunk);
const char *gp__chunk_state_text(enum gp__chunk_state state);
/* A cache keeps the chunk, one at a time: false when one does. Any thread. */
bool gp__chunk_keep(gp_chunk *chunk);
void gp__chunk_let_go(gp_chunk *chunk);
/* The driver's number, for map and unmap. */
gp__memory gp__chunk_memory(const gp_chunk *chunk);
/* Releases memory for good: a driver that refuses is asked twice, then the leak is counted. May block. */
gp_status gp__release_memory(gp_device *device, gp__memory memory, size_t bytes, gp_error *error);
/* How many releases the driver refused since the process began: a leak that only it can mend. */
uint64_t gp__chunk_failed_releases(void);

/* ---- chunk_share.c: may block, no lock held ---- */
/* device->driver->create() by the rules of GP_CHUNK_*: *flags is what is wanted, and on GP_OK what came
 * to be. GP_ERR_UNAVAILABLE: exporting, or the location, is not supported. */
gp_status gp__share_create(gp_device *device, size_t bytes, gp_location location, unsigned *flags,
                           gp__memory *out, gp_error *error);
/* The memory behind the descriptor, its size proved by a trial mapping; nothing is left of a failure. */
gp_status gp__share_import(gp_device *device, int fd, size_t bytes, struct gp__imported *out,
                           gp_error *error);

#endif
