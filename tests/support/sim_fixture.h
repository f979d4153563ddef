/* SPDX-License-Identifier: Apache-2.0
 *
 * What the simulated driver's own tests share: a device with one mapped page, a handler that counts
 * violations, an event on a fresh stream, work and captures that must succeed.
 */
#ifndef GP__SIM_FIXTURE_H
#define GP__SIM_FIXTURE_H

#include "tests/support/check.h"
#include "tests/support/sim.h"

#include "backing/lock.h"

#define PAGE (UINT64_C(2) << 20)

struct fixture {
    gp__sim *sim;
    gp_device *device;
    const struct gp__driver *driver;
    unsigned reported;
    char text[400];
    gp_error error;
    uintptr_t va; /* 8 pages reserved */
    gp__memory memory; /* 1 page, mapped with access at va */
};

static inline void note_violation(void *context, const char *message)
{
    struct fixture *f = context;

    f->reported++;
    snprintf(f->text, sizeof f->text, "%s", message);
}

static inline int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);

    assert_non_null(f);
    f->sim = gp__sim_create(NULL);
    assert_non_null(f->sim);
    f->device = gp__sim_device(f->sim);
    f->driver = f->device->driver;
    gp__sim_on_violation(f->sim, note_violation, f);
    CHECK_OK(f->driver->reserve(f->device, 8 * PAGE, &f->va, &f->error), &f->error);
    CHECK_OK(f->driver->create(f->device, PAGE, GP_LOCATION_DEVICE, 0, &f->memory, &f->error),
             &f->error);
    CHECK_OK(f->driver->map(f->device, f->va, PAGE, f->memory, &f->error), &f->error);
    CHECK_OK(f->driver->set_access(f->device, f->va, PAGE, GP_LOCATION_DEVICE, NULL, &f->error),
             &f->error);
    *state = f;
    return 0;
}

static inline int tear_down(void **state)
{
    struct fixture *f = *state;

    gp__sim_destroy(f->sim);
    free(f);
    return 0;
}

/* Exactly one violation since the last check, with these words in it. */
static inline void expect_violation(struct fixture *f, const char *words)
{
    CHECK(f->reported == 1, "%u violations reported, want 1 (\"%s\"); latest: %s", f->reported,
          words, f->text);
    CHECK(strstr(f->text, words) != NULL, "reported \"%s\", want \"%s\"", f->text, words);
    assert_string_equal(f->text, gp__sim_violation_text(f->sim));
    f->reported = 0;
}

static inline void expect_none(struct fixture *f)
{
    CHECK(f->reported == 0, "an unexpected violation: %s", f->text);
}

static inline void expect_refusal(struct fixture *f, gp_status got, const char *name)
{
    CHECK_STATUS(GP_ERR_DRIVER, got, &f->error);
    assert_string_equal(f->error.name, name);
}

struct event_fixture {
    gp__event *event;
    struct gp__stream_key key;
    uintptr_t stream;
    struct gp__entry entry;
};

/* A fresh stream and an event, inside enter(). */
static inline struct event_fixture begin_events(struct fixture *f, unsigned flags)
{
    struct event_fixture e;

    memset(&e, 0, sizeof e);
    e.stream = gp__sim_stream_create(f->sim, flags);
    CHECK_OK(f->driver->stream_resolve(f->device, e.stream, &e.key, NULL), NULL);
    CHECK_OK(f->driver->event_create(f->device, f->device->context, &e.event, NULL), NULL);
    CHECK_OK(f->driver->enter(f->device, &e.entry, NULL), NULL);
    return e;
}

static inline void end_events(struct fixture *f, struct event_fixture *e)
{
    f->driver->leave(f->device, &e->entry);
    f->driver->event_destroy(f->device, e->event);
    expect_none(f);
}

static inline uint64_t capture_id(struct fixture *f, const struct gp__stream_key *key)
{
    uint64_t id = UINT64_MAX;

    CHECK_OK(f->driver->capture_id(f->device, key, &id, &f->error), &f->error);
    return id;
}

static inline struct gp__stream_key resolve(struct fixture *f, uintptr_t handle)
{
    struct gp__stream_key key;

    CHECK_OK(f->driver->stream_resolve(f->device, handle, &key, &f->error), &f->error);
    return key;
}

static inline void fill(struct fixture *f, uintptr_t va, size_t bytes,
                        const struct gp__stream_key *key)
{
    CHECK_OK(f->driver->fill(f->device, va, bytes, 7, key, &f->error), &f->error);
}

/* What capture_keep is told to call: it counts, and looks whether the simulator is locked. */
struct told {
    gp__sim *sim;
    unsigned count;
};

static inline void note_gone(void *context)
{
    struct told *told = context;

    told->count++;
    (void)gp__sim_pending_all(told->sim); /* hangs under the simulator's lock */
    gp__assert_no_lock();
}

static inline void keep(struct fixture *f, const struct gp__stream_key *key, struct told *told)
{
    told->sim = f->sim;
    CHECK_OK(f->driver->capture_keep(f->device, key, note_gone, told, &f->error), &f->error);
}

static inline size_t keep_count(struct fixture *f)
{
    struct gp__sim_ledger ledger;

    gp__sim_get_ledger(f->sim, &ledger);
    return ledger.keep_count;
}

static inline void expect_capture_refusal(struct fixture *f, gp_status got, const char *name)
{
    CHECK_STATUS(GP_ERR_CAPTURE, got, &f->error);
    assert_string_equal(f->error.name, name);
}

#endif
