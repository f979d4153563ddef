/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool.cuda.Stream as other files of the extension see it.
 */
#ifndef EXT_CUDA_STREAM_H
#define EXT_CUDA_STREAM_H

#include "../../backing/backing.h"
#include "module.h"

#include <stdbool.h>
#include <stdint.h>

/* The handle of a growpool.cuda.Stream for use on `device`; ValueError when it is closed or belongs to
 * another device, TypeError when `device` is no GPU. */
int ext_cuda_stream_handle(PyObject *object, gp_device *device, uintptr_t *handle);
bool ext_cuda_stream_is_closed(PyObject *object);

#endif
