/* SPDX-License-Identifier: Apache-2.0
 *
 * What the simulated driver must allow, as measured on a GPU, and its tools: work that completes on
 * request, faults, ledger, log.
 */
#include "tests/support/sim_fixture.h"

static void memory_calls_during_a_capture_are_legal(void **state)
{
    struct fixture *f = *state;
    uintptr_t stream = gp__sim_stream_create(f->sim, GP__SIM_STREAM_BLOCKING), va;
    gp__memory memory;
    gp__event *event;

    gp__sim_capture_begin(f->sim, stream, GP__SIM_CAPTURE_GLOBAL);
    CHECK_OK(f->driver->reserve(f->device, PAGE, &va, NULL), NULL);
    CHECK_OK(f->driver->create(f->device, PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL), NULL);
    CHECK_OK(f->driver->map(f->device, va, PAGE, memory, NULL), NULL);
    CHECK_OK(f->driver->set_access(f->device, va, PAGE, GP_LOCATION_DEVICE, NULL, NULL), NULL);
    CHECK_OK(f->driver->unmap(f->device, va, PAGE, memory, NULL), NULL);
    CHECK_OK(f->driver->release(f->device, memory, PAGE, NULL), NULL);
    CHECK_OK(f->driver->free_address(f->device, va, PAGE, NULL), NULL);
    CHECK_OK(f->driver->event_create(f->device, f->device->context, &event, NULL), NULL);
    f->driver->event_destroy(f->device, event);
    assert_true(gp__sim_capture_end(f->sim, stream));
    expect_none(f);
}

static void relaxed_queries_leave_captures_alone(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uintptr_t other = gp__sim_stream_create(f->sim, 0);

    gp__sim_capture_begin(f->sim, other, GP__SIM_CAPTURE_GLOBAL);
    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    CHECK_STATUS(GP_NOT_READY, f->driver->event_query(f->device, e.event, NULL), NULL);
    CHECK_OK(f->driver->event_wait(f->device, e.event, 1000, NULL), NULL);
    assert_true(gp__sim_capture_end(f->sim, other));
    end_events(f, &e);
}

static void release_while_mapped_is_legal(void **state)
{
    struct fixture *f = *state;
    struct gp__sim_ledger ledger;

    CHECK_OK(f->driver->release(f->device, f->memory, PAGE, NULL), NULL);
    gp__sim_get_ledger(f->sim, &ledger);
    assert_int_equal(ledger.physical_bytes, PAGE);
    assert_int_equal(ledger.unreleased_count, 0);
    assert_true(gp__sim_is_accessible(f->sim, f->va, PAGE));
    CHECK_OK(f->driver->unmap(f->device, f->va, PAGE, f->memory, NULL), NULL);
    CHECK_OK(f->driver->free_address(f->device, f->va, 8 * PAGE, NULL), NULL);
    gp__sim_get_ledger(f->sim, &ledger);
    assert_int_equal(ledger.physical_bytes, 0);
    assert_int_equal(ledger.chunk_count, 0);
    assert_int_equal(ledger.mapping_count, 0);
    assert_int_equal(ledger.reserved_bytes, 0);
    expect_none(f);
}

static void second_map_of_one_handle_is_legal(void **state)
{
    struct fixture *f = *state;
    struct gp__sim_ledger ledger;

    CHECK_OK(f->driver->map(f->device, f->va + PAGE, PAGE, f->memory, NULL), NULL);
    gp__sim_get_ledger(f->sim, &ledger);
    assert_int_equal(ledger.mapped_bytes, 2 * PAGE);
    assert_int_equal(ledger.physical_bytes, PAGE);
    expect_none(f);
}

static void work_completes_in_order_and_only_when_asked(void **state)
{
    struct fixture *f = *state;
    uintptr_t a = gp__sim_stream_create(f->sim, 0), b = gp__sim_stream_create(f->sim, 0);

    gp__sim_launch(f->sim, a, f->va, 512);
    gp__sim_launch(f->sim, a, f->va + 4096, 512);
    gp__sim_launch(f->sim, b, f->va + 8192, 512);
    assert_int_equal(gp__sim_pending(f->sim, a), 2);
    assert_int_equal(gp__sim_pending_all(f->sim), 3);
    assert_int_equal(gp__sim_complete(f->sim, a, 1), 1);
    assert_false(gp__sim_busy(f->sim, f->va, 4096, 0));
    assert_true(gp__sim_busy(f->sim, f->va, PAGE, gp__sim_stream_id(f->sim, b)));
    assert_true(gp__sim_busy(f->sim, f->va + 4096, 1, 0));
    assert_false(gp__sim_busy(f->sim, f->va + 4096, 1, gp__sim_stream_id(f->sim, a)));
    assert_int_equal(gp__sim_complete(f->sim, a, 9), 1);
    gp__sim_complete_all(f->sim);
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
    expect_none(f);
}

static void an_event_passes_with_what_precedes_it(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);

    CHECK_OK(f->driver->event_query(f->device, e.event, NULL), NULL); /* never recorded */
    gp__sim_launch(f->sim, e.stream, f->va, 512);
    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    gp__sim_launch(f->sim, e.stream, f->va, 512);
    CHECK_STATUS(GP_NOT_READY, f->driver->event_query(f->device, e.event, NULL), NULL);
    gp__sim_set_wait_mode(f->sim, GP__SIM_WAIT_TIMES_OUT);
    CHECK_STATUS(GP_NOT_READY, f->driver->event_wait(f->device, e.event, 1, NULL), NULL);
    gp__sim_complete(f->sim, e.stream, 1);
    CHECK_STATUS(GP_NOT_READY, f->driver->event_query(f->device, e.event, NULL), NULL);
    gp__sim_set_wait_mode(f->sim, GP__SIM_WAIT_COMPLETES);
    CHECK_OK(f->driver->event_wait(f->device, e.event, 1, NULL), NULL);
    assert_int_equal(gp__sim_pending(f->sim, e.stream), 1); /* just far enough */
    end_events(f, &e);
}

static void a_later_record_replaces_an_earlier_one(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);

    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    gp__sim_launch(f->sim, e.stream, f->va, 512);
    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    gp__sim_complete(f->sim, e.stream, 2);
    CHECK_STATUS(GP_NOT_READY, f->driver->event_query(f->device, e.event, NULL), NULL);
    gp__sim_complete(f->sim, e.stream, 1);
    CHECK_OK(f->driver->event_query(f->device, e.event, NULL), NULL);
    end_events(f, &e);
}

static void a_context_record_covers_destroyed_streams(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uintptr_t other = gp__sim_stream_create(f->sim, 0);

    gp__sim_launch(f->sim, e.stream, f->va, 512);
    gp__sim_launch(f->sim, other, f->va, 512);
    gp__sim_stream_destroy(f->sim, e.stream);
    CHECK_OK(f->driver->event_record_context(f->device, e.event, NULL), NULL);
    gp__sim_complete(f->sim, other, 2);
    CHECK_STATUS(GP_NOT_READY, f->driver->event_query(f->device, e.event, NULL), NULL);
    CHECK_OK(f->driver->event_wait(f->device, e.event, 1, NULL), NULL);
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
    end_events(f, &e);
}

static void a_dead_context_has_passed(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct gp__stream_key key;

    gp__sim_launch(f->sim, e.stream, f->va, 512);
    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    gp__sim_kill_context(f->sim);
    CHECK_OK(f->driver->event_query(f->device, e.event, NULL), NULL);
    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    CHECK_OK(f->driver->event_query(f->device, e.event, NULL), NULL);
    CHECK_OK(f->driver->event_record_context(f->device, e.event, NULL), NULL);
    CHECK_OK(f->driver->event_wait(f->device, e.event, 1, NULL), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, f->driver->stream_resolve(f->device, e.stream, &key, NULL), NULL);
    CHECK_OK(f->driver->unmap(f->device, f->va, PAGE, f->memory, NULL), NULL);
    end_events(f, &e);
}

static void handles_zero_and_one_are_one_stream(void **state)
{
    struct fixture *f = *state;
    struct gp__stream_key zero, one;

    CHECK_OK(f->driver->stream_resolve(f->device, 0, &zero, NULL), NULL);
    CHECK_OK(f->driver->stream_resolve(f->device, 1, &one, NULL), NULL);
    assert_int_equal(zero.id, one.id);
    assert_int_equal(one.handle, 0);
    assert_true(zero.context != 0 && zero.context == one.context);
    CHECK_STATUS(GP_ERR_ARGUMENT, f->driver->stream_resolve(f->device, 999, &one, NULL), NULL);
    expect_none(f);
}

static void memory_and_addresses_run_out(void **state)
{
    struct fixture *f = *state;
    uintptr_t va = 0;
    gp__memory memory = 0;

    gp__sim_set_memory(f->sim, 2 * PAGE);
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY,
                 f->driver->create(f->device, 2 * PAGE, GP_LOCATION_DEVICE, 0, &memory, &f->error),
                 NULL);
    assert_string_equal(f->error.name, "CUDA_ERROR_OUT_OF_MEMORY");
    CHECK_OK(f->driver->create(f->device, PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL), NULL);
    CHECK_STATUS(GP_ERR_ADDRESS_SPACE,
                 f->driver->reserve(f->device, UINT64_C(1) << 40, &va, &f->error), NULL);
    assert_int_equal(va, 0);
    expect_none(f);
}

static void the_nth_call_fails_once(void **state)
{
    struct fixture *f = *state;
    struct gp__sim_ledger before, after;
    gp__memory memory;
    size_t free_bytes, total_bytes;

    gp__sim_get_ledger(f->sim, &before);
    gp__sim_fail_at(f->sim, 2, false);
    gp__sim_then_fail_at(f->sim, 2);
    CHECK_OK(f->driver->memory_info(f->device, &free_bytes, &total_bytes, NULL), NULL);
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY,
                 f->driver->create(f->device, PAGE, GP_LOCATION_DEVICE, 0, &memory, NULL), NULL);
    assert_string_equal(gp__sim_fault_name(f->sim), "create");
    CHECK_OK(f->driver->memory_info(f->device, &free_bytes, &total_bytes, NULL), NULL);
    expect_refusal(f, f->driver->unmap(f->device, f->va, PAGE, f->memory, &f->error),
                   "CUDA_ERROR_UNKNOWN");
    assert_string_equal(gp__sim_fault_name(f->sim), "unmap");
    assert_int_equal(gp__sim_faults_fired(f->sim), 2);
    assert_int_equal(gp__sim_fault_calls(f->sim), 4);
    gp__sim_get_ledger(f->sim, &after);
    assert_int_equal(after.mapping_count, before.mapping_count);
    assert_int_equal(after.physical_bytes, before.physical_bytes);
    gp__sim_fail_at(f->sim, 0, false);
    CHECK_OK(f->driver->unmap(f->device, f->va, PAGE, f->memory, NULL), NULL);
    expect_none(f);
}

static void faults_can_last_for_ever(void **state)
{
    struct fixture *f = *state;
    uintptr_t va;
    struct gp__entry entry;

    gp__sim_fail_at(f->sim, 2, true);
    CHECK_OK(f->driver->reserve(f->device, PAGE, &va, NULL), NULL);
    CHECK_STATUS(GP_ERR_ADDRESS_SPACE, f->driver->reserve(f->device, PAGE, &va, NULL), NULL);
    gp__sim_fault_as_driver_error(f->sim, true);
    CHECK_STATUS(GP_ERR_DRIVER, f->driver->reserve(f->device, PAGE, &va, NULL), NULL);
    CHECK_STATUS(GP_ERR_DRIVER, f->driver->enter(f->device, &entry, NULL), NULL);
    assert_int_equal(gp__sim_faults_fired(f->sim), 3);
    expect_none(f);
}

static void the_log_names_calls_and_outcomes(void **state)
{
    struct fixture *f = *state;
    char want[160];

    assert_int_equal(gp__sim_log_count(f->sim), 4);
    snprintf(want, sizeof want, "map va=0x%zx bytes=2097152 memory=1 -> ok", (size_t)f->va);
    assert_string_equal(gp__sim_log_line(f->sim, 2), want);
    gp__sim_log_clear(f->sim);
    gp__sim_fail_at(f->sim, 1, false);
    f->driver->unmap(f->device, f->va, PAGE, f->memory, NULL);
    snprintf(want, sizeof want,
             "unmap va=0x%zx bytes=2097152 memory=1 -> CUDA_ERROR_UNKNOWN (fault)", (size_t)f->va);
    assert_string_equal(gp__sim_log_line(f->sim, 0), want);
    gp__sim_log_enable(f->sim, false);
    f->driver->unmap(f->device, f->va, PAGE, f->memory, NULL);
    assert_int_equal(gp__sim_log_count(f->sim), 1);
    expect_none(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(memory_calls_during_a_capture_are_legal, set_up, tear_down),
        cmocka_unit_test_setup_teardown(relaxed_queries_leave_captures_alone, set_up, tear_down),
        cmocka_unit_test_setup_teardown(release_while_mapped_is_legal, set_up, tear_down),
        cmocka_unit_test_setup_teardown(second_map_of_one_handle_is_legal, set_up, tear_down),
        cmocka_unit_test_setup_teardown(work_completes_in_order_and_only_when_asked, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(an_event_passes_with_what_precedes_it, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_later_record_replaces_an_earlier_one, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_context_record_covers_destroyed_streams, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_dead_context_has_passed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(handles_zero_and_one_are_one_stream, set_up, tear_down),
        cmocka_unit_test_setup_teardown(memory_and_addresses_run_out, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_nth_call_fails_once, set_up, tear_down),
        cmocka_unit_test_setup_teardown(faults_can_last_for_ever, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_log_names_calls_and_outcomes, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
