/* SPDX-License-Identifier: Apache-2.0
 *
 * The backing that makes chunks straight from the device, or from host memory near it, and releases
 * them when they come back. It keeps nothing.
 */
#include "backing_internal.h"

/* What the backings' contexts point to. */
static gp_location device_location = GP_LOCATION_DEVICE;
static gp_location host_location = GP_LOCATION_HOST;

static gp_status make_chunk(void *context, const gp_request *request, gp_chunk **out,
                            gp_error *error)
{
    const gp_location *location = context;
    return gp_chunk_create(request->device, request->size, *location, 0, out, error);
}

static gp_status drop_chunk(void *context, gp_chunk *chunk, const gp_request *request,
                            gp_error *error)
{
    (void)context;
    (void)request;
    (void)error;
    gp_chunk_release(chunk);
    return GP_OK;
}

static const gp_backing_ops device_ops = {.alloc = make_chunk, .free = drop_chunk};

gp_status gp_backing_device(gp_location location, gp_backing **out, gp_error *error)
{
    switch (location) {
    case GP_LOCATION_DEVICE:
        return gp_backing_create(&device_ops, &device_location, out, error);
    case GP_LOCATION_HOST:
        return gp_backing_create(&device_ops, &host_location, out, error);
    }
    return gp_error_set(error, GP_ERR_ARGUMENT, "location %d is unknown", (int)location);
}
