/* SPDX-License-Identifier: Apache-2.0
 *
 * The reaper: one background thread for the process that records fences and retires chunks, so that
 * no caller stalls behind a record and `trim(wait=False)` can return. It starts with the first kick,
 * sleeps while nothing is due, and knows its clients only as functions.
 *
 * A client is called with no lock held, never by two threads at once, and says when it wants to be
 * called again. gp__reaper_remove() returns when no call of that client is running, and none will be
 * (except from inside the client's own call, where it only marks it).
 * After gp_begin_exit() or in a forked child the reaper does nothing.
 */
#ifndef GP__REAPER_H
#define GP__REAPER_H

#include <stdbool.h>
#include <stdint.h>

#include "../backing/backing.h"

/* What a client says that can only look again and again whether others did something. */
#define GP__REAPER_WATCH_NS UINT64_C(50000000)

/* Does what is due and returns nanoseconds until the next call; UINT64_MAX: when kicked. */
typedef uint64_t (*gp__reaper_function)(void *context);

struct gp__reaper_client {
    gp__reaper_function function;
    void *context;
    struct gp__reaper_client *next;
    uint64_t due; /* CLOCK_MONOTONIC ns; UINT64_MAX: not scheduled */
    bool listed;
    bool watches; /* its latest call said GP__REAPER_WATCH_NS or more */
    bool removed;
};

/* Schedules the client for now, listing it if it is not; starts the thread if there is none. From inside
 * the client's own call it does nothing: the call's result says when to come again. If the
 * thread cannot be started nothing is lost: work stays until an explicit trim, drain or close. */
void gp__reaper_kick(struct gp__reaper_client *client);
/* Sets *flag and kicks. Whoever sees the flag may free the client once gp__reaper_remove() returned: that
 * waits for this call to be done with it. */
void gp__reaper_hand_over(struct gp__reaper_client *client, bool *flag);
void gp__reaper_remove(struct gp__reaper_client *client);
/* Waits until no client has anything to do, now or at a time it named, then stops the thread and waits for
 * it; all of it at most timeout_ns, and the thread is told to stop in any case. A client that watches is
 * called once more and not waited for. True if the thread ended. For process exit. */
bool gp__reaper_stop(uint64_t timeout_ns);

#endif
