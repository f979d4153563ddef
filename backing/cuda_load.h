/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding the CUDA driver: the library, its functions, and whether a driver call may be made now.
 * Internal to backing/cuda*.c. Loading happens once for a process and is never undone.
 */
#ifndef GP__CUDA_LOAD_H
#define GP__CUDA_LOAD_H

#include "backing.h"
#include "cuda_abi.h"

/* Loads and initialises the driver, or finds it so. GP_ERR_UNAVAILABLE with a sentence that says what
 * is missing: the answer is final for the process. GP_ERR_STATE: forked child, or exiting. Creates
 * no context. May block. */
gp_status gp__cuda_load(const struct gp__cuda_api **out, gp_error *error);

/* Finds device `ordinal` and checks that it has virtual memory management. */
gp_status gp__cuda_probe(const struct gp__cuda_api *api, int ordinal, gp__cu_device *out,
                         gp_error *error);

/* A device attribute; `fallback` when the driver does not know it, whatever error it answers with. */
int gp__cuda_attribute(const struct gp__cuda_api *api, gp__cu_device device,
                       gp__cu_attribute attribute, int fallback);

/* gp__driver_error() with the driver's name for `code`. */
gp_status gp__cuda_error(const struct gp__cuda_api *api, gp_error *error, gp_status status,
                         const char *call, gp__cu_result code, uintptr_t va, size_t size);

#endif
