/* SPDX-License-Identifier: Apache-2.0
 *
 * How pools take chunks from a backing and give them back, and small helpers that the whole C core
 * shares. gp_backing_alloc() and gp_backing_free() leave a chunk's state alone, so that backings
 * can be stacked; the two functions here are the only ones that accept and return chunks.
 */
#ifndef GP__BACKING_INTERNAL_H
#define GP__BACKING_INTERNAL_H

#include "chunk.h"

/* Asks the backing and accepts its answer: on GP_OK *out is SUPPLIED, one generation on, and its
 * reference is the caller's. A chunk that someone else took or closed meanwhile is refused with
 * GP_ERR_CONTRACT_VALUE. May block and call out: no lock held. */
gp_status gp__backing_supply(gp_backing *backing, const gp_request *request, gp_chunk **out,
                             gp_error *error);

/* Gives an accepted chunk back. It must be UNMAPPED, SUPPLIED (a grow that was undone before it
 * mapped anything) or UNRETURNED (another try). `request` is the one of its growth.
 *
 * The chunk becomes IDLE before the backing's free runs: inside it the backing may already supply
 * the chunk to another pool on another thread. On GP_OK the caller's reference has passed to the
 * backing. On any failure the caller keeps the reference and looks at gp__chunk_state_of():
 *   UNRETURNED  the rule: keep the chunk, count it as unreturned.
 *   otherwise   the backing failed and yet closed the chunk or let another pool accept it. It no
 *               longer belongs to the caller: count it as returned and drop the reference.
 * gp__backing_left_unreturned() tells the two apart, also when that other pool failed to return the
 * chunk in its turn.
 * May block and call out: no lock held. */
gp_status gp__backing_return(gp_backing *backing, gp_chunk *chunk, const gp_request *request,
                             gp_error *error);

/* After a failed gp__backing_return(): is the chunk still the caller's to keep? `generation` is
 * what gp_chunk_generation() said after gp__backing_supply(). */
static inline bool gp__backing_left_unreturned(const gp_chunk *chunk, uint64_t generation)
{
    return gp__chunk_state_of(chunk) == GP__CHUNK_UNRETURNED &&
           gp_chunk_generation(chunk) == generation;
}

/* The context when the backing was made with these operations, else NULL. */
void *gp__backing_context(const gp_backing *backing, const gp_backing_ops *ops);

/* Fills *error as gp_error_set() does, with GP_ERR_STATE and the reason. */
gp_status gp__state_error(gp_error *error, gp_reason reason, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* gp__driver_error() for a failed system call: the name comes from errno. */
gp_status gp__errno_error(gp_error *error, gp_status status, const char *call, int code,
                          uintptr_t va, size_t size);
/* "128 MiB" where the size is a whole number of a unit, else "1000 bytes": exact, and for people. */
const char *gp__size_text(size_t bytes, char buffer[static 32]);
/* GP_ERR_STATE in a forked child. Takes no lock. */
gp_status gp__check_fork_closely(gp_error *error);
static inline gp_status gp__check_fork(gp_error *error)
{
    return gp__process_ready() ? GP_OK : gp__check_fork_closely(error);
}
/* GP_ERR_STATE in a forked child and after gp_begin_exit(). From here on the process counts as one that
 * uses growpool. Takes no lock. */
gp_status gp__check_process_closely(gp_error *error);
static inline gp_status gp__check_process(gp_error *error)
{
    return gp__process_ready() ? GP_OK : gp__check_process_closely(error);
}
/* Is `size` a size that chunks of the device can have? GP_ERR_ARGUMENT says why not. */
gp_status gp__check_chunk_size(const gp_device *device, size_t size, gp_error *error);

#endif
