/* SPDX-License-Identifier: Apache-2.0
 *
 * A call from Python into the core, from detaching to raising. Callbacks that run below it on the same
 * thread leave their exceptions in its frame; the end of the call raises, warns, and chains them.
 *
 * WHO RAISES WHAT, once the operation is over and the thread is attached again
 *   alloc raised MemoryError           the __cause__ of OutOfMemoryError, if it comes to that
 *   alloc raised anything else         raised unchanged
 *   a signal handler raised in a wait  raised unchanged
 *   free raised an Exception           ReleaseWarning, with the exception as its __cause__
 *   free raised another BaseException  raised unchanged, last, above everything else; of several the
 *                                      first, and the others as ReleaseWarning
 *   giving such a warning raised       the same: unchanged if it is no Exception, or if nothing else is
 *                                      raised; else it goes to sys.unraisablehook
 */
#ifndef EXT_CALL_H
#define EXT_CALL_H

#include "../../backing/backing.h"
#include "module.h"

#include <stdbool.h>

enum {
    EXT_CALL_FREE_RAISES = 1 /* a direct call of a backing's free: what it raised is raised on */
};

struct ext_call {
    struct module_state *state;
    PyThreadState *saved;
    gp_error error;
    unsigned flags;
    uint64_t deadline; /* CLOCK_MONOTONIC ns after which waits give up; 0 for never */
    PyObject *exception; /* from alloc or a signal handler; a MemoryError yields to any other */
    PyObject *
        base_exception; /* no Exception: from free, or from showing or telling of what free raised */
    PyObject *release_errors; /* list of (message, exception) from free; NULL for none */
    struct ext_call *previous;
};

/* Attached before, detached after. The caller keeps alive whatever the core is given. */
void ext_call_begin(struct ext_call *call, struct module_state *state, unsigned flags);
/* Detached before, attached after. 0: status was GP_OK and nothing is raised. -1: raised. */
int ext_call_end(struct ext_call *call, gp_status status);
/* As ext_call_end() for the end of the process: what callbacks raised goes to sys.unraisablehook, and
 * everything else is forgotten. */
void ext_call_end_quietly(struct ext_call *call);
/* The innermost call of this thread, or NULL (the reaper, threads of other libraries). */
struct ext_call *ext_call_current(void);

/* Both take the raised exception away; attached. Without a call to keep it for, it is handed to
 * sys.unraisablehook. `culprit` is the callable, `message` (borrowed) the text of a ReleaseWarning. */
void ext_call_keep_exception(PyObject *culprit);
void ext_call_keep_release_error(struct module_state *state, PyObject *culprit, PyObject *message);
/* Drops the raised exception, of something that can be done without. One that is no Exception is kept: it
 * is nobody's to drop. Attached. */
void ext_call_drop_exception(PyObject *culprit);

/* For __exit__(exc_type, exc, traceback) in which something was raised: true when that is no Exception and
 * so has to be seen; it gets the body's exception as context. */
bool ext_add_context(PyObject *const *args, Py_ssize_t nargs);

#define EXT_ENTER_DOC "__enter__($self, /)\n--\n\nThe object itself. It must not be closed."
#define EXT_EXIT_DOC  "__exit__($self, exc_type, exc, traceback, /)\n--\n\nClose it."

/* gp_pool_options.interrupted: notices signals and deadlines on the thread of an explicit call. */
int ext_call_interrupted(void *unused);

#endif
