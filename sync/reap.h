/* SPDX-License-Identifier: Apache-2.0
 *
 * The one function that unmaps memory that users have seen (S2), and the list it works on.
 */
#ifndef GP__REAP_H
#define GP__REAP_H

#include "../backing/chunk.h"
#include "timeline.h"

/* A chunk on its way out. Embedded in whatever describes the mapping; linked while it travels. */
struct gp__retired {
    gp_chunk *chunk; /* RETIRING */
    uintptr_t va;
    size_t bytes;
    struct gp__owners owners;
    struct gp__retired *next;
};

struct gp__reaped {
    struct gp__retired *unmapped; /* chunks now UNMAPPED: give them back */
    struct gp__retired
        *abandoned; /* the driver refused to unmap: chunks now ABANDONED, addresses lost */
    struct gp__retired *kept; /* not waited for: still RETIRING */
};

enum gp__reap_mode {
    GP__REAP_WAIT, /* wait for every owner, unknown ones included */
    GP__REAP_READY /* take only those that have passed already */
};

/* Waits as `mode` says, unmaps, and sorts the list into *out; it never calls up. An error (capture,
 * interrupt, driver failure of a fence) stops the waiting: what has passed is still unmapped and the
 * rest is in `kept`. A refused unmap is reported through `abandoned` and, as the first error, in
 * *error with GP_ERR_DRIVER. Enters the device itself. lock: dropped; call with no lock held.
 * Callers own `list`: nobody else may touch its items meanwhile. */
gp_status gp__reap(struct gp__timeline *timeline, struct gp__retired *list, enum gp__reap_mode mode,
                   const struct gp__interrupt *interrupt, struct gp__reaped *out, gp_error *error);

#endif
