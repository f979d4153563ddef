/* SPDX-License-Identifier: Apache-2.0
 *
 * Host streams and the fences in them: work runs in order, a fence passes only when the work before
 * it is done, and an unmap that does not wait really faults (S1 has something to bite on).
 */
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <time.h>

#include "backing/backing_internal.h"
#include "backing/host_stream.h"
#include "backing/memory.h"
#include "child.h"

#define PAGE        (2 * CHECK_MIB)
#define MILLISECOND UINT64_C(1000000)
#define LONG_WAIT   (UINT64_C(20000) * MILLISECOND) /* reached only when a test fails */

static gp_device *host;
static const struct gp__driver *driver;

static int open_host(void **state)
{
    gp_error error;
    (void)state;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &host, &error), &error);
    driver = host->driver;
    return 0;
}

/* ---- helpers ------------------------------------------------------------------------------ */

static gp_host_stream *make_stream(void)
{
    gp_host_stream *stream;
    gp_error error;
    CHECK_OK(gp_host_stream_create(&stream, &error), &error);
    assert_true(gp_host_stream_id(stream) != 0);
    return stream;
}

static void submit(gp_host_stream *stream, void (*function)(void *), void *context)
{
    gp_error error;
    CHECK_OK(gp_host_stream_submit(stream, function, context, &error), &error);
}

static void wait_for_all(gp_host_stream *stream)
{
    CHECK_OK(gp_host_stream_wait(stream, LONG_WAIT), NULL);
}

static struct gp__stream_key resolve(uint64_t id)
{
    struct gp__stream_key key;
    gp_error error;
    CHECK_OK(driver->stream_resolve(host, (uintptr_t)id, &key, &error), &error);
    CHECK_OK(driver->stream_confirm(host, &key), NULL);
    return key;
}

static bool is_known(uint64_t id)
{
    struct gp__stream_key key = {.handle = (uintptr_t)id, .id = id};
    gp_status status = driver->stream_resolve(host, (uintptr_t)id, &key, NULL);
    assert_true(status == GP_OK || status == GP_ERR_ARGUMENT);
    if (status != GP_OK)
        CHECK_STATUS(GP_NOT_READY, driver->stream_confirm(host, &key), NULL);
    return status == GP_OK;
}

/* The worker leaves the list of streams a moment after its last work. */
static void wait_until_unknown(uint64_t id)
{
    for (int i = 0; i < 20000 && is_known(id); i++) {
        struct timespec moment = {.tv_nsec = 1000000};
        (void)nanosleep(&moment, NULL);
    }
    assert_false(is_known(id));
}

static gp__event *make_event(void)
{
    gp__event *event;
    gp_error error;
    CHECK_OK(driver->event_create(host, host->context, &event, &error), &error);
    return event;
}

static void record(gp__event *event, uint64_t id)
{
    struct gp__stream_key key = resolve(id);
    gp_error error;
    CHECK_OK(driver->event_record(host, event, &key, &error), &error);
}

static gp_status query(gp__event *event)
{
    return driver->event_query(host, event, NULL);
}

static gp_status wait_event(gp__event *event, uint64_t timeout_ns)
{
    return driver->event_wait(host, event, timeout_ns, NULL);
}

/* Work that lasts until the test opens it. */
struct gate {
    sem_t entered;
    sem_t opened;
};

static void gate_init(struct gate *gate)
{
    assert_int_equal(sem_init(&gate->entered, 0, 0), 0);
    assert_int_equal(sem_init(&gate->opened, 0, 0), 0);
}

static void pass_gate(void *context)
{
    struct gate *gate = context;
    (void)sem_post(&gate->entered);
    (void)sem_wait(&gate->opened);
}

static void open_gate(struct gate *gate)
{
    (void)sem_post(&gate->opened);
}

/* ---- streams ------------------------------------------------------------------------------ */

#define WORK_COUNT 1000

struct order {
    unsigned done; /* touched by the worker only, then read after a wait */
    unsigned wrong;
};

struct numbered {
    struct order *order;
    unsigned number;
};

static void note_order(void *context)
{
    struct numbered *numbered = context;
    numbered->order->wrong += numbered->order->done != numbered->number;
    numbered->order->done++;
}

static int64_t quiet; /* allocations while no stream lives */

static int begin_quiet(void **state)
{
    int code = open_host(state);
    quiet = gp__memory_live();
    return code;
}

/* Nothing of any stream is left. A worker drops its reference after it left the list, so this waits. */
static void expect_quiet(void)
{
    for (int i = 0; i < 20000 && gp__memory_live() != quiet; i++) {
        struct timespec moment = {.tv_nsec = 1000000};
        (void)nanosleep(&moment, NULL);
    }
    assert_int_equal(gp__memory_live(), quiet);
}

static void work_runs_in_order(void **state)
{
    (void)state;
    static struct numbered work[WORK_COUNT];
    struct order order = {0};
    gp_host_stream *stream = make_stream();
    uint64_t id = gp_host_stream_id(stream);
    for (unsigned i = 0; i < WORK_COUNT; i++) {
        work[i] = (struct numbered){.order = &order, .number = i};
        submit(stream, note_order, &work[i]);
    }
    wait_for_all(stream);
    assert_int_equal(order.done, WORK_COUNT);
    assert_int_equal(order.wrong, 0);
    gp_host_stream_close(stream);
    gp_host_stream_close(NULL);
    wait_until_unknown(id);
    expect_quiet();
}

static void ids_are_never_used_again(void **state)
{
    (void)state;
    uint64_t last = 0;
    for (int i = 0; i < 10; i++) {
        gp_host_stream *stream = make_stream();
        uint64_t id = gp_host_stream_id(stream);
        assert_true(id > last);
        last = id;
        gp_host_stream_close(stream);
        wait_until_unknown(id);
    }
    assert_false(is_known(last + 1));
}

static void a_closed_stream_finishes_its_work(void **state)
{
    (void)state;
    struct gate gate;
    struct order order = {0};
    struct numbered work = {.order = &order, .number = 0};
    gate_init(&gate);
    gp_host_stream *stream = make_stream();
    uint64_t id = gp_host_stream_id(stream);
    submit(stream, pass_gate, &gate);
    submit(stream, note_order, &work);
    gp_host_stream_close(stream);
    assert_true(is_known(id)); /* still at work */
    gp__event *event = make_event();
    record(event, id);
    assert_int_equal(query(event), GP_NOT_READY);
    open_gate(&gate);
    CHECK_OK(wait_event(event, LONG_WAIT), NULL);
    assert_int_equal(order.done, 1);
    wait_until_unknown(id);
    assert_int_equal(query(event), GP_OK);
    driver->event_destroy(host, event);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

struct self_closing {
    gp_host_stream *stream;
    gp_status waited;
    uint64_t waited_ns;
};

static void close_from_inside(void *context)
{
    struct self_closing *self = context;
    /* Waiting for itself would never end; the answer comes at once. */
    uint64_t start = now_ns();
    self->waited = gp_host_stream_wait(self->stream, LONG_WAIT);
    self->waited_ns = now_ns() - start;
    gp_host_stream_close(self->stream);
}

static void a_stream_may_close_itself(void **state)
{
    (void)state;
    struct gate gate;
    gate_init(&gate);
    struct self_closing self = {.stream = make_stream(), .waited = GP_OK};
    uint64_t id = gp_host_stream_id(self.stream);
    submit(self.stream, close_from_inside, &self);
    wait_until_unknown(id);
    assert_int_equal(self.waited, GP_NOT_READY);
    assert_true(self.waited_ns < LONG_WAIT / 4);
}

static void a_wait_covers_what_was_submitted_and_times_out(void **state)
{
    (void)state;
    struct gate first;
    struct gate second;
    gate_init(&first);
    gate_init(&second);
    gp_host_stream *stream = make_stream();
    CHECK_OK(gp_host_stream_wait(stream, 0), NULL); /* nothing to wait for */
    submit(stream, pass_gate, &first);
    CHECK_STATUS(GP_NOT_READY, gp_host_stream_wait(stream, 0), NULL);
    CHECK_STATUS(GP_NOT_READY, gp_host_stream_wait(stream, 5 * MILLISECOND), NULL);
    open_gate(&first);
    CHECK_OK(gp_host_stream_wait(stream, UINT64_MAX), NULL);
    submit(stream, pass_gate, &second);
    open_gate(&second);
    wait_for_all(stream);
    gp_host_stream_close(stream);
}

static void streams_that_cannot_be_made_leave_nothing(void **state)
{
    (void)state;
    gp_host_stream *stream = NULL;
    gp_error error;
    expect_quiet();
    for (uint64_t n = 1; n <= 2; n++) {
        gp__memory_fail_at(n, 0);
        CHECK_STATUS(GP_ERR_HOST_MEMORY, gp_host_stream_create(&stream, &error), NULL);
        assert_null(stream);
        assert_int_equal(gp__memory_live(), quiet);
    }
    gp__memory_fail_at(0, 0);
    stream = make_stream();
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_host_stream_submit(stream, NULL, NULL, &error), NULL);
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY, gp_host_stream_submit(stream, pass_gate, NULL, &error), NULL);
    gp__memory_fail_at(0, 0);
    wait_for_all(stream);
    gp_host_stream_close(stream);
}

/* ---- identity ----------------------------------------------------------------------------- */

static void handles_are_ids(void **state)
{
    (void)state;
    bool capturing = true;
    struct gp__stream_key calling = resolve(0);
    assert_true(calling.always_passed);
    assert_int_equal(calling.id, 0);
    gp_host_stream *stream = make_stream();
    struct gp__stream_key key = resolve(gp_host_stream_id(stream));
    assert_int_equal(key.id, gp_host_stream_id(stream));
    assert_int_equal(key.handle, gp_host_stream_id(stream));
    assert_int_equal(key.context, host->context);
    assert_false(key.always_passed);
    assert_false(key.thread_bound);
    CHECK_OK(driver->stream_capturing(host, &key, &capturing, NULL), NULL);
    assert_false(capturing);
    gp_host_stream_close(stream);
}

/* ---- fences -------------------------------------------------------------------------------- */

static void a_fence_passes_when_the_work_before_it_is_done(void **state)
{
    (void)state;
    struct gate first;
    struct gate second;
    gate_init(&first);
    gate_init(&second);
    gp_host_stream *stream = make_stream();
    uint64_t id = gp_host_stream_id(stream);
    gp__event *event = make_event();
    assert_int_equal(query(event), GP_OK); /* never recorded */
    submit(stream, pass_gate, &first);
    record(event, id);
    submit(stream, pass_gate, &second); /* after the fence: not waited for */
    (void)sem_wait(&first.entered);
    assert_int_equal(query(event), GP_NOT_READY);
    assert_int_equal(wait_event(event, 0), GP_NOT_READY);
    assert_int_equal(wait_event(event, 5 * MILLISECOND), GP_NOT_READY);
    open_gate(&first);
    CHECK_OK(wait_event(event, LONG_WAIT), NULL);
    assert_int_equal(query(event), GP_OK);
    record(event, id); /* again: now behind the second gate */
    assert_int_equal(query(event), GP_NOT_READY);
    record(event, 0); /* the calling thread has nothing pending */
    assert_int_equal(query(event), GP_OK);
    record(event, id);
    open_gate(&second);
    CHECK_OK(wait_event(event, UINT64_MAX), NULL);
    driver->event_destroy(host, event);
    gp_host_stream_close(stream);
}

static void a_fence_outlives_its_stream(void **state)
{
    (void)state;
    gp_host_stream *stream = make_stream();
    uint64_t id = gp_host_stream_id(stream);
    struct gp__stream_key key = resolve(id);
    struct gate gate;
    gate_init(&gate);
    submit(stream, pass_gate, &gate);
    gp__event *event = make_event();
    record(event, id);
    gp_host_stream_close(stream);
    open_gate(&gate);
    wait_until_unknown(id);
    assert_int_equal(query(event), GP_OK);
    CHECK_OK(wait_event(event, LONG_WAIT), NULL);
    /* All work of a stream that is gone is done. */
    CHECK_OK(driver->event_record(host, event, &key, NULL), NULL);
    assert_int_equal(query(event), GP_OK);
    driver->event_destroy(host, event);
}

#define STREAM_COUNT 5

static void a_context_wide_fence_covers_every_stream(void **state)
{
    (void)state;
    gp_host_stream *streams[STREAM_COUNT];
    struct gate gates[STREAM_COUNT];
    gp__event *event = make_event();
    for (size_t i = 0; i < STREAM_COUNT; i++) {
        streams[i] = make_stream();
        gate_init(&gates[i]);
        submit(streams[i], pass_gate, &gates[i]);
    }
    record(event, gp_host_stream_id(streams[0])); /* what the event held before is replaced */
    CHECK_OK(driver->event_record_context(host, event, NULL), NULL);
    gp_host_stream *later = make_stream();
    struct gate late;
    gate_init(&late);
    submit(later, pass_gate, &late); /* after the fence: not waited for */
    for (size_t i = 0; i < STREAM_COUNT; i++) {
        assert_int_equal(query(event), GP_NOT_READY);
        assert_int_equal(wait_event(event, MILLISECOND), GP_NOT_READY);
        open_gate(&gates[(i + 2) % STREAM_COUNT]);
        wait_for_all(streams[(i + 2) % STREAM_COUNT]);
    }
    assert_int_equal(query(event), GP_OK);
    CHECK_OK(wait_event(event, 0), NULL);
    CHECK_OK(driver->event_record_context(host, event, NULL), NULL);
    assert_int_equal(query(event), GP_NOT_READY); /* the late one is covered now */
    open_gate(&late);
    CHECK_OK(wait_event(event, LONG_WAIT), NULL);
    for (size_t i = 0; i < STREAM_COUNT; i++) {
        gp_host_stream_close(streams[i]);
    }
    gp_host_stream_close(later);
    driver->event_destroy(host, event);
}

static void a_failed_record_leaves_the_fence_as_it_was(void **state)
{
    (void)state;
    struct gate gate;
    gp__event *event = NULL;
    gp_error error;
    gate_init(&gate);
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY, driver->event_create(host, host->context, &event, &error),
                 NULL);
    gp__memory_fail_at(0, 0);
    assert_null(event);
    event = make_event();
    gp_host_stream *stream = make_stream();
    gp_host_stream *other = make_stream();
    struct gp__stream_key key = resolve(gp_host_stream_id(stream));
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY, driver->event_record(host, event, &key, &error), NULL);
    gp__memory_fail_at(0, 0);
    assert_int_equal(query(event), GP_OK);
    submit(stream, pass_gate, &gate);
    record(event, key.id);
    gp__memory_fail_at(1, 0);
    CHECK_STATUS(GP_ERR_HOST_MEMORY, driver->event_record_context(host, event, &error), NULL);
    gp__memory_fail_at(0, 0);
    assert_int_equal(query(event), GP_NOT_READY);
    open_gate(&gate);
    CHECK_OK(wait_event(event, LONG_WAIT), NULL);
    gp_host_stream_close(stream);
    gp_host_stream_close(other);
    driver->event_destroy(host, event);
}

/* ---- the device bites ----------------------------------------------------------------------- */

/* The worker writes into pool memory until a write faults. */
struct writer {
    volatile unsigned char *target;
    sem_t writing;
    _Atomic bool faulted;
};

static _Thread_local sigjmp_buf *fault_exit;

static void leave_the_fault(int number)
{
    if (fault_exit == NULL) {
        (void)signal(number, SIG_DFL); /* a fault of somebody else's: the usual end */
        return;
    }
    siglongjmp(*fault_exit, 1);
}

/* Not watched by ThreadSanitizer: racing with the unmap is what this work is for. */
__attribute__((no_sanitize("thread"))) static void write_until_fault(void *context)
{
    struct writer *writer = context;
    sigjmp_buf here;
    if (sigsetjmp(here, 1) == 0) {
        fault_exit = &here;
        (void)sem_post(&writer->writing);
        for (uint64_t i = 0; i < UINT64_C(4000000000); i++) {
            *writer->target = (unsigned char)i;
        }
    } else {
        writer->faulted = true;
    }
    fault_exit = NULL;
}

static void an_unmap_under_work_faults(void **state)
{
    (void)state;
    uintptr_t va;
    gp__memory memory;
    gp_error error;
    struct sigaction action = {.sa_handler = leave_the_fault};
    struct sigaction before;
    CHECK_OK(driver->reserve(host, PAGE, &va, &error), &error);
    CHECK_OK(driver->create(host, PAGE, GP_LOCATION_DEVICE, 0, &memory, &error), &error);
    CHECK_OK(driver->map(host, va, PAGE, memory, &error), &error);
    CHECK_OK(driver->set_access(host, va, PAGE, GP_LOCATION_DEVICE, NULL, &error), &error);
    struct writer writer = {.target = (volatile unsigned char *)va};
    assert_int_equal(sem_init(&writer.writing, 0, 0), 0);
    assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);

    gp_host_stream *stream = make_stream();
    submit(stream, write_until_fault, &writer);
    (void)sem_wait(&writer.writing);
    CHECK_OK(driver->unmap(host, va, PAGE, memory, &error), &error); /* does not wait */
    wait_for_all(stream);
    assert_true(writer.faulted);

    assert_int_equal(sigaction(SIGSEGV, &before, NULL), 0);
    gp_host_stream_close(stream);
    CHECK_OK(driver->release(host, memory, PAGE, &error), &error);
    CHECK_OK(driver->free_address(host, va, PAGE, &error), &error);
}

/* ---- forks --------------------------------------------------------------------------------- */

struct forked {
    gp_host_stream *stream;
    gp__event *event;
    struct gp__stream_key key;
};

static bool child_takes_no_lock(void *context)
{
    struct forked *forked = context;
    gp_host_stream *stream;
    gp__event *event;
    struct gp__stream_key key;
    bool capturing;
    gp_status statuses[] = {
        gp_host_stream_create(&stream, NULL),
        gp_host_stream_submit(forked->stream, pass_gate, NULL, NULL),
        gp_host_stream_wait(forked->stream, UINT64_MAX),
        driver->stream_resolve(host, forked->key.handle, &key, NULL),
        driver->stream_capturing(host, &forked->key, &capturing, NULL),
        driver->event_create(host, host->context, &event, NULL),
        driver->event_record(host, forked->event, &forked->key, NULL),
        driver->event_record_context(host, forked->event, NULL),
        driver->event_query(host, forked->event, NULL),
        driver->event_wait(host, forked->event, UINT64_MAX, NULL),
    };
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++) {
        if (statuses[i] != GP_ERR_STATE) {
            return false;
        }
    }
    driver->event_destroy(host, forked->event);
    gp_host_stream_close(forked->stream);
    return true;
}

static void a_forked_child_takes_no_lock(void **state)
{
    (void)state;
    struct gate gate;
    gate_init(&gate);
    struct forked forked = {.stream = make_stream(), .event = make_event()};
    forked.key = resolve(gp_host_stream_id(forked.stream));
    submit(forked.stream, pass_gate, &gate);
    record(forked.event, forked.key.id);
    assert_int_equal(in_child(child_takes_no_lock, &forked), 0);
    assert_int_equal(query(forked.event), GP_NOT_READY);
    open_gate(&gate);
    CHECK_OK(wait_event(forked.event, LONG_WAIT), NULL);
    driver->event_destroy(host, forked.event);
    gp_host_stream_close(forked.stream);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(work_runs_in_order),
        cmocka_unit_test(ids_are_never_used_again),
        cmocka_unit_test(a_closed_stream_finishes_its_work),
        cmocka_unit_test(a_stream_may_close_itself),
        cmocka_unit_test(a_wait_covers_what_was_submitted_and_times_out),
        cmocka_unit_test(streams_that_cannot_be_made_leave_nothing),
        cmocka_unit_test(handles_are_ids),
        cmocka_unit_test(a_fence_passes_when_the_work_before_it_is_done),
        cmocka_unit_test(a_fence_outlives_its_stream),
        cmocka_unit_test(a_context_wide_fence_covers_every_stream),
        cmocka_unit_test(a_failed_record_leaves_the_fence_as_it_was),
        cmocka_unit_test(an_unmap_under_work_faults),
        cmocka_unit_test(a_forked_child_takes_no_lock),
    };
    return cmocka_run_group_tests(tests, begin_quiet, NULL);
}
