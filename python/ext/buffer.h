/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.Buffer as other files of the extension see it.
 */
#ifndef EXT_BUFFER_H
#define EXT_BUFFER_H

#include "pool.h"

/* pool.allocate(): a new Buffer, or NULL with an exception. */
PyObject *ext_buffer_allocate(struct pool_object *pool, size_t size, PyObject *stream);

#endif
