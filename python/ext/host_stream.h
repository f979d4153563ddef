/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.host.Stream as other files of the extension see it.
 */
#ifndef EXT_HOST_STREAM_H
#define EXT_HOST_STREAM_H

#include "module.h"

#include <stdint.h>

/* The id of a growpool.host.Stream; ValueError when it is closed. */
int ext_host_stream_handle(PyObject *object, uintptr_t *handle);

#endif
