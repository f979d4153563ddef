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

enum gp__reap_mode {
    GP__REAP_READY, /* take only those that have passed already */
    GP__REAP_SEEN, /* wait for streams that can be fenced one by one; leave the rest */
    GP__REAP_ALL, /* wait for every owner, unknown ones too */
    GP__REAP_FINAL /* as ALL; what the driver refuses to unmap twice is abandoned, not kept */
};

struct gp__reaped {
    struct gp__retired *unmapped; /* chunks now UNMAPPED: give them back */
    struct gp__retired *abandoned; /* chunks now ABANDONED: their addresses are lost */
    struct gp__retired *kept; /* still RETIRING */
};

/* Waits as `mode` says, unmaps, and sorts the list into *out; it never calls up. An error (a capture,
 * an interrupt, a fence or an unmap that the driver refused) is reported after everything else that
 * can be done was done. If the interrupt hook forked, the child keeps the rest as it is. Callers own `list`: nobody else touches its items meanwhile. Enters the
 * device itself. lock: dropped. */
gp_status gp__reap(struct gp__timeline *timeline, struct gp__retired *list, enum gp__reap_mode mode,
                   const struct gp__interrupt *interrupt, struct gp__reaped *out, gp_error *error);

#endif
