/* SPDX-License-Identifier: Apache-2.0
 *
 * Segments: runs of reserved addresses, and what is known of each: which spans tile it, and which chunks are
 * mapped in it. Both are found by address through the page map. It never maps memory.
 *
 * PAGE MAP. One entry for each page, of which those count that the segment's marks name: the first span that
 * starts in the page, and the mapping that starts there. What lies at an address is what starts last at or
 * before it. So a chunk costs one entry whatever its size, and addresses that were never used cost nothing:
 * their entries are memory that nobody touched.
 *
 * All is guarded by the pool's lock.
 */
#ifndef GP__SEGMENT_H
#define GP__SEGMENT_H

#include "../sync/reap.h"
#include "growpool.h"
#include "marks.h"

struct gp__span;

/* One chunk at its addresses. */
struct gp__mapping {
    struct gp__retired retired; /* chunk, va, bytes, owners while retiring. First member. */
    struct gp__segment *segment;
    uintptr_t stream; /* the handle that the backing was asked with */
    uint64_t generation; /* of the chunk, when it was accepted */
    size_t live; /* bytes of it in USED, HELD and (was FREE) CLAIMED spans */
    struct gp__mapping *previous; /* in the pool's idle list, when live == 0 */
    struct gp__mapping *next;
};

/* Both are set only where the segment's marks say so. */
struct gp__page {
    struct gp__mapping *mapping; /* starts in this page */
    struct gp__span *first; /* the lowest span that starts in this page */
};

struct gp__segment {
    uintptr_t va;
    size_t bytes;
    bool lost; /* something in it was abandoned: its addresses are never freed */
    bool by_default; /* counted in what the process reserves by default */
    gp_range *range; /* whose it is; NULL: for blocks. In a range's segment no span is filed */
    size_t mapped_bytes; /* in the page map */
    struct gp__span *first;
    struct gp__page *pages; /* the page map */
    struct gp__marks spans; /* pages in which a span starts */
    struct gp__marks chunks; /* pages in which a mapping starts */
    struct gp__segment *next;
};

/* Reserves a segment that holds `bytes`: of the pool's address space what is left (see ADDRESSES in
 * growpool.h), halved while the device refuses. lock: held, dropped inside. */
gp_status gp__segment_add(gp_pool *pool, size_t bytes, gp_error *error);
/* Reserves exactly `bytes` for a range. The pool does not list it yet. lock: not held. */
gp_status gp__segment_reserve(gp_pool *pool, size_t bytes, struct gp__segment **out,
                              gp_error *error);
/* Frees the addresses and the descriptions of segments that the pool no longer lists; those that are lost
 * or refused stay reserved. Returns the bytes freed. lock: not held. */
size_t gp__segments_free(gp_pool *pool, struct gp__segment *segments);

/* The mapping at va, or NULL. */
struct gp__mapping *gp__mapping_at(const gp_pool *pool, const struct gp__segment *segment,
                                   uintptr_t va);
/* The first mapping of the segment that starts at va or behind it, or NULL. */
struct gp__mapping *gp__mapping_from(const gp_pool *pool, const struct gp__segment *segment,
                                     uintptr_t va);
/* Enters the mapping into the page map, or takes it out. */
void gp__mapping_enter(gp_pool *pool, struct gp__mapping *mapping);
void gp__mapping_erase(gp_pool *pool, struct gp__mapping *mapping);
/* These bytes begin (true) or cease to be live in the mappings under them; keeps the idle list. */
void gp__mapping_count(gp_pool *pool, const struct gp__segment *segment, uintptr_t va, size_t bytes,
                       bool live);
void gp__mapping_idle_add(gp_pool *pool, struct gp__mapping *mapping);
void gp__mapping_idle_remove(gp_pool *pool, struct gp__mapping *mapping);

#endif
