/* SPDX-License-Identifier: Apache-2.0
 *
 * The least device that chunks and backings need: it counts creates, releases, enters and leaves,
 * and fails where it is told to. It has no addresses and no streams; sim.h has.
 */
#ifndef GP__FAKE_DEVICE_H
#define GP__FAKE_DEVICE_H

#include <stdatomic.h>

#include "backing/driver.h"
#include "tests/support/check.h"

struct fake_device {
    gp_device device;
    struct gp__driver driver;
    _Atomic uint64_t creates;
    _Atomic uint64_t releases;
    _Atomic int entered; /* enter() without leave() */
    _Atomic uint64_t enters;
    gp_status create_status; /* GP_OK: create works */
    gp_status release_status;
    gp_status enter_status;
    _Atomic int last_location; /* gp_location */
};

static inline struct fake_device *fake_of(gp_device *device)
{
    return device->state;
}

static inline gp_status fake_create(gp_device *device, size_t bytes, gp_location location,
                                    unsigned flags, gp__memory *out, gp_error *error)
{
    struct fake_device *fake = fake_of(device);
    (void)flags;
    if (fake->create_status != GP_OK) {
        return gp__driver_error(error, fake->create_status, "fake_create", 2, "FAKE_FAILURE", 0,
                                bytes);
    }
    atomic_store(&fake->last_location, (int)location);
    *out = atomic_fetch_add(&fake->creates, 1) + 1;
    return GP_OK;
}

static inline gp_status fake_release(gp_device *device, gp__memory memory, size_t bytes,
                                     gp_error *error)
{
    struct fake_device *fake = fake_of(device);
    (void)memory;
    if (fake->release_status != GP_OK) {
        return gp__driver_error(error, fake->release_status, "fake_release", 1, "FAKE_FAILURE", 0,
                                bytes);
    }
    atomic_fetch_add(&fake->releases, 1);
    return GP_OK;
}

static inline gp_status fake_memory_info(gp_device *device, size_t *free_bytes, size_t *total_bytes,
                                         gp_error *error)
{
    (void)device;
    (void)error;
    *free_bytes = 3;
    *total_bytes = 5;
    return GP_OK;
}

static inline gp_status fake_enter(gp_device *device, struct gp__entry *entry, gp_error *error)
{
    struct fake_device *fake = fake_of(device);
    if (fake->enter_status != GP_OK) {
        return gp__driver_error(error, fake->enter_status, "fake_enter", 1, "FAKE_FAILURE", 0, 0);
    }
    entry->previous_mode = 7;
    atomic_fetch_add(&fake->entered, 1);
    atomic_fetch_add(&fake->enters, 1);
    return GP_OK;
}

static inline void fake_leave(gp_device *device, const struct gp__entry *entry)
{
    struct fake_device *fake = fake_of(device);
    /* What enter() saved has to come back; anything else counts as no leave at all. */
    if (entry->previous_mode == 7) {
        atomic_fetch_sub(&fake->entered, 1);
    }
}

static inline void fake_device_init(struct fake_device *fake)
{
    memset(fake, 0, sizeof *fake);
    fake->driver = (struct gp__driver){
        .memory_info = fake_memory_info,
        .create = fake_create,
        .release = fake_release,
        .enter = fake_enter,
        .leave = fake_leave,
    };
    fake->device = (gp_device){
        .driver = &fake->driver,
        .kind = GP_DEVICE_SIM,
        .ordinal = 3,
        .granularity = 2 * CHECK_MIB,
        .device_accessible = true,
        .name = "sim:3",
        .state = fake,
    };
}

/* Everything that was made was released, and every enter had its leave. */
static inline void fake_device_check_clean(struct fake_device *fake)
{
    CHECK(atomic_load(&fake->creates) == atomic_load(&fake->releases),
          "%llu created, %llu released", (unsigned long long)atomic_load(&fake->creates),
          (unsigned long long)atomic_load(&fake->releases));
    CHECK(atomic_load(&fake->entered) == 0, "%d enters without a leave",
          atomic_load(&fake->entered));
}

#endif
