/* SPDX-License-Identifier: Apache-2.0
 *
 * Peers: which devices a pool accepts as such, that each new chunk is mapped with access for them, and
 * that the simulated driver would notice if one were not. Several devices at once.
 */
#include "backing/memory.h"
#include "tests/support/sim_fixture.h"
#include "vmm/growpool.h"

#define DEVICES 4

static gp__sim *sims[DEVICES];
static gp_device *devices[DEVICES];
static unsigned violations;
static char violation[400];
static int64_t live;

static void count(void *context, const char *message)
{
    (void)context;
    violations++;
    snprintf(violation, sizeof violation, "%s", message);
}

static int begin(void **state)
{
    (void)state;
    live = gp__memory_live();
    violations = 0;
    for (int i = 0; i < DEVICES; i++) {
        struct gp__sim_options options = {.ordinal = i};
        sims[i] = gp__sim_create(&options);
        assert_non_null(sims[i]);
        devices[i] = gp__sim_device(sims[i]);
        gp__sim_on_violation(sims[i], count, NULL);
    }
    return 0;
}

static int end(void **state)
{
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        struct gp__sim_ledger ledger;
        gp__sim_get_ledger(sims[i], &ledger);
        assert_int_equal(ledger.chunk_count, 0);
        assert_int_equal(ledger.mapping_count, 0);
        assert_int_equal(ledger.reservation_count, 0);
        assert_int_equal(ledger.entered, 0);
        gp__sim_destroy(sims[i]);
    }
    assert_int_equal(gp__memory_live(), live);
    return 0;
}

static gp_status try_pool(gp_device *device, gp_device *const *peers, size_t peer_count,
                          gp_pool **pool, gp_error *error)
{
    gp_pool_options options = {.device = device,
                               .limit = GP_NO_LIMIT,
                               .chunk_size = PAGE,
                               .flags = GP_POOL_NO_REAPER,
                               .peers = peers,
                               .peer_count = peer_count};
    return gp_pool_create(&options, pool, error);
}

static gp_pool *open_pool(gp_device *device, gp_device *const *peers, size_t peer_count)
{
    gp_pool *pool = NULL;
    gp_error error;
    CHECK_OK(try_pool(device, peers, peer_count, &pool, &error), &error);
    return pool;
}

static void close_pool(gp_pool *pool)
{
    gp_error error;
    CHECK_OK(gp_pool_close(pool, &error), &error);
    gp_pool_release(pool);
}

static uintptr_t take(gp_pool *pool, size_t bytes)
{
    uintptr_t va = 0;
    gp_stream *stream = NULL;
    gp_error error;
    CHECK_OK(gp_pool_stream(pool, 0, &stream, &error), &error);
    CHECK_OK(gp_pool_malloc(pool, bytes, stream, 0, &va, &error), &error);
    gp_stream_release(stream);
    return va;
}

/* Work of each device on the memory; returns for how many it was a violation. */
static unsigned work_of_all(int owner, uintptr_t va, size_t bytes)
{
    unsigned refused = 0;
    for (int i = 0; i < DEVICES; i++) {
        violations = 0;
        if (i == owner)
            gp__sim_launch(sims[owner], 0, va, bytes);
        else
            gp__sim_launch_from(sims[owner], devices[i], 0, va, bytes);
        refused += violations;
    }
    gp__sim_complete_all(sims[owner]);
    violations = 0;
    return refused;
}

static size_t logged(gp__sim *sim, const char *call)
{
    size_t found = 0;
    for (size_t i = 0; i < gp__sim_log_count(sim); i++)
        found += strncmp(gp__sim_log_line(sim, i), call, strlen(call)) == 0;
    return found;
}

/* ---- who can be one --------------------------------------------------------------------------- */

static void doubles_and_the_device_itself_are_dropped(void **state)
{
    gp_device *const given[] = {devices[2], devices[0], devices[1], devices[2], devices[1]};
    gp_pool *pool = open_pool(devices[0], given, 5);
    (void)state;
    assert_int_equal(gp_pool_peer_count(pool), 2);
    assert_ptr_equal(gp_pool_peer(pool, 0), devices[2]);
    assert_ptr_equal(gp_pool_peer(pool, 1), devices[1]);
    assert_null(gp_pool_peer(pool, 2));
    assert_int_equal(logged(sims[0], "can_access"), 2);
    close_pool(pool);
    pool = open_pool(devices[0], NULL, 0);
    assert_int_equal(gp_pool_peer_count(pool), 0);
    assert_null(gp_pool_peer(pool, 0));
    close_pool(pool);
}

static void expect_refused(gp_status status, gp_device *const *peers, size_t peer_count,
                           const char *part)
{
    gp_pool *pool = NULL;
    gp_error error;
    int64_t before = gp__memory_live();
    CHECK_STATUS(status, try_pool(devices[0], peers, peer_count, &pool, &error), &error);
    CHECK(strstr(error.message, part) != NULL, "\"%s\" does not say \"%s\"", error.message, part);
    CHECK_STATUS(status, try_pool(devices[0], peers, peer_count, &pool, NULL), NULL);
    assert_null(pool);
    assert_int_equal(gp__memory_live(), before);
}

static void wrong_peers_are_refused(void **state)
{
    gp_device *host = NULL;
    gp_device *const none[] = {devices[1], NULL};
    (void)state;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &host, NULL), NULL);
    gp_device *const other_kind[] = {devices[1], host};
    expect_refused(GP_ERR_ARGUMENT, other_kind, 2,
                   "host cannot be a peer of a pool on sim:0: only simulated devices can");
    expect_refused(GP_ERR_ARGUMENT, none, 2, "peer 1 is no device");
    expect_refused(GP_ERR_ARGUMENT, NULL, 2, "2 peers are counted and none given");
    gp__sim_set_peers(sims[0], false);
    expect_refused(GP_ERR_UNAVAILABLE, none, 1,
                   "sim:1 cannot reach memory of sim:0: the two have no peer-to-peer connection");
    gp_pool *pool = open_pool(devices[0], &devices[0], 1); /* nobody to ask about */
    close_pool(pool);
}

static void a_question_that_fails_means_no(void **state)
{
    gp_pool *pool = NULL;
    gp_error error;
    (void)state;
    gp__sim_fail_at(sims[0], 1, false);
    CHECK_STATUS(GP_ERR_UNAVAILABLE, try_pool(devices[0], &devices[1], 1, &pool, &error), &error);
    assert_string_equal(gp__sim_fault_name(sims[0]), "can_access");
    gp__sim_fail_at(sims[0], 0, false);
    assert_null(pool);
}

static void there_is_a_most_of_peers(void **state)
{
    static gp_device many[GP__MOST_PEERS + 1];
    gp_device *given[GP__MOST_PEERS + 1];
    (void)state;
    for (int i = 0; i <= GP__MOST_PEERS; i++) {
        many[i] = *devices[1];
        many[i].ordinal = 100 + i;
        given[i] = &many[i];
    }
    expect_refused(GP_ERR_ARGUMENT, given, GP__MOST_PEERS + 1, "at most 32 peers");
    gp_pool *pool = open_pool(devices[0], given, GP__MOST_PEERS);
    assert_int_equal(gp_pool_peer_count(pool), GP__MOST_PEERS);
    close_pool(pool);
}

static void the_host_is_its_own_only_peer(void **state)
{
    gp_device *host = NULL;
    bool can = false;
    (void)state;
    CHECK_OK(gp_device_open(GP_DEVICE_HOST, 0, &host, NULL), NULL);
    CHECK_OK(host->driver->can_access(host, host, &can, NULL), NULL);
    assert_true(can);
    CHECK_OK(host->driver->can_access(host, devices[0], &can, NULL), NULL);
    assert_false(can);
    gp_pool *pool = open_pool(host, &host, 1);
    assert_int_equal(gp_pool_peer_count(pool), 0);
    close_pool(pool);
}

/* ---- access ------------------------------------------------------------------------------------ */

static void every_new_chunk_is_open_to_peers(void **state)
{
    gp_device *const given[] = {devices[1], devices[3]};
    gp_pool *pool = open_pool(devices[0], given, 2);
    gp_error error;
    (void)state;
    uintptr_t va = take(pool, 3 * PAGE);
    assert_int_equal(logged(sims[0], "set_access"), 1); /* one call for all chunks and devices */
    assert_int_equal(work_of_all(0, va, 3 * PAGE), 1);
    gp__sim_launch_from(sims[0], devices[2], 0, va, PAGE);
    assert_int_equal(violations, 1);
    CHECK(strstr(violation, "not mapped with access for sim:2") != NULL, "%s", violation);
    CHECK_OK(gp_pool_free(pool, va, NULL, 0, &error), &error);
    CHECK_OK(gp_pool_trim(pool, 0, 0, NULL, &error), &error);
    va = take(pool, 5 * PAGE); /* new chunks at the same addresses */
    assert_int_equal(work_of_all(0, va, 5 * PAGE), 1);
    close_pool(pool);
}

static void without_peers_nobody_else_has_access(void **state)
{
    gp_pool *pool = open_pool(devices[0], NULL, 0);
    uintptr_t va = take(pool, PAGE);
    (void)state;
    assert_int_equal(work_of_all(0, va, PAGE), DEVICES - 1);
    close_pool(pool);
}

/* Peers' work is work: an unmap under it is seen, as is access that went away since. */
static void a_peers_work_is_pending_work(void **state)
{
    gp_pool *pool = open_pool(devices[0], &devices[1], 1);
    uintptr_t va = take(pool, PAGE);
    struct gp__sim_ledger ledger;
    (void)state;
    gp__sim_launch_from(sims[0], devices[1], 0, va, PAGE);
    assert_int_equal(gp__sim_pending_all(sims[0]), 1);
    gp__sim_get_ledger(sims[0], &ledger);
    gp__memory memory = 1; /* the first that the device made */
    assert_int_equal(ledger.chunk_count, 1);
    CHECK_OK(devices[0]->driver->set_access(devices[0], va, PAGE, GP_LOCATION_DEVICE, NULL, NULL),
             NULL); /* takes the peer's access away */
    assert_int_equal(violations, 0);
    gp__sim_complete_all(sims[0]);
    assert_int_equal(violations, 1);
    CHECK(strstr(violation, "unmapped since") != NULL, "%s", violation);
    gp__sim_launch(sims[0], 0, va, PAGE);
    violations = 0;
    CHECK_OK(devices[0]->driver->unmap(devices[0], va, PAGE, memory, NULL), NULL);
    assert_int_equal(violations, 1);
    CHECK_OK(devices[0]->driver->map(devices[0], va, PAGE, memory, NULL), NULL);
    CHECK_OK(devices[0]->driver->set_access(devices[0], va, PAGE, GP_LOCATION_DEVICE, NULL, NULL),
             NULL);
    close_pool(pool);
}

static void the_simulator_refuses_wrong_grants(void **state)
{
    struct fixture *f = NULL;
    (void)state;
    assert_int_equal(set_up((void **)&f), 0);
    struct gp__peers itself = {.count = 1, .devices = {f->device}};
    struct gp__peers twice = {.count = 2, .devices = {devices[1], devices[1]}};
    struct gp__peers null = {.count = 1};
    struct gp__peers one = {.count = 1, .devices = {devices[1]}};
    struct gp__peers many = {.count = 9};
    gp_device copies[9];
    for (int i = 0; i < 9; i++) {
        copies[i] = *devices[1];
        many.devices[i] = &copies[i];
    }
#define REFUSED(peers, words)                                                                      \
    do {                                                                                           \
        expect_refusal(f,                                                                          \
                       f->driver->set_access(f->device, f->va, PAGE, GP_LOCATION_DEVICE, &(peers), \
                                             &f->error),                                           \
                       "CUDA_ERROR_INVALID_VALUE");                                                \
        expect_violation(f, words);                                                                \
    } while (0)
    REFUSED(itself, "the device itself as a peer");
    REFUSED(twice, "a peer twice");
    REFUSED(null, "peer 0 is no simulated device");
    REFUSED(many, "9 peers");
    CHECK_OK(f->driver->set_access(f->device, f->va, PAGE, GP_LOCATION_DEVICE, &one, NULL), NULL);
    gp__sim_set_peers(f->sim, false);
    REFUSED(one, "sim:1 cannot reach the memory");
#undef REFUSED
    bool can = true;
    CHECK_OK(f->driver->can_access(f->device, f->device, &can, NULL), NULL);
    expect_violation(f, "not another simulated device");
    assert_int_equal(tear_down((void **)&f), 0);
}

/* ---- several at once ---------------------------------------------------------------------------- */

static void pools_on_several_devices_do_not_mix(void **state)
{
    gp_pool *pools[DEVICES];
    uintptr_t va[DEVICES];
    gp_error error;
    (void)state;
    for (int i = 0; i < DEVICES; i++) {
        pools[i] = open_pool(devices[i], &devices[(i + 1) % DEVICES], 1);
        va[i] = take(pools[i], (size_t)(i + 1) * PAGE);
        gp__sim_launch(sims[i], 0, va[i], PAGE);
    }
    for (int i = 0; i < DEVICES; i++) {
        struct gp__sim_ledger ledger;
        gp__sim_get_ledger(sims[i], &ledger);
        assert_int_equal(ledger.physical_bytes, (size_t)(i + 1) * PAGE);
        assert_int_equal(gp__sim_pending_all(sims[i]), 1);
        /* Trimming one waits for its own work alone. */
        CHECK_OK(gp_pool_free(pools[i], va[i], NULL, 0, &error), &error);
        CHECK_OK(gp_pool_trim(pools[i], 0, 0, NULL, &error), &error);
        assert_int_equal(gp__sim_pending_all(sims[i]), 0);
        if (i + 1 < DEVICES)
            assert_int_equal(gp__sim_pending_all(sims[i + 1]), 1);
    }
    CHECK_STATUS(GP_ERR_ARGUMENT, gp_pool_free(pools[0], va[1], NULL, 0, &error), &error);
    for (int i = 0; i < DEVICES; i++)
        close_pool(pools[i]);
    assert_int_equal(violations, 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, end)

/* The registry of open devices keeps the host, which no test may count as its own leak. */
static int open_host_first(void **state)
{
    gp_device *host = NULL;
    (void)state;
    return gp_device_open(GP_DEVICE_HOST, 0, &host, NULL) == GP_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(doubles_and_the_device_itself_are_dropped),
        TEST(wrong_peers_are_refused),
        TEST(a_question_that_fails_means_no),
        TEST(there_is_a_most_of_peers),
        TEST(the_host_is_its_own_only_peer),
        TEST(every_new_chunk_is_open_to_peers),
        TEST(without_peers_nobody_else_has_access),
        TEST(a_peers_work_is_pending_work),
        TEST(the_simulator_refuses_wrong_grants),
        TEST(pools_on_several_devices_do_not_mix),
    };
    return cmocka_run_group_tests(tests, open_host_first, NULL);
}
