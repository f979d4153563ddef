/* SPDX-License-Identifier: Apache-2.0
 *
 * The process-wide gate between C and Python: every entry into Python from C passes it, and at exit it
 * closes for good. A thread that comes late is parked; it is never raised at, and it never unwinds.
 */
#ifndef EXT_GATE_H
#define EXT_GATE_H

#include "py.h"

#include <stdbool.h>
#include <stdint.h>

/* True: the thread may enter Python, and leaves with ext_gate_leave(). False only on the thread that
 * closed the gate; any other thread does not come back from a closed gate. Entries nest. */
bool ext_gate_enter(void);
void ext_gate_leave(void);
/* The process begins to end, by the hand of the calling thread. */
void ext_gate_begin_end(void);
/* Before telling a thread that something is closed: when that is so because the process ends, any thread
 * but the one that ends it is parked here for good instead of being raised at. Attached. */
void ext_gate_park_if_ending(void);
/* For calls that only let go of something, such as those that a __del__ makes at the very end: true once
 * the gate is closed, when the end of the process takes everything and nothing is left to do. Any thread
 * but the one that ends the process is parked instead. Attached. */
bool ext_gate_has_ended(void);
/* Closes the gate, waits until everybody inside has left, at most timeout_ns and never longer than
 * EXT_GATE_LONGEST_NS. Who waits for the interpreter or runs a short callback is out within
 * milliseconds; who is still inside after a second runs Python code that blocks, and no wait would see
 * it leave. Call detached, after ext_gate_begin_end(). A second call does nothing.
 *
 * A parked thread stays parked: an atexit handler that runs after growpool's, registered before growpool
 * was imported, must join a thread that uses growpool with a timeout. */
#define EXT_GATE_LONGEST_NS UINT64_C(1000000000)
void ext_gate_close(uint64_t timeout_ns);
bool ext_gate_is_closed(void);

/* Around everything that may block: the thread lets go of the interpreter and takes it again. A thread
 * that would come back after the gate closed is parked instead. */
PyThreadState *ext_leave_python(void);
void ext_reenter_python(PyThreadState *saved);

/* Around what ends the use of memory: free, close, the end of a pin. A thread that uses its own default
 * stream (CUDA handle 2) records an event there, which can block behind another thread's driver call, so it
 * lets go of the interpreter meanwhile; others make no driver call and get NULL. For finalisers too, and
 * for threads that are not attached. What is about to be freed has to be claimed first, for others run. */
PyThreadState *ext_leave_to_free(void);
void ext_return_from_free(PyThreadState *saved); /* NULL: nothing */

/* The calling thread attached to the interpreter for a call from C into Python. */
struct ext_attached {
    PyGILState_STATE gil;
    PyObject *pending; /* the exception that was being raised on this thread, set aside */
};
/* False when the gate is closed: do without Python. Context: no growpool lock held (P1). */
bool ext_attach(struct ext_attached *attached);
void ext_detach(struct ext_attached *attached);

uint64_t ext_now_ns(void); /* CLOCK_MONOTONIC */

#endif
