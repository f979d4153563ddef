/* SPDX-License-Identifier: Apache-2.0
 *
 * What growpool enqueues on host streams: copies and fills happen in the stream's order or at once on
 * the calling thread, a wait holds back its own stream and no other, and what fails enqueues nothing.
 */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <time.h>

#include "backing/backing_internal.h"
#include "backing/driver.h"
#include "backing/host_stream.h"
#include "backing/memory.h"
#include "child.h"

#define MILLISECOND UINT64_C(1000000)
#define LONG_WAIT   (UINT64_C(20000) * MILLISECOND) /* reached only when a test fails */
#define BYTES       64

static gp_device *host;
static const struct gp__driver *driver;
static const struct gp__stream_key calling = {.always_passed = true};
static int64_t quiet; /* allocations while no stream lives */

static int open_host(void **state)
{
    gp_error error;
    (void)state;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &host, &error), &error);
    driver = host->driver;
    quiet = gp__memory_live();
    return 0;
}

/* ---- helpers ------------------------------------------------------------------------------------ */

/* A stream whose first item waits until the test opens it. */
struct gated {
    gp_host_stream *stream;
    struct gp__stream_key key;
    sem_t opened;
};

static void pass_gate(void *context)
{
    (void)sem_wait(&((struct gated *)context)->opened);
}

static gp_host_stream *make_stream(struct gp__stream_key *key)
{
    gp_host_stream *stream;
    gp_error error;
    CHECK_OK(gp_host_stream_create(&stream, &error), &error);
    CHECK_OK(driver->stream_resolve(host, (uintptr_t)gp_host_stream_id(stream), key, &error),
             &error);
    return stream;
}

static void gated_begin(struct gated *gated)
{
    assert_int_equal(sem_init(&gated->opened, 0, 0), 0);
    gated->stream = make_stream(&gated->key);
    CHECK_OK(gp_host_stream_submit(gated->stream, pass_gate, gated, NULL), NULL);
}

static void open_gate(struct gated *gated)
{
    (void)sem_post(&gated->opened);
}

static void wait_for_all(gp_host_stream *stream)
{
    CHECK_OK(gp_host_stream_wait(stream, LONG_WAIT), NULL);
}

static void gated_end(struct gated *gated)
{
    open_gate(gated);
    wait_for_all(gated->stream);
    gp_host_stream_close(gated->stream);
}

static gp__event *make_event(const struct gp__stream_key *recorded)
{
    gp__event *event;
    gp_error error;
    CHECK_OK(driver->event_create(host, host->context, &event, &error), &error);
    CHECK_OK(driver->event_record(host, event, recorded, &error), &error);
    return event;
}

static void fill(unsigned char *at, size_t bytes, unsigned char value,
                 const struct gp__stream_key *key)
{
    gp_error error;
    CHECK_OK(driver->fill(host, (uintptr_t)at, bytes, value, key, &error), &error);
}

static void copy(unsigned char *to, const unsigned char *from, size_t bytes,
                 const struct gp__stream_key *key)
{
    gp_error error;
    CHECK_OK(driver->copy(host, (uintptr_t)to, (uintptr_t)from, bytes, key, &error), &error);
}

static void stream_wait(const struct gp__stream_key *key, gp__event *event)
{
    gp_error error;
    CHECK_OK(driver->stream_wait(host, key, event, &error), &error);
}

/* Workers drop what they hold a moment after their last work. */
static void expect_quiet(void)
{
    for (int i = 0; i < 20000 && gp__memory_live() != quiet; i++) {
        struct timespec moment = {.tv_nsec = 1000000};
        (void)nanosleep(&moment, NULL);
    }
    assert_int_equal(gp__memory_live(), quiet);
}

static void count_up(unsigned char *bytes)
{
    for (size_t i = 0; i < BYTES; i++) {
        bytes[i] = (unsigned char)i;
    }
}

/* ---- copies and fills ------------------------------------------------------------------------------ */

static void the_calling_thread_has_it_done(void **state)
{
    (void)state;
    unsigned char bytes[BYTES];
    fill(bytes, BYTES, 0x5A, &calling);
    for (size_t i = 0; i < BYTES; i++) {
        assert_int_equal(bytes[i], 0x5A);
    }
    count_up(bytes);
    copy(bytes + 1, bytes, BYTES - 1, &calling); /* they overlap */
    for (size_t i = 1; i < BYTES; i++) {
        assert_int_equal(bytes[i], i - 1);
    }
    count_up(bytes);
    copy(bytes, bytes + 1, BYTES - 1, &calling);
    for (size_t i = 0; i < BYTES - 1; i++) {
        assert_int_equal(bytes[i], i + 1);
    }
    copy(NULL, NULL, 0, &calling);
    fill(NULL, 0, 1, &calling);
    assert_int_equal(gp__memory_live(), quiet);
}

static void work_happens_in_the_streams_order(void **state)
{
    (void)state;
    unsigned char bytes[BYTES] = {0};
    struct gated gated;
    gated_begin(&gated);
    fill(bytes, BYTES, 1, &gated.key);
    fill(bytes, BYTES / 2, 2, &gated.key);
    copy(bytes + 1, bytes, BYTES - 1, &gated.key);
    fill(bytes, 1, 3, &gated.key);
    fill(bytes, 0, 4, &gated.key);
    copy(NULL, NULL, 0, &gated.key);
    for (size_t i = 0; i < BYTES; i++) {
        assert_int_equal(bytes[i], 0); /* the stream has not come that far */
    }
    open_gate(&gated);
    wait_for_all(gated.stream);
    assert_int_equal(bytes[0], 3);
    for (size_t i = 1; i < BYTES; i++) {
        assert_int_equal(bytes[i], i <= BYTES / 2 ? 2 : 1);
    }
    gated_end(&gated);
    expect_quiet();
}

static void a_fence_covers_a_copy(void **state)
{
    (void)state;
    unsigned char from[BYTES], to[BYTES] = {0};
    struct gated gated;
    gated_begin(&gated);
    count_up(from);
    copy(to, from, BYTES, &gated.key);
    gp__event *event = make_event(&gated.key);
    CHECK_STATUS(GP_NOT_READY, driver->event_query(host, event, NULL), NULL);
    open_gate(&gated);
    CHECK_OK(driver->event_wait(host, event, LONG_WAIT, NULL), NULL);
    assert_memory_equal(to, from, BYTES);
    driver->event_destroy(host, event);
    gated_end(&gated);
}

/* Closed and at work still, then closed and drained: the handle is known in the first case only. */
static void a_closed_stream_takes_no_work(void **state)
{
    (void)state;
    unsigned char bytes[BYTES] = {0};
    uintptr_t at = (uintptr_t)bytes;
    struct gated gated, other;
    gp_error error;
    gated_begin(&gated);
    gated_begin(&other);
    gp__event *event = make_event(&other.key);
    gp_host_stream_close(gated.stream);
    for (int drained = 0; drained < 2; drained++) {
        CHECK_STATUS(GP_ERR_STATE, driver->fill(host, at, BYTES, 1, &gated.key, &error), &error);
        assert_int_equal(error.reason, GP_REASON_CLOSED);
        CHECK_STATUS(GP_ERR_STATE, driver->copy(host, at, at, BYTES, &gated.key, &error), &error);
        CHECK_STATUS(GP_ERR_STATE, driver->stream_wait(host, &gated.key, event, &error), &error);
        struct gp__stream_key key;
        open_gate(&gated);
        while (driver->stream_resolve(host, gated.key.handle, &key, NULL) == GP_OK) {
            struct timespec moment = {.tv_nsec = 1000000};
            (void)nanosleep(&moment, NULL);
        }
    }
    assert_int_equal(bytes[0], 0);
    driver->event_destroy(host, event);
    gated_end(&other);
    expect_quiet(); /* what was refused was given back */
}

static void work_that_finds_no_memory_is_not_enqueued(void **state)
{
    (void)state;
    unsigned char bytes[BYTES] = {0};
    struct gated gated, other;
    gp_error error;
    gated_begin(&gated);
    gated_begin(&other);
    gp__event *event = make_event(&other.key);
    int64_t before = gp__memory_live();
    for (uint64_t n = 1; n <= 3; n++) {
        uintptr_t at = (uintptr_t)bytes;
        if (n <= 2) {
            gp__memory_fail_at(n, 0);
            CHECK_STATUS(GP_ERR_HOST_MEMORY, driver->fill(host, at, BYTES, 1, &gated.key, &error),
                         &error);
            gp__memory_fail_at(n, 0);
            CHECK_STATUS(GP_ERR_HOST_MEMORY, driver->copy(host, at, at, 8, &gated.key, &error),
                         &error);
        }
        gp__memory_fail_at(n, 0);
        CHECK_STATUS(GP_ERR_HOST_MEMORY, driver->stream_wait(host, &gated.key, event, &error),
                     &error);
        gp__memory_fail_at(0, 0);
        assert_int_equal(gp__memory_live(), before);
    }
    gp__memory_fail_at(1, 0);
    fill(bytes, BYTES, 0, &calling); /* which needs none */
    gp__memory_fail_at(0, 0);
    open_gate(&gated);
    wait_for_all(gated.stream); /* and so does not wait for the other */
    assert_int_equal(bytes[0], 0);
    driver->event_destroy(host, event);
    gated_end(&gated);
    gated_end(&other);
    expect_quiet();
}

/* ---- waits inside streams ------------------------------------------------------------------------ */

static void a_wait_holds_back_its_own_stream_only(void **state)
{
    (void)state;
    unsigned char bytes[BYTES] = {0};
    struct gated gated;
    struct gp__stream_key waiting_key, free_key;
    gated_begin(&gated);
    gp_host_stream *waiting = make_stream(&waiting_key);
    gp_host_stream *free_stream = make_stream(&free_key);
    gp__event *event = make_event(&gated.key);
    stream_wait(&waiting_key, event);
    fill(bytes, 1, 1, &waiting_key);
    fill(bytes + 1, 1, 1, &free_key);
    wait_for_all(free_stream);
    assert_int_equal(bytes[1], 1);
    CHECK_STATUS(GP_NOT_READY, gp_host_stream_wait(waiting, 5 * MILLISECOND), NULL);
    assert_int_equal(bytes[0], 0);
    /* Neither a later record nor the end of the event lets it go earlier. */
    CHECK_OK(driver->event_record(host, event, &free_key, NULL), NULL);
    driver->event_destroy(host, event);
    CHECK_STATUS(GP_NOT_READY, gp_host_stream_wait(waiting, 5 * MILLISECOND), NULL);
    assert_int_equal(bytes[0], 0);
    open_gate(&gated);
    wait_for_all(waiting);
    assert_int_equal(bytes[0], 1);
    gp_host_stream_close(waiting);
    gp_host_stream_close(free_stream);
    gated_end(&gated);
    expect_quiet();
}

static void waits_that_have_nothing_to_wait_for(void **state)
{
    (void)state;
    struct gp__stream_key key;
    gp_host_stream *stream = make_stream(&key);
    gp__event *event;
    CHECK_OK(driver->event_create(host, host->context, &event, NULL), NULL);
    int64_t before = gp__memory_live();
    stream_wait(&key, event); /* never recorded */
    stream_wait(&calling, event);
    assert_int_equal(gp__memory_live(), before);
    driver->event_destroy(host, event);
    gp_host_stream_close(stream);
    expect_quiet();
}

/* Fences that the stream itself has to pass, alone or among others, do not hang it. */
static void a_stream_may_wait_for_itself(void **state)
{
    (void)state;
    unsigned char byte = 0;
    struct gated gated, other;
    gated_begin(&gated);
    gated_begin(&other);
    gp__event *own = make_event(&gated.key);
    gp__event *all = make_event(&gated.key);
    CHECK_OK(driver->event_record_context(host, all, NULL), NULL);
    stream_wait(&gated.key, own);
    stream_wait(&gated.key, all);
    fill(&byte, 1, 1, &gated.key);
    open_gate(&gated);
    CHECK_STATUS(GP_NOT_READY, gp_host_stream_wait(gated.stream, 5 * MILLISECOND), NULL);
    assert_int_equal(byte, 0);
    open_gate(&other);
    wait_for_all(gated.stream);
    assert_int_equal(byte, 1);
    driver->event_destroy(host, own);
    driver->event_destroy(host, all);
    gated_end(&gated);
    gated_end(&other);
    expect_quiet();
}

static void *open_elsewhere(void *context)
{
    open_gate(context);
    return NULL;
}

static void the_calling_thread_waits_right_there(void **state)
{
    (void)state;
    unsigned char byte = 0;
    struct gated gated;
    pthread_t thread;
    gated_begin(&gated);
    fill(&byte, 1, 1, &gated.key);
    gp__event *event = make_event(&gated.key);
    assert_int_equal(pthread_create(&thread, NULL, open_elsewhere, &gated), 0);
    stream_wait(&calling, event);
    assert_int_equal(byte, 1);
    assert_int_equal(pthread_join(thread, NULL), 0);
    driver->event_destroy(host, event);
    gated_end(&gated);
}

struct selfish {
    struct gp__stream_key key;
    gp_status waited;
    char message[sizeof((gp_error *)0)->message];
};

static void wait_for_myself(void *context)
{
    struct selfish *selfish = context;
    gp__event *event;
    gp_error error;
    if (driver->event_create(host, host->context, &event, NULL) == GP_OK &&
        driver->event_record(host, event, &selfish->key, NULL) == GP_OK) {
        selfish->waited = driver->stream_wait(host, &calling, event, &error);
        snprintf(selfish->message, sizeof selfish->message, "%s", error.message);
        driver->event_destroy(host, event);
    }
}

/* On the stream's own worker that would never end. */
static void work_cannot_wait_for_its_own_stream(void **state)
{
    (void)state;
    struct selfish selfish = {.waited = GP_OK};
    gp_host_stream *stream = make_stream(&selfish.key);
    CHECK_OK(gp_host_stream_submit(stream, wait_for_myself, &selfish, NULL), NULL);
    wait_for_all(stream);
    assert_int_equal(selfish.waited, GP_ERR_ARGUMENT);
    assert_non_null(strstr(selfish.message, "wait for itself"));
    gp_host_stream_close(stream);
}

/* ---- captures and forks ----------------------------------------------------------------------------- */

static void never_gone(void *context)
{
    *(bool *)context = true;
}

static void host_streams_are_not_captured(void **state)
{
    (void)state;
    struct gp__stream_key key;
    gp_host_stream *stream = make_stream(&key);
    const struct gp__stream_key *keys[] = {&calling, &key};
    bool gone = false;
    for (size_t i = 0; i < 2; i++) {
        uint64_t id = 7;
        gp_error error;
        CHECK_OK(driver->capture_id(host, keys[i], &id, &error), &error);
        assert_int_equal(id, 0);
        CHECK_STATUS(GP_ERR_UNAVAILABLE,
                     driver->capture_keep(host, keys[i], never_gone, &gone, &error), &error);
        assert_non_null(strstr(error.message, "host"));
    }
    assert_false(gone);
    gp_host_stream_close(stream);
}

struct forked {
    gp__event *event;
    struct gp__stream_key key;
};

static bool child_takes_no_lock(void *context)
{
    struct forked *forked = context;
    unsigned char bytes[2] = {0};
    uintptr_t at = (uintptr_t)bytes;
    uint64_t id = 0;
    gp_status statuses[] = {
        driver->copy(host, at, at + 1, 1, &forked->key, NULL),
        driver->copy(host, at, at + 1, 1, &calling, NULL),
        driver->fill(host, at, 1, 1, &forked->key, NULL),
        driver->fill(host, at, 1, 1, &calling, NULL),
        driver->stream_wait(host, &forked->key, forked->event, NULL),
        driver->stream_wait(host, &calling, forked->event, NULL),
        driver->capture_id(host, &forked->key, &id, NULL),
        driver->capture_keep(host, &forked->key, never_gone, NULL, NULL),
    };
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
        if (statuses[i] != GP_ERR_STATE) {
            return false;
        }
    }
    return bytes[0] == 0;
}

static void a_forked_child_does_nothing(void **state)
{
    (void)state;
    struct gated gated;
    gated_begin(&gated);
    struct forked forked = {.event = make_event(&gated.key), .key = gated.key};
    assert_int_equal(in_child(child_takes_no_lock, &forked), 0);
    driver->event_destroy(host, forked.event);
    gated_end(&gated);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_calling_thread_has_it_done),
        cmocka_unit_test(work_happens_in_the_streams_order),
        cmocka_unit_test(a_fence_covers_a_copy),
        cmocka_unit_test(a_closed_stream_takes_no_work),
        cmocka_unit_test(work_that_finds_no_memory_is_not_enqueued),
        cmocka_unit_test(a_wait_holds_back_its_own_stream_only),
        cmocka_unit_test(waits_that_have_nothing_to_wait_for),
        cmocka_unit_test(a_stream_may_wait_for_itself),
        cmocka_unit_test(the_calling_thread_waits_right_there),
        cmocka_unit_test(work_cannot_wait_for_its_own_stream),
        cmocka_unit_test(host_streams_are_not_captured),
        cmocka_unit_test(a_forked_child_does_nothing),
    };
    return cmocka_run_group_tests(tests, open_host, NULL);
}
