/* SPDX-License-Identifier: Apache-2.0
 *
 * Between the two files that show the simulated device to Python tests; sim.c has the functions that Python
 * sees. In test builds alone.
 */
#ifndef EXT_SIM_H
#define EXT_SIM_H

#include "py.h"

#ifdef GROWPOOL_TESTING

#include <stdbool.h>

struct gp__sim;

/* From now on each call that may block reports when its thread holds the interpreter. Attached. */
void ext_sim_watch_blocking_calls(void);
/* The next call of that name on that device stands still, before it does anything, until
 * ext_sim_go_on(); 20 s at most. Any thread. */
void ext_sim_stop_at(struct gp__sim *sim, const char *call);
/* A thread stands still now. Any thread. */
bool ext_sim_is_stopped(void);
/* Lets the thread go on and disarms the stop; true when one stood still. Any thread. */
bool ext_sim_go_on(void);

#endif
#endif
