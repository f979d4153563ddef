/* SPDX-License-Identifier: Apache-2.0
 *
 * The random operations on ranges: a part of test_model.c, which includes it once, behind its
 * random numbers.
 */
#ifndef GP__MODEL_RANGE_OPS_H
#define GP__MODEL_RANGE_OPS_H

/* The place of a range, or MODEL_RANGES. */
static size_t random_range(void)
{
    size_t place = below(MODEL_RANGES);

    for (size_t i = 0; i < MODEL_RANGES; i++, place = (place + 1) % MODEL_RANGES)
        if (run.model.ranges[place].range != NULL)
            return place;
    return MODEL_RANGES;
}

/* A stream for a call on the range: mostly its own, as long as that lives. */
static int random_range_stream(const struct model_range *range)
{
    return range->stream >= 0 && percent(60) ? -1 : random_stream();
}

static void launch_on_range(const struct model_range *range, int s, gp_interval part)
{
    if (part.bytes > 0 && gp__sim_pending(run.world.sim, run.world.handle[s]) < 64)
        world_launch(&run.world, s, range->va + part.offset, part.bytes);
}

static size_t random_parts(const struct model_range *range, gp_interval parts[4])
{
    size_t count = percent(60) ? 1 : 1 + below(4);

    for (size_t i = 0; i < count; i++) {
        size_t first = below(range->pages), most = range->pages - first;

        parts[i].offset = first * WORLD_PAGE;
        parts[i].bytes = below((percent(80) && most > 8 ? 8 : most) + 1) * WORLD_PAGE;
    }
    return count;
}

static bool op_range_create(void)
{
    gp_error error = {0};
    size_t place = below(MODEL_RANGES);

    if (run.model.ranges[place].range != NULL)
        return false;
    expect(model_range_create(&run.model, place, 1 + below(MODEL_PAGES), random_stream(), &error),
           &error, 0);
    return true;
}

static bool op_range_close(void)
{
    gp_error error = {0};
    size_t place = random_range();
    gp_status status;

    if (place == MODEL_RANGES)
        return false;
    status =
        model_range_close(&run.model, place, random_range_stream(&run.model.ranges[place]), &error);
    expect(status, &error, 1u << GP_ERR_PINNED);
    return status == GP_OK;
}

static bool op_commit(void)
{
    gp_error error = {0};
    gp_interval parts[4];
    size_t place = random_range(), count;
    struct model_range *range;
    gp_status status;
    int s;

    if (place == MODEL_RANGES)
        return false;
    range = &run.model.ranges[place];
    count = random_parts(range, parts);
    s = random_range_stream(range);
    status = model_commit(&run.model, place, parts, count, s, &error);
    expect(status, &error, NO_MEMORY);
    s = s < 0 ? range->stream : s;
    if (status == GP_OK && (range->users & (1u << s)) != 0 && percent(70))
        launch_on_range(range, s, parts[0]);
    return status == GP_OK;
}

static bool op_decommit(void)
{
    gp_error error = {0};
    gp_interval parts[4];
    size_t place = random_range(), count;
    gp_status status;

    if (place == MODEL_RANGES)
        return false;
    count = random_parts(&run.model.ranges[place], parts);
    status = model_decommit(&run.model, place, parts, count,
                            random_range_stream(&run.model.ranges[place]),
                            percent(60) ? GP_TRIM_NO_WAIT : 0, &error);
    expect(status, &error, 1u << GP_ERR_PINNED);
    return status == GP_OK;
}

static bool op_resize(void)
{
    gp_error error = {0};
    size_t place = random_range(), size;
    gp_status status;

    if (place == MODEL_RANGES)
        return false;
    size = below(run.model.ranges[place].pages * WORLD_PAGE + 1);
    status = model_resize(&run.model, place, size, random_range_stream(&run.model.ranges[place]),
                          percent(60) ? GP_TRIM_NO_WAIT : 0, &error);
    expect(status, &error, NO_MEMORY | 1u << GP_ERR_PINNED);
    return status == GP_OK;
}

static bool op_range_use(void)
{
    gp_error error = {0};
    size_t place = random_range(), first;
    struct model_range *range;
    int s = random_stream();

    if (place == MODEL_RANGES)
        return false;
    range = &run.model.ranges[place];
    first = below(range->pages);
    if (!range->page[first])
        return false;
    if ((range->users & (1u << s)) == 0) {
        expect(gp_range_record_stream(range->range, run.world.stream[s], &error), &error, 0);
        range->users |= 1u << s;
    }
    launch_on_range(range, s, (gp_interval){first * WORLD_PAGE, WORLD_PAGE});
    return true;
}

/* Exported memory may be used by any stream until the export ends. */
static bool op_pin(void)
{
    gp_error error = {0};
    size_t place = random_range(), offset, bytes;
    struct model_range *range;
    bool unknown = percent(30);
    gp_status status;

    if (place == MODEL_RANGES)
        return false;
    range = &run.model.ranges[place];
    if (range->pin_count == MODEL_PINS)
        return false;
    offset = below(range->pages * WORLD_PAGE);
    bytes = below(percent(70) ? MIB : 4 * WORLD_PAGE);
    status = model_pin(&run.model, place, offset, bytes, unknown, &error);
    expect(status, &error, 1u << GP_ERR_ARGUMENT);
    if (status == GP_OK && unknown)
        launch_on_range(range, random_stream(), (gp_interval){offset, bytes});
    return status == GP_OK;
}

static bool op_unpin(void)
{
    size_t place = random_range();

    if (place == MODEL_RANGES || run.model.ranges[place].pin_count == 0)
        return false;
    model_unpin(&run.model, place, below(run.model.ranges[place].pin_count));
    return true;
}

#endif
