/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations on ranges, through the shadow model's calls. Streams that capture do not work on them: a
 * range knows no graphs, and keeping one's addresses mapped is its user's business.
 */
#include "fuzz.h"

/* A new range in a place that has none. */
static void create(struct fuzz_pool *pool, uint8_t how)
{
    static const size_t pages[8] = {8, 1, 3, 16, 24, 40, 64, 5};
    size_t place = 0;
    int s = how % WORLD_STREAMS;
    gp_error error = {0};

    while (place < MODEL_RANGES && pool->model.ranges[place].range != NULL)
        place++;
    if (!pool->held || !pool->whole_pages || pool->ending || place == MODEL_RANGES ||
        pool->world.stream[s] == NULL)
        return;
    fuzz_say("range %zu of %zu pages, stream %d", place, pages[how >> 2 & 7], s);
    fuzz_expect(pool, model_range_create(&pool->model, place, pages[how >> 2 & 7], s, &error),
                &error, 1u << GP_ERR_ADDRESS_SPACE);
    pool->dropped[place] = false;
}

void fuzz_op_range_create(void)
{
    struct fuzz_pool *pool = fuzz_held();
    uint8_t how = fuzz_byte();

    if (pool != NULL)
        create(pool, how);
}

static size_t find(const struct fuzz_pool *pool, size_t place)
{
    for (size_t i = 0; i < MODEL_RANGES; i++, place = (place + 1) % MODEL_RANGES)
        if (pool->alive && pool->model.ranges[place].range != NULL && !pool->dropped[place])
            return place;
    return MODEL_RANGES;
}

/* A range of the pool that its user still has, or MODEL_RANGES. */
static size_t pick(const struct fuzz_pool *pool)
{
    return find(pool, fuzz_below(MODEL_RANGES));
}

/* The same, for calls that make ranges grow: if there is none, one is made. */
static size_t pick_or_create(struct fuzz_pool *pool)
{
    uint8_t how = fuzz_byte();

    if (pool->alive && find(pool, 0) == MODEL_RANGES)
        create(pool, how);
    return find(pool, how % MODEL_RANGES);
}

/* A stream for a call on the range: its own as long as that lives, or one that the pool knows. */
static int pick_stream(const struct fuzz_pool *pool, const struct model_range *range, uint8_t how)
{
    int s = how % WORLD_STREAMS;

    if (range->stream >= 0 && (how & 0x30) != 0)
        return FUZZ_NONE;
    for (int i = 0; i < WORLD_STREAMS; i++, s = (s + 1) % WORLD_STREAMS)
        if (pool->world.stream[s] != NULL)
            return s;
    return FUZZ_NONE;
}

/* The first committed page from this one on, or the page itself. */
static size_t committed_from(const struct model_range *range, size_t page)
{
    for (size_t i = 0; i < range->pages; i++)
        if (range->page[(page + i) % range->pages])
            return (page + i) % range->pages;
    return page;
}

static void launch(const struct fuzz_pool *pool, const struct model_range *range, int s,
                   gp_interval part)
{
    if (part.bytes > 0 && !pool->world.pool->closing && fuzz.capture[s] == FUZZ_NONE &&
        gp__sim_pending(fuzz.world.sim, fuzz.world.handle[s]) < FUZZ_QUEUED)
        fuzz_launch(s, range->va + part.offset, part.bytes);
}

/* One to four parts; each byte has the first page, the next one the length. */
static size_t read_parts(const struct model_range *range, gp_interval parts[4], unsigned count)
{
    for (size_t i = 0; i < count; i++) {
        size_t first = fuzz_byte() % range->pages, most = range->pages - first;
        uint8_t length = fuzz_byte();

        parts[i].offset = first * WORLD_PAGE;
        parts[i].bytes = (length % (most + 1)) * WORLD_PAGE;
        if ((length & 0x80) != 0) /* to the end */
            parts[i].bytes = most * WORLD_PAGE;
    }
    return count;
}

/* Reasons that come with any range call. */
static unsigned reasons(const struct model_range *range)
{
    return (range->pin_count > 0 ? 1u << GP_ERR_PINNED : 0) |
           (range->stream < 0 ? 1u << GP_ERR_ARGUMENT : 0) | /* its own was forgotten */
           (fuzz_is_capturing() ? 1u << GP_ERR_CAPTURE : 0);
}

size_t fuzz_range_count(const struct fuzz_pool *pool)
{
    size_t count = 0;

    for (size_t i = 0; i < MODEL_RANGES; i++)
        count += pool->model.ranges[i].range != NULL;
    return count;
}

/* The model lets go of a range that it could close. */
void fuzz_op_range_close(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t place = pick(pool);
    uint8_t how = fuzz_byte();
    struct model_range *range;
    gp_error error = {0};

    if (place == MODEL_RANGES)
        return;
    range = &pool->model.ranges[place];
    fuzz_say("%zu", place);
    /* A range of a closed pool is closed. */
    if (pool->ending) {
        CHECK_OK(gp_range_close(range->range, NULL, &error), &error);
        return;
    }
    fuzz_expect(pool, model_range_close(&pool->model, place, pick_stream(pool, range, how), &error),
                &error, reasons(range));
}

static void end_dropped(struct fuzz_pool *pool, size_t place)
{
    model_range_forget(&pool->model, &pool->model.ranges[place]);
    pool->model.ranges[place] = (struct model_range){0};
    pool->dropped[place] = false;
}

/* The last reference goes without a close; what is exported lives on. */
void fuzz_op_range_drop(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t place = pick(pool);
    gp_range *range;

    if (place == MODEL_RANGES)
        return;
    fuzz_say("%zu", place);
    range = gp_range_retain(pool->model.ranges[place].range);
    gp_range_release(range);
    pool->dropped[place] = true;
    if (pool->model.ranges[place].pin_count == 0)
        end_dropped(pool, place);
    gp_range_release(range);
}

void fuzz_op_commit(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t place = pick_or_create(pool), count;
    gp_pool_stats before;
    struct model_range *range;
    gp_interval parts[4];
    gp_error error = {0};
    gp_status status;
    uint8_t how;
    int s;

    if (place == MODEL_RANGES || pool->ending)
        return;
    range = &pool->model.ranges[place];
    how = fuzz_byte();
    s = pick_stream(pool, range, how);
    count = read_parts(range, parts, (how & 0x0c) == 0x0c ? 1 + how % 4 : 1);
    fuzz_say("range %zu, %zu parts, first %zu + %zu, stream %d", place, count,
             parts[0].offset / WORLD_PAGE, parts[0].bytes / WORLD_PAGE, s);
    before = world_stats(&pool->world);
    status = model_commit(&pool->model, place, parts, count, s, &error);
    fuzz_expect(pool, status, &error, FUZZ_MEMORY | reasons(range));
    fuzz_check_growth(pool, status, &before);
    s = s < 0 ? range->stream : s;
    if (status == GP_OK && s >= 0 && (range->users & 1u << s) != 0 && (how & 0x40) == 0)
        launch(pool, range, s, parts[0]);
}

void fuzz_op_decommit(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t place = pick(pool), count;
    struct model_range *range;
    gp_interval parts[4];
    gp_error error = {0};
    uint8_t how;
    int s;

    if (place == MODEL_RANGES || pool->ending)
        return;
    range = &pool->model.ranges[place];
    how = fuzz_byte();
    s = pick_stream(pool, range, how);
    count = read_parts(range, parts, (how & 0x0c) == 0x0c ? 1 + how % 4 : 1);
    fuzz_say("range %zu, %zu parts, first %zu + %zu, stream %d%s", place, count,
             parts[0].offset / WORLD_PAGE, parts[0].bytes / WORLD_PAGE, s,
             (how & 0x40) != 0 ? ", no wait" : "");
    fuzz_expect(pool,
                model_decommit(&pool->model, place, parts, count, s,
                               (how & 0x40) != 0 ? GP_TRIM_NO_WAIT : 0, &error),
                &error, reasons(range));
}

void fuzz_op_resize(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t place = pick_or_create(pool), size;
    struct model_range *range;
    gp_error error = {0};
    uint8_t how;
    int s;

    if (place == MODEL_RANGES || pool->ending)
        return;
    range = &pool->model.ranges[place];
    how = fuzz_byte();
    s = pick_stream(pool, range, how);
    size = fuzz_byte() % (range->pages + 1) * WORLD_PAGE;
    size -= (how & 0x80) != 0 && size > 0 ? 1000 : 0;
    fuzz_say("range %zu to %zu bytes, stream %d%s", place, size, s,
             (how & 0x40) != 0 ? ", no wait" : "");
    fuzz_expect(
        pool,
        model_resize(&pool->model, place, size, s, (how & 0x40) != 0 ? GP_TRIM_NO_WAIT : 0, &error),
        &error, FUZZ_MEMORY | reasons(range));
}

/* A consumer that growpool does not see works on what was exported to it. */
static bool use_export(struct fuzz_pool *pool, size_t place, int s)
{
    const struct model_range *range = &pool->model.ranges[place];

    for (size_t i = 0; i < range->pin_count; i++)
        if ((pool->unknown_pins[place] >> i & 1) != 0) {
            fuzz_say("pin %zu of range %zu by a stranger, stream %d", i, place, s);
            launch(pool, range, s, range->pin[i]);
            return true;
        }
    return false;
}

void fuzz_op_range_use(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t place = pick(pool), page;
    uint8_t how = fuzz_byte();
    int s = how % WORLD_STREAMS;
    struct model_range *range;
    gp_error error = {0};
    gp_status status = GP_OK;

    if (place == MODEL_RANGES || pool->ending || pool->world.stream[s] == NULL)
        return;
    range = &pool->model.ranges[place];
    if ((how & 0x10) != 0 && use_export(pool, place, s))
        return;
    page = committed_from(range, fuzz_byte() % range->pages);
    fuzz_say("range %zu page %zu, stream %d", place, page, s);
    if ((range->users & 1u << s) == 0) {
        status = gp_range_record_stream(range->range, pool->world.stream[s], &error);
        fuzz_expect(pool, status, &error, 0);
    }
    if (status != GP_OK)
        return;
    range->users |= 1u << s;
    if (range->page[page])
        launch(pool, range, s, (gp_interval){page * WORLD_PAGE, WORLD_PAGE});
}

void fuzz_op_range_pin(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t place = pick(pool);
    struct model_range *range;
    gp_interval part;
    gp_error error = {0};
    gp_status status;
    uint8_t how;

    if (place == MODEL_RANGES || pool->ending)
        return;
    range = &pool->model.ranges[place];
    if (range->pin_count == MODEL_PINS)
        return;
    how = fuzz_byte();
    part.offset = committed_from(range, fuzz_byte() % range->pages) * WORLD_PAGE + (how & 1u) * 100;
    part.bytes = (size_t)(how >> 1 & 3) * WORLD_PAGE + ((how & 8) == 0 ? 100 : 0);
    fuzz_say("range %zu, %zu + %zu bytes%s", place, part.offset, part.bytes,
             (how & 0x10) != 0 ? ", users unknown" : "");
    status = model_pin(&pool->model, place, part.offset, part.bytes, (how & 0x10) != 0, &error);
    fuzz_expect(pool, status, &error, 1u << GP_ERR_ARGUMENT);
    if (status != GP_OK)
        return;
    pool->unknown_pins[place] &= ~(1u << (range->pin_count - 1));
    if ((how & 0x10) == 0)
        return;
    pool->unknown_pins[place] |= 1u << (range->pin_count - 1);
    launch(pool, range, (how >> 5) % WORLD_STREAMS, part);
}

/* What a range refuses, and what it says of itself. */
void fuzz_op_range_bad(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t place = pick(pool), end;
    gp_range *range;
    gp_error error = {0};

    if (place == MODEL_RANGES || pool->ending)
        return;
    fuzz_say("%zu", place);
    range = pool->model.ranges[place].range;
    end = pool->model.ranges[place].pages * WORLD_PAGE;
    CHECK(gp_range_pool(range) == pool->world.pool && gp_range_max_bytes(range) == end &&
              gp_range_granularity(range) == WORLD_PAGE && gp_range_stream(range) != NULL,
          "a range is not what it was made as");
    CHECK(!gp_range_is_closed(range) || pool->finishing, "a range is closed");
    fuzz_refused(gp_range_commit(range, &(gp_interval){512, WORLD_PAGE}, 1, NULL, NULL, &error),
                 &error);
    fuzz_refused(
        gp_range_decommit(range, &(gp_interval){WORLD_PAGE, end}, 1, NULL, 0, NULL, &error),
        &error);
    fuzz_refused(gp_range_resize(range, end + 1, NULL, 0, NULL, &error), &error);
    CHECK(gp_range_pin(range, end, 1, false, &error) != GP_OK, "a pin beyond the end");
    gp_range_unpin(range, end, 1); /* does nothing */
}

static void unpin(struct fuzz_pool *pool, size_t place, size_t pin)
{
    struct model_range *range = &pool->model.ranges[place];
    gp_range *kept = range->range;
    gp_interval part = range->pin[pin];

    if (!pool->dropped[place] || range->pin_count > 1) {
        unsigned last = pool->unknown_pins[place] >> (range->pin_count - 1) & 1;

        model_unpin(&pool->model, place, pin); /* the last one takes its place */
        pool->unknown_pins[place] &= ~(1u << pin);
        pool->unknown_pins[place] |= last << pin;
        return;
    }
    end_dropped(pool, place); /* the pin was the last that held it */
    gp_range_unpin(kept, part.offset, part.bytes);
}

void fuzz_op_range_unpin(void)
{
    struct fuzz_pool *pool = &fuzz.pools[fuzz.now];
    size_t place = fuzz_below(MODEL_RANGES);

    fuzz_say("a range of pool %u", fuzz.now);
    for (size_t i = 0; i < MODEL_RANGES; i++, place = (place + 1) % MODEL_RANGES) {
        const struct model_range *range = &pool->model.ranges[place];

        if (!pool->alive || range->range == NULL || range->pin_count == 0)
            continue;
        unpin(pool, place, fuzz_below(range->pin_count));
        return;
    }
}

void fuzz_ranges_unpin(struct fuzz_pool *pool)
{
    for (size_t place = 0; pool->alive && place < MODEL_RANGES; place++)
        while (pool->model.ranges[place].pin_count > 0)
            unpin(pool, place, 0);
}

void fuzz_ranges_end(struct fuzz_pool *pool)
{
    for (size_t place = 0; pool->alive && place < MODEL_RANGES; place++) {
        struct model_range *range = &pool->model.ranges[place];
        gp_range *kept = range->range;

        if (kept == NULL)
            continue;
        model_range_forget(&pool->model, range);
        *range = (struct model_range){0};
        gp_range_release(kept);
    }
}
