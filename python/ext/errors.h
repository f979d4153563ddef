/* SPDX-License-Identifier: Apache-2.0
 *
 * From gp_error to Python exceptions: one table, no policy.
 */
#ifndef EXT_ERRORS_H
#define EXT_ERRORS_H

#include "../../backing/backing.h"
#include "module.h"

/* Raises the exception for a status other than GP_OK, with `cause` (borrowed, NULL for none) as its
 * __cause__. Attached. */
void ext_raise(struct module_state *state, gp_status status, const gp_error *error,
               PyObject *cause);
/* The classes of growpool._errors. 0, or -1 with an exception. */
int ext_load_errors(struct module_state *state);
void ext_raise_closed(struct module_state *state, const char *what);
/* A size as Python sees it: None for GP_NO_LIMIT. New reference. */
PyObject *ext_limit_object(size_t limit);

#endif
