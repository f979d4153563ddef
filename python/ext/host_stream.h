/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.host.Stream as other files of the extension see it.
 */
#ifndef EXT_HOST_STREAM_H
#define EXT_HOST_STREAM_H

#include "module.h"

#include <stdbool.h>
#include <stdint.h>

/* The id of a growpool.host.Stream; ValueError when it is closed. */
int ext_host_stream_handle(PyObject *object, uintptr_t *handle);
/* Whether it is closed; the id in any case, under which its last work is known until it is done. */
bool ext_host_stream_is_closed(PyObject *object, uintptr_t *id);
/* True on the worker thread of the stream with the id, inside one of its callables. */
bool ext_host_stream_is_current(uint64_t id);

#endif
