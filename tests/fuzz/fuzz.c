/* SPDX-License-Identifier: Apache-2.0
 *
 * The run of one input: options, a fresh world, one operation after the other with a comparison behind
 * each, and an end after which nothing may be left. What operations do is in the files beside it.
 */
#include "fuzz.h"

#include "backing/memory.h"

struct fuzz fuzz;

/* ---- bytes ---- */

uint8_t fuzz_byte(void)
{
    return fuzz.at < fuzz.size ? fuzz.data[fuzz.at++] : 0;
}

size_t fuzz_below(size_t bound)
{
    size_t value = fuzz_byte();

    if (bound > 256)
        value = value << 8 | fuzz_byte();
    return bound == 0 ? 0 : value % bound;
}

size_t fuzz_block_size(void)
{
    static const size_t sizes[16] = {
        1,
        512,
        513,
        4096,
        100 * 1024,
        CHECK_MIB - 512,
        CHECK_MIB,
        WORLD_PAGE - 512,
        WORLD_PAGE,
        WORLD_PAGE + 1,
        3 * CHECK_MIB,
        2 * WORLD_PAGE,
        5 * CHECK_MIB,
        9 * CHECK_MIB,
        16 * WORLD_PAGE,
        40 * WORLD_PAGE,
    };
    uint8_t byte = fuzz_byte();

    if (byte == 0xff)
        return 0;
    if (byte == 0xfe)
        return SIZE_MAX - 5 * CHECK_MIB;
    return sizes[byte & 15] * (1 + (byte >> 4) % 4);
}

int fuzz_stream(void)
{
    return (int)fuzz_below(WORLD_STREAMS);
}

/* ---- faults ---- */

static void op_driver_fault(void)
{
    uint64_t n = 1 + fuzz_byte();
    uint8_t how = fuzz_byte();
    bool forever = how % 4 == 1;

    fuzz_say("driver call %llu from now fails %s", (unsigned long long)n,
             forever ? "for ever" : "once");
    if (!fuzz.driver_faults)
        return;
    gp__sim_fault_as_driver_error(fuzz.world.sim, how & 0x80);
    gp__sim_fail_at(fuzz.world.sim, n, forever);
    if (how % 4 >= 2)
        gp__sim_then_fail_at(fuzz.world.sim, 1 + (how >> 2) % 32);
    fuzz.fired = 0;
}

static void op_no_driver_fault(void)
{
    fuzz_say("no driver faults");
    fuzz_forget_faults();
}

/* ---- the table ---- */

static void op_heap_fault(void);

static const struct operation {
    void (*run)(void);
    const char *name;
    bool inside; /* may run inside a callback */
} operations[] = {
    {fuzz_op_malloc, "malloc", true},
    {fuzz_op_malloc, "malloc", true},
    {fuzz_op_malloc, "malloc", true},
    {fuzz_op_free, "free", true},
    {fuzz_op_free, "free", true},
    {fuzz_op_launch, "launch", true},
    {fuzz_op_try_malloc, "try_malloc", true},
    {fuzz_op_record, "record_stream", true},
    {fuzz_op_pin, "pin", true},
    {fuzz_op_unpin, "unpin", true},
    {fuzz_op_abandon, "abandon", true},
    {fuzz_op_bad_free, "bad_free", true},
    {fuzz_op_free_elsewhere, "free_elsewhere", false},
    {fuzz_op_copy, "copy", true},
    {fuzz_op_fill, "fill", true},
    {fuzz_op_synchronize, "synchronize", false},
    {fuzz_op_join, "join", true},
    {fuzz_op_range_create, "range_create", false},
    {fuzz_op_range_close, "range_close", false},
    {fuzz_op_range_drop, "range_drop", false},
    {fuzz_op_range_bad, "range_bad", false},
    {fuzz_op_commit, "commit", false},
    {fuzz_op_commit, "commit", false},
    {fuzz_op_commit, "commit", false},
    {fuzz_op_decommit, "decommit", false},
    {fuzz_op_decommit, "decommit", false},
    {fuzz_op_resize, "resize", false},
    {fuzz_op_resize, "resize", false},
    {fuzz_op_range_use, "range_use", false}, /* it may be leaving just then */
    {fuzz_op_range_pin, "range_pin", false},
    {fuzz_op_range_unpin, "range_unpin", false},
    {fuzz_op_complete, "complete", true},
    {fuzz_op_complete_all, "complete_all", true},
    {fuzz_op_reaper, "reaper", false},
    {fuzz_op_wait_mode, "wait_mode", false},
    {fuzz_op_forget, "forget_stream", false},
    {fuzz_op_crowd, "crowd", false},
    {fuzz_op_capture_begin, "capture_begin", false},
    {fuzz_op_capture_join, "capture_join", false},
    {fuzz_op_capture_end, "capture_end", false},
    {fuzz_op_capture_spoil, "capture_spoil", false},
    {fuzz_op_graph_launch, "graph_launch", true},
    {fuzz_op_graph_destroy, "graph_destroy", true},
    {fuzz_op_kill, "kill", false},
    {fuzz_op_select, "select", true},
    {fuzz_op_open, "open", false},
    {fuzz_op_open_bad, "open_bad", false},
    {fuzz_op_close, "close", true},
    {fuzz_op_finish, "finish", true},
    {fuzz_op_release, "release", false},
    {fuzz_op_trim, "trim", true},
    {fuzz_op_trim_no_wait, "trim_no_wait", true},
    {fuzz_op_drain, "drain", true},
    {fuzz_op_limit, "set_limit", true},
    {fuzz_op_unreturned, "return_unreturned", true},
    {fuzz_op_look, "look", true},
    {fuzz_op_device_memory, "device_memory", false},
    {fuzz_op_mood, "mood", false},
    {fuzz_op_base_knobs, "base_knobs", false},
    {fuzz_op_cache_trim, "cache_trim", false},
    {op_driver_fault, "driver_fault", false},
    {op_driver_fault, "driver_fault", false},
    {op_no_driver_fault, "no_driver_fault", false},
    {op_heap_fault, "heap_fault", false},
    /* New operations go last: most bytes of the kept inputs then mean what they meant. */
    {fuzz_op_replace, "replace_stream", false},
    {fuzz_op_stranger, "stranger", false},
};
#define OPERATION_COUNT (sizeof operations / sizeof *operations)

static const char *current_name;

static void announce(void)
{
    char line[160];

    snprintf(line, sizeof line, "test_fuzz_corpus %s  # step %u: %s", fuzz.name, fuzz.step,
             current_name);
    check_context(line);
}

void fuzz_say(const char *format, ...)
{
    va_list arguments;

    if (!fuzz.trace)
        return;
    va_start(arguments, format);
    fprintf(stderr, "%*sstep %u: %s: ", (int)(fuzz.inside * 4), "", fuzz.step, current_name);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

static void run_operation(const struct operation *operation)
{
    const char *outer = current_name;

    current_name = operation->name;
    announce();
    operation->run();
    current_name = outer;
}

/* The next operation runs with a fault in growpool's own heap. */
static void op_heap_fault(void)
{
    const struct operation *operation;
    bool forever = false;
    uint64_t asked;

    fuzz.heap_fault = 1 + fuzz_byte() % 24;
    forever = fuzz_byte() % 4 == 3;
    operation = &operations[fuzz_byte() % OPERATION_COUNT];
    fuzz_say("heap allocation %llu fails %s in the next", (unsigned long long)fuzz.heap_fault,
             forever ? "for ever" : "once");
    if (operation->run == op_heap_fault)
        return;
    gp__memory_fail_at(fuzz.heap_fault, forever);
    run_operation(operation);
    asked = gp__memory_fail_at(0, false);
    CHECK(!fuzz.heap_error || asked >= fuzz.heap_fault,
          "no host memory, it says, after %llu allocations of which none failed",
          (unsigned long long)asked);
    fuzz.heap_fault = 0;
}

static void begin_operation(void)
{
    fuzz.fired = gp__sim_faults_fired(fuzz.world.sim);
    fuzz.heap_fault = 0;
    fuzz.heap_error = fuzz.moody = fuzz.interrupted = false;
    fuzz.inside_count = 0;
}

static void step(void)
{
    begin_operation();
    run_operation(&operations[fuzz_byte() % OPERATION_COUNT]);
    fuzz_follow();
    fuzz_check();
    fuzz.step++;
}

void fuzz_reenter(struct fuzz_pool *pool)
{
    const struct operation *operation = &operations[fuzz_byte() % OPERATION_COUNT];
    unsigned now = fuzz.now;

    if (!operation->inside || fuzz.inside >= FUZZ_DEEPEST)
        return;
    fuzz.inside++;
    fuzz.inside_count++;
    if (fuzz_byte() % 4 != 0)
        fuzz.now = (unsigned)(pool - fuzz.pools);
    run_operation(operation);
    fuzz.now = now;
    fuzz.inside--;
}

/* ---- from a fresh world to an empty one ---- */

static void read_options(void)
{
    for (size_t i = 0; i < sizeof fuzz.options; i++)
        fuzz.options[i] = fuzz_byte();
}

/* options[4]: two bits for each stream. */
static void make_streams(void)
{
    for (int s = 0; s < WORLD_STREAMS; s++) {
        unsigned kind = fuzz.options[4] >> 2 * s & 3;

        fuzz.capture[s] = FUZZ_NONE;
        fuzz.blocking[s] = kind != 0;
        if (kind >= 2) { /* the legacy one; this thread's */
            gp__sim_stream_destroy(fuzz.world.sim, fuzz.world.handle[s]);
            fuzz.world.handle[s] = kind == 2 ? 0 : 2;
        } else if (kind == 1) {
            gp__sim_stream_destroy(fuzz.world.sim, fuzz.world.handle[s]);
            fuzz.world.handle[s] = gp__sim_stream_create(fuzz.world.sim, GP__SIM_STREAM_BLOCKING);
        }
    }
}

static void begin_world(void)
{
    static const size_t memory[4] = {48, 12, 200, 600};
    static const size_t addresses[4] = {2048, 64, 256, 2048};
    struct world_options options = {
        .memory_bytes = memory[fuzz.options[2] & 3] * WORLD_PAGE,
        .device_addresses = addresses[fuzz.options[2] >> 2 & 3] * WORLD_PAGE,
        .largest_reserve = (fuzz.options[2] & 0x10) != 0 ? 24 * WORLD_PAGE : 0,
    };

    world_begin(&fuzz.world, &options);
    gp__sim_log_enable(fuzz.world.sim, false);
    gp__sim_set_quiet(fuzz.world.sim, !fuzz.trace);
    make_streams();
    if ((fuzz.options[6] & 1) != 0) {
        fuzz.peer = gp__sim_create(&(struct gp__sim_options){.ordinal = 1});
        CHECK(fuzz.peer != NULL, "no second device");
    }
    /* What a default reservation lost in one run would change how much the next one asks for. */
    fuzz.driver_faults = (fuzz.options[3] & 3) != 0;
    for (unsigned i = 0; i < FUZZ_POOLS; i++)
        fuzz.pools[i].world = fuzz.world;
    fuzz_op_open();
}

/* Everything works again. */
static void recover(void)
{
    fuzz_forget_faults();
    fuzz.alloc_mood = fuzz.free_mood = MOOD_GOOD;
    fuzz.alloc_moody = fuzz.free_moody = 0;
    fuzz.refuse_base = fuzz.fail_base = 0;
    fuzz.times_out = false;
    fuzz.patience = UINT32_MAX;
    gp__sim_set_wait_mode(fuzz.world.sim, GP__SIM_WAIT_COMPLETES);
}

static void end_world(void)
{
    bool leaves = fuzz.gone.abandoned_bytes > 0 || fuzz.gone.address_bytes > 0 ||
                  world_leaked_chunks(&fuzz.world) > 0;

    if (leaves)
        world_abandon(&fuzz.world);
    else
        world_end(&fuzz.world);
    gp__sim_destroy(fuzz.peer);
}

static void end(void)
{
    fuzz.size = fuzz.at; /* callbacks read no more */
    current_name = "end";
    announce();
    fuzz_say("everything is closed");
    begin_operation();
    recover();
    fuzz_graphs_end();
    for (unsigned i = 0; i < FUZZ_POOLS; i++) {
        fuzz_unpin_all(&fuzz.pools[i]);
        fuzz_ranges_unpin(&fuzz.pools[i]);
    }
    fuzz_follow();
    fuzz_check();
    fuzz_pools_end();
    fuzz_check();
    gp_chunk_release(fuzz.latest);
    fuzz.driver_calls = world_ledger(&fuzz.world).calls;
    end_world();
}

void fuzz_run(const char *name, const uint8_t *data, size_t size)
{
    bool trace = getenv("GP_FUZZ_TRACE") != NULL;

    memset(&fuzz, 0, sizeof fuzz);
    fuzz.name = name;
    fuzz.data = data;
    fuzz.size = size;
    fuzz.trace = trace;
    fuzz.patience = UINT32_MAX;
    read_options();
    current_name = "begin";
    announce();
    begin_world();
    fuzz_check();
    while (fuzz.at < fuzz.size)
        step();
    end();
    check_context(NULL);
}
