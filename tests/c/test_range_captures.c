/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranges while streams are captured: what may grow, what must not shrink, and that no capture is lost by
 * it. What blocks of a capture are made of is in test_capture.c.
 */
#include "range_case.h"
#include "vmm/pool.h"

static gp__sim_graph *end_capture(int s)
{
    gp__sim_graph *graph = gp__sim_capture_end_graph(world.sim, world.handle[s]);

    CHECK(graph != NULL, "the capture on stream %d was invalidated", s);
    return graph;
}

/* The growth is part of no graph: its memory is the range's, during the capture and after it. */
static void a_growable_grows_in_a_capture_of_any_mode(void **state)
{
    (void)state;
    for (int mode = GP__SIM_CAPTURE_GLOBAL; mode <= GP__SIM_CAPTURE_RELAXED; mode++) {
        gp_range *range = make_range(8, 0);
        gp_release_result result = {7, 7};

        CHECK_OK(gp_range_resize(range, PAGE, NULL, 0, NULL, &world.error), &world.error);
        world_launch(&world, 0, gp_range_address(range), PAGE);
        gp__sim_capture_begin(world.sim, world.handle[0], (enum gp__sim_capture_mode)mode);
        CHECK_OK(gp_range_resize(range, 3 * PAGE, NULL, 0, NULL, &world.error), &world.error);
        world_launch(&world, 0, gp_range_address(range), 3 * PAGE);
        CHECK_STATUS(GP_ERR_CAPTURE, gp_range_resize(range, 2 * PAGE, NULL, 0, &result, NULL),
                     NULL);
        CHECK(result.released_bytes == 7, "a refused shrink has a result");
        assert_int_equal(gp_range_size(range), 3 * PAGE);
        gp__sim_graph *graph = end_capture(0);
        gp__sim_graph_launch(world.sim, graph, world.handle[0]);
        CHECK_OK(gp_range_resize(range, PAGE, NULL, 0, &result, &world.error), &world.error);
        CHECK(result.released_bytes == 2 * PAGE && result.kept_bytes == 0,
              "the launch was waited for");
        gp__sim_graph_destroy(world.sim, graph);
        check_all();
        end_range(range);
    }
}

/* Two captures, each over a range of its own, and one of them is lost for a reason of its user's. */
static void an_aborted_capture_leaves_ranges_alone(void **state)
{
    gp_range *lost = make_range(8, 0), *kept = make_range(8, 1);
    uintptr_t joined = gp__sim_stream_create(world.sim, 0);

    (void)state;
    for (int s = 0; s < 2; s++)
        gp__sim_capture_begin(world.sim, world.handle[s], GP__SIM_CAPTURE_GLOBAL);
    commit(lost, 0, 2, -1);
    commit(kept, 0, 2, -1);
    gp__sim_capture_join(world.sim, joined, world.handle[0]);
    gp__sim_stream_destroy(world.sim, joined); /* a capture that loses a stream is invalid */
    CHECK_STATUS(GP_ERR_CAPTURE, try_decommit(lost, 0, 1, -1, 0), NULL);
    expect_committed(lost, "##");
    assert_false(gp__sim_capture_end(world.sim, world.handle[0]));
    decommit(lost, 0, 1, 0, 1, 0);
    expect_committed(lost, ".#");
    commit(lost, 0, 1, -1);
    CHECK_STATUS(GP_ERR_CAPTURE, try_decommit(kept, 0, 1, -1, 0), NULL);
    gp__sim_graph_destroy(world.sim, end_capture(1));
    decommit(kept, 0, 2, 0, 2, 0);
    check_all();
    end_range(kept);
    end_range(lost);
}

/* Measured on hardware: a record in the legacy stream invalidates the captures of blocking streams. */
static void a_blocking_capture_survives_a_range_on_the_legacy_stream(void **state)
{
    uintptr_t capturing = gp__sim_stream_create(world.sim, GP__SIM_STREAM_BLOCKING);
    gp_stream *legacy = NULL;
    gp_range *range = NULL;
    const gp_interval part = {0, 2 * PAGE};
    gp_release_result result;

    (void)state;
    CHECK_OK(gp_pool_stream(world.pool, 0, &legacy, NULL), NULL);
    CHECK_OK(gp_range_create(world.pool, 8 * PAGE, legacy, &range, NULL), NULL);
    CHECK_OK(gp_range_resize(range, 2 * PAGE, NULL, 0, NULL, &world.error), &world.error);
    gp__sim_launch(world.sim, 0, gp_range_address(range), PAGE);
    gp__sim_capture_begin(world.sim, capturing, GP__SIM_CAPTURE_RELAXED);
    CHECK_OK(gp_range_resize(range, 4 * PAGE, NULL, 0, NULL, &world.error), &world.error);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_range_decommit(range, &part, 1, NULL, 0, &result, NULL), NULL);
    CHECK_STATUS(GP_ERR_CAPTURE, gp_range_resize(range, 0, NULL, 0, &result, NULL), NULL);
    expect_committed(range, "####");
    assert_true(gp__sim_capture_end(world.sim, capturing));
    CHECK_OK(gp_range_resize(range, 0, NULL, 0, &result, &world.error), &world.error);
    assert_int_equal(result.released_bytes, 4 * PAGE);
    gp_stream_release(legacy);
    end_range(range);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_growable_grows_in_a_capture_of_any_mode),
        TEST(an_aborted_capture_leaves_ranges_alone),
        TEST(a_blocking_capture_survives_a_range_on_the_legacy_stream),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
