/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's captures and graphs: ids, user objects, launches, what they must allow, and
 * that each illegal use reaches the violation hook with the right words.
 */
#include "tests/support/sim_fixture.h"

#define HOST_ADDRESS ((uintptr_t)0x1000)

static void unmap_page(struct fixture *f)
{
    CHECK_OK(f->driver->unmap(f->device, f->va, PAGE, f->memory, NULL), NULL);
}

static void map_page(struct fixture *f)
{
    CHECK_OK(f->driver->map(f->device, f->va, PAGE, f->memory, NULL), NULL);
    CHECK_OK(f->driver->set_access(f->device, f->va, PAGE, GP_LOCATION_DEVICE, NULL, NULL), NULL);
}

/* ---- captures -------------------------------------------------------------------------------------- */

static void a_capturing_stream_resolves_but_for_its_id(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct gp__stream_key key = {.id = 5};

    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_GLOBAL);
    CHECK_STATUS(GP_ERR_CAPTURE, f->driver->stream_resolve(f->device, e.stream, &key, NULL), NULL);
    CHECK_STATUS(GP_NOT_READY, f->driver->stream_confirm(f->device, &e.key), NULL);
    assert_int_equal(key.handle, e.stream);
    assert_int_equal(key.context, f->device->context);
    assert_int_equal(key.id, 0);
    assert_false(key.thread_bound);
    /* Such a key is good for the capture's own work. */
    assert_int_equal(capture_id(f, &key), capture_id(f, &e.key));
    fill(f, f->va, 64, &key);
    assert_true(gp__sim_capture_end(f->sim, e.stream));
    gp__sim_capture_begin(f->sim, 2, GP__SIM_CAPTURE_GLOBAL);
    CHECK_STATUS(GP_ERR_CAPTURE, f->driver->stream_resolve(f->device, 2, &key, NULL), NULL);
    assert_int_equal(key.handle, 2);
    assert_true(key.thread_bound);
    assert_true(gp__sim_capture_end(f->sim, 2));
    end_events(f, &e);
}

static void capture_ids_count_up(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uintptr_t second = gp__sim_stream_create(f->sim, 0);
    struct gp__stream_key other = resolve(f, second);
    uint64_t last = 0;

    assert_int_equal(capture_id(f, &e.key), 0);
    for (int i = 0; i < 3; i++) {
        gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_GLOBAL);
        assert_true(capture_id(f, &e.key) > last);
        last = capture_id(f, &e.key);
        assert_int_equal(capture_id(f, &other), 0);
        gp__sim_capture_join(f->sim, second, e.stream);
        assert_int_equal(capture_id(f, &other), last);
        assert_true(gp__sim_capture_end(f->sim, e.stream));
        assert_int_equal(capture_id(f, &other), 0);
    }
    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_GLOBAL);
    gp__sim_capture_begin(f->sim, second, GP__SIM_CAPTURE_GLOBAL);
    assert_int_not_equal(capture_id(f, &e.key), capture_id(f, &other));
    assert_true(gp__sim_capture_end(f->sim, e.stream) && gp__sim_capture_end(f->sim, second));
    end_events(f, &e);
}

static void an_invalidated_capture_says_so(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct told told = {.count = 0}, never = {.count = 0};
    uint64_t id = 99;
    bool capturing = false;

    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_GLOBAL);
    keep(f, &e.key, &told);
    f->driver->event_record_context(f->device, e.event, NULL);
    expect_violation(f, "invalidates a capture");
    expect_capture_refusal(f, f->driver->capture_id(f->device, &e.key, &id, &f->error),
                           "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED");
    assert_int_equal(id, 99);
    expect_capture_refusal(f,
                           f->driver->capture_keep(f->device, &e.key, note_gone, &never, &f->error),
                           "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED");
    expect_capture_refusal(f, f->driver->fill(f->device, f->va, 64, 0, &e.key, &f->error),
                           "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED");
    CHECK_OK(f->driver->stream_capturing(f->device, &e.key, &capturing, NULL), NULL);
    assert_true(capturing);
    assert_int_equal(told.count, 0); /* not before its end */
    assert_null(gp__sim_capture_end_graph(f->sim, e.stream));
    assert_int_equal(told.count, 1);
    assert_int_equal(never.count, 0);
    assert_int_equal(keep_count(f), 0);
    end_events(f, &e);
}

static void destroying_a_stream_ends_its_capture(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uintptr_t second = gp__sim_stream_create(f->sim, 0);
    struct gp__stream_key other = resolve(f, second);
    struct told told = {.count = 0};

    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_GLOBAL);
    gp__sim_capture_join(f->sim, second, e.stream);
    keep(f, &other, &told);
    gp__sim_stream_destroy(f->sim, e.stream);
    assert_int_equal(told.count, 1);
    assert_int_equal(capture_id(f, &other), 0);
    /* A stream that only joined takes the capture's validity along, and no more. */
    uintptr_t third = gp__sim_stream_create(f->sim, 0);
    gp__sim_capture_begin(f->sim, second, GP__SIM_CAPTURE_GLOBAL);
    gp__sim_capture_join(f->sim, third, second);
    keep(f, &other, &told);
    gp__sim_stream_destroy(f->sim, third);
    assert_int_equal(told.count, 1);
    assert_null(gp__sim_capture_end_graph(f->sim, second));
    assert_int_equal(told.count, 2);
    end_events(f, &e);
}

static void captures_that_cannot_be(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uintptr_t second = gp__sim_stream_create(f->sim, 0);
    struct told told = {.count = 0};

    gp__sim_capture_join(f->sim, second, e.stream);
    expect_violation(f, "no capture to join");
    CHECK_STATUS(GP_ERR_CAPTURE,
                 f->driver->capture_keep(f->device, &e.key, note_gone, &told, &f->error), NULL);
    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_GLOBAL);
    gp__sim_capture_join(f->sim, e.stream, e.stream);
    expect_violation(f, "cannot join a capture now");
    gp__sim_capture_join(f->sim, second, e.stream);
    gp__sim_capture_begin(f->sim, second, GP__SIM_CAPTURE_GLOBAL);
    expect_violation(f, "cannot begin a capture now");
    assert_null(gp__sim_capture_end_graph(f->sim, second));
    expect_violation(f, "began on another stream");
    assert_true(gp__sim_capture_end(f->sim, e.stream));
    assert_false(gp__sim_capture_end(f->sim, e.stream));
    expect_violation(f, "does not capture");
    assert_int_equal(told.count, 0);
    end_events(f, &e);
}

static void questions_about_destroyed_streams(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    uint64_t id;

    gp__sim_stream_destroy(f->sim, e.stream);
    expect_refusal(f, f->driver->capture_id(f->device, &e.key, &id, &f->error),
                   "CUDA_ERROR_INVALID_HANDLE");
    expect_violation(f, "a destroyed stream");
    expect_refusal(f, f->driver->capture_keep(f->device, &e.key, note_gone, NULL, &f->error),
                   "CUDA_ERROR_INVALID_HANDLE");
    expect_violation(f, "a destroyed stream");
    end_events(f, &e);
}

/* ---- graphs ---------------------------------------------------------------------------------------- */

/* A graph of two pieces of work on the page, captured on two streams; `told` when it is gone. */
static gp__sim_graph *capture(struct fixture *f, struct event_fixture *e, struct told *told)
{
    uintptr_t second = gp__sim_stream_create(f->sim, 0);
    struct gp__stream_key other = resolve(f, second);
    gp__sim_graph *graph;

    gp__sim_capture_begin(f->sim, e->stream, GP__SIM_CAPTURE_GLOBAL);
    gp__sim_capture_join(f->sim, second, e->stream);
    keep(f, &e->key, told);
    CHECK_OK(f->driver->copy(f->device, f->va, HOST_ADDRESS, 64, &e->key, NULL), NULL);
    gp__sim_launch(f->sim, e->stream, f->va + 4096, 64);
    assert_true(gp__sim_in_graph(f->sim, f->va, 64, 0));
    assert_false(gp__sim_in_graph(f->sim, f->va, 64, second)); /* which is part of it */
    fill(f, f->va + 8192, 64, &other);
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
    graph = gp__sim_capture_end_graph(f->sim, e->stream);
    assert_non_null(graph);
    return graph;
}

static void a_launch_is_work_on_every_address(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct told told = {.count = 0};
    gp__sim_graph *graph = capture(f, &e, &told);

    gp__sim_graph_launch(f->sim, graph, e.stream);
    assert_int_equal(gp__sim_pending(f->sim, e.stream), 1);
    for (int i = 0; i < 3; i++)
        assert_true(gp__sim_busy(f->sim, f->va + (uintptr_t)i * 4096, 64, 0));
    assert_false(gp__sim_busy(f->sim, f->va + 64, 64, 0));
    for (int i = 0; i < 3; i++)
        assert_true(gp__sim_in_graph(f->sim, f->va + (uintptr_t)i * 4096, 64, e.stream));
    assert_false(gp__sim_in_graph(f->sim, f->va + 64, 64, 0));
    gp__sim_complete_all(f->sim);
    assert_false(gp__sim_busy(f->sim, f->va, PAGE, 0));
    unmap_page(f); /* legal: nothing replays it now */
    expect_none(f);
    gp__sim_graph_launch(f->sim, graph, e.stream);
    expect_violation(f, "in the graph is not mapped with access");
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
    map_page(f);
    gp__sim_graph_launch(f->sim, graph, e.stream);
    f->driver->unmap(f->device, f->va, PAGE, f->memory, NULL);
    expect_violation(f, "under pending work");
    gp__sim_complete_all(f->sim);
    expect_violation(f, "unmapped since");
    gp__sim_graph_destroy(f->sim, graph);
    end_events(f, &e);
}

static void user_objects_outlive_pending_launches(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct told told = {.count = 0};
    gp__sim_graph *graph = capture(f, &e, &told);
    uintptr_t other = gp__sim_stream_create(f->sim, 0);

    assert_int_equal(keep_count(f), 1);
    gp__sim_graph_launch(f->sim, graph, e.stream);
    gp__sim_graph_launch(f->sim, graph, other);
    gp__sim_graph_destroy(f->sim, graph);
    gp__sim_complete(f->sim, other, 1);
    assert_int_equal(told.count, 0);
    assert_true(gp__sim_in_graph(f->sim, f->va, 64, 0));
    /* A wait of growpool's own may be what lets it go. */
    CHECK_OK(f->driver->event_record(f->device, e.event, &e.key, NULL), NULL);
    CHECK_OK(f->driver->event_wait(f->device, e.event, 1, NULL), NULL);
    assert_int_equal(told.count, 1);
    assert_int_equal(keep_count(f), 0);
    assert_false(gp__sim_in_graph(f->sim, f->va, 64, 0));
    gp__sim_graph_launch(f->sim, graph, e.stream);
    expect_violation(f, "a destroyed graph");
    gp__sim_graph_destroy(f->sim, graph);
    expect_violation(f, "a destroyed graph");
    end_events(f, &e);
}

static void destroying_an_idle_graph_tells_at_once(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct told told = {.count = 0}, second = {.count = 0};
    gp__sim_graph *graph = capture(f, &e, &told);

    gp__sim_graph_launch(f->sim, graph, e.stream);
    gp__sim_complete_all(f->sim);
    assert_int_equal(told.count, 0); /* it can be launched again */
    gp__sim_graph_destroy(f->sim, graph);
    assert_int_equal(told.count, 1);
    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_GLOBAL);
    keep(f, &e.key, &told);
    keep(f, &e.key, &second);
    assert_true(gp__sim_capture_end(f->sim, e.stream)); /* which throws the graph away */
    assert_int_equal(told.count, 2);
    assert_int_equal(second.count, 1);
    end_events(f, &e);
}

static void launches_that_cannot_be(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct told told = {.count = 0};
    gp__sim_graph *graph = capture(f, &e, &told);

    gp__sim_capture_begin(f->sim, e.stream, GP__SIM_CAPTURE_GLOBAL);
    gp__sim_graph_launch(f->sim, graph, e.stream);
    expect_violation(f, "graphs inside graphs");
    assert_true(gp__sim_capture_end(f->sim, e.stream));
    gp__sim_stream_destroy(f->sim, e.stream);
    gp__sim_graph_launch(f->sim, graph, e.stream);
    expect_violation(f, "a destroyed stream");
    gp__sim_graph_launch(f->sim, (gp__sim_graph *)f, 0);
    expect_violation(f, "not a graph of this device");
    gp__sim_kill_context(f->sim);
    gp__sim_graph_launch(f->sim, graph, 0);
    assert_int_equal(gp__sim_pending_all(f->sim), 0);
    gp__sim_graph_destroy(f->sim, graph);
    assert_int_equal(told.count, 1);
    end_events(f, &e);
}

/* A context that dies has no launches pending. */
static void a_dead_context_lets_graphs_go(void **state)
{
    struct fixture *f = *state;
    struct event_fixture e = begin_events(f, 0);
    struct told told = {.count = 0};
    gp__sim_graph *graph = capture(f, &e, &told);

    gp__sim_graph_launch(f->sim, graph, e.stream);
    gp__sim_graph_destroy(f->sim, graph);
    assert_int_equal(told.count, 0);
    gp__sim_kill_context(f->sim);
    assert_int_equal(told.count, 1);
    end_events(f, &e);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_capturing_stream_resolves_but_for_its_id),
        TEST(capture_ids_count_up),
        TEST(an_invalidated_capture_says_so),
        TEST(destroying_a_stream_ends_its_capture),
        TEST(captures_that_cannot_be),
        TEST(questions_about_destroyed_streams),
        TEST(a_launch_is_work_on_every_address),
        TEST(user_objects_outlive_pending_launches),
        TEST(destroying_an_idle_graph_tells_at_once),
        TEST(launches_that_cannot_be),
        TEST(a_dead_context_lets_graphs_go),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
