/* SPDX-License-Identifier: Apache-2.0
 *
 * Quick lists, one for each stream of a pool: the words, the picture and the reasons are in quick.c.
 */
#ifndef GP__QUICK_H
#define GP__QUICK_H

#include "pool.h"

/* A kept block of exactly these bytes and flags is the caller's; false if there is none. The stream lives and
 * does not capture. lock: not needed. */
bool gp__quick_malloc(gp_stream *stream, size_t bytes, unsigned flags, uintptr_t *out);
/* Frees a block that this stream's list has lent; false if it did not. lock: not needed. */
bool gp__quick_free(const gp_pool *pool, gp_stream *stream, uintptr_t address, unsigned flags);
/* The rest is lock: held. Makes the stream's list, so that a free allocates nothing. */
gp_status gp__quick_open(gp_pool *pool, gp_stream *stream, gp_error *error);
/* Frees a block in use by keeping it; false, and nothing is done, when that cannot be. */
bool gp__quick_keep(gp_pool *pool, struct gp__span *span);
/* Whether the USED span of a block is kept: to users it is free. */
bool gp__quick_is_kept(const struct gp__span *span);
/* A block in use becomes an ordinary one. */
void gp__quick_forget(struct gp__span *span);
/* What the stream's list keeps, or all lists do, becomes free memory. */
void gp__quick_flush(gp_pool *pool, const gp_stream *stream);
void gp__quick_flush_all(gp_pool *pool);
/* Takes the pool's lock and flushes all lists: for whoever wants to see what is free. */
void gp__quick_lock(gp_pool *pool);
/* The stream's list, or all, end for good; lent blocks become ordinary ones. */
void gp__quick_end(void *pool, gp_stream *stream);
void gp__quick_end_all(gp_pool *pool);
size_t gp__quick_kept_bytes(const gp_pool *pool);
/* The fewest bytes that each list kept since this was last asked, summed, and what they keep now. */
size_t gp__quick_least_bytes(const gp_pool *pool, size_t *kept);
#ifdef GP_TESTING
/* How many blocks the lists know; SIZE_MAX when one of them is not what its entry says. */
size_t gp__quick_count(const gp_pool *pool);
#endif

#endif
