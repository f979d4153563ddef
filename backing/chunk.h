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
/* The driver's number, for map and unmap. */
gp__memory gp__chunk_memory(const gp_chunk *chunk);
/* How many releases the driver refused since the process began: a leak that only it can mend. */
uint64_t gp__chunk_failed_releases(void);

#endif
