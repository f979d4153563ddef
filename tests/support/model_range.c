/* SPDX-License-Identifier: Apache-2.0
 *
 * The shadow model's ranges: one byte for each page that ought to be committed. Straightforward and
 * slow on purpose; like the rest of the model it asks the simulator about work and never steers the
 * pool.
 */
#include "model.h"

#define PAGE ((size_t)WORLD_PAGE)

/* ---- what the range ought to show ---- */

static bool contains(const gp_interval *parts, size_t count, size_t page)
{
    for (size_t i = 0; i < count; i++)
        if (page * PAGE >= parts[i].offset && page * PAGE < parts[i].offset + parts[i].bytes)
            return true;
    return false;
}

static void mark(struct model *model, struct model_range *range, size_t page, bool committed)
{
    if (range->page[page] == committed)
        return;
    range->page[page] = committed;
    model->used_bytes += committed ? PAGE : 0;
    model->used_bytes -= committed ? 0 : PAGE;
}

static void read_pages(const struct model *model, const struct model_range *range,
                       bool page[MODEL_PAGES])
{
    gp_interval parts[MODEL_PAGES];
    size_t count = gp_range_committed(range->range, parts, MODEL_PAGES), end = 0;

    CHECK(count <= MODEL_PAGES, "%zu intervals in %zu pages", count, range->pages);
    memset(page, 0, MODEL_PAGES * sizeof *page);
    for (size_t i = 0; i < count; i++) {
        CHECK(i == 0 || parts[i].offset > end, "intervals that touch, or are out of order");
        end = parts[i].offset + parts[i].bytes;
        CHECK(end <= range->pages * PAGE, "committed beyond the end");
        for (size_t p = parts[i].offset / PAGE; p < end / PAGE; p++)
            page[p] = true;
        CHECK(gp__sim_is_accessible(model->world->sim, range->va + parts[i].offset, parts[i].bytes),
              "%zu bytes at offset %zu are committed and not mapped", parts[i].bytes,
              parts[i].offset);
    }
}

static void check_range(const struct model *model, const struct model_range *range,
                        const char *where)
{
    bool page[MODEL_PAGES];
    size_t committed = 0;

    read_pages(model, range, page);
    for (size_t i = 0; i < MODEL_PAGES; i++) {
        CHECK(page[i] == range->page[i], "%s: page %zu of a range is %scommitted", where, i,
              page[i] ? "" : "not ");
        committed += page[i] ? PAGE : 0;
    }
    CHECK(gp_range_committed_bytes(range->range) == committed, "%s: committed bytes %zu, not %zu",
          where, gp_range_committed_bytes(range->range), committed);
    CHECK(gp_range_physical_bytes(range->range) >= committed, "%s: physical below committed",
          where);
    CHECK(gp_range_size(range->range) == range->size, "%s: a range's size is %zu, not %zu", where,
          gp_range_size(range->range), range->size);
    CHECK(gp_range_address(range->range) == range->va, "%s: a range moved", where);
}

void model_check_ranges(const struct model *model, const char *where)
{
    for (size_t i = 0; i < MODEL_RANGES; i++)
        if (model->ranges[i].range != NULL)
            check_range(model, &model->ranges[i], where);
}

/* ---- life ---- */

gp_status model_range_create(struct model *model, size_t index, size_t pages, int s,
                             gp_error *error)
{
    struct model_range *range = &model->ranges[index];
    gp_range *made = NULL;
    gp_status status;

    CHECK(range->range == NULL && pages <= MODEL_PAGES, "no room for a range in the model");
    status =
        gp_range_create(model->world->pool, pages * PAGE, model->world->stream[s], &made, error);
    CHECK((status == GP_OK) == (made != NULL), "a create that wrote its output is %d", status);
    if (status == GP_OK)
        *range = (struct model_range){.range = made,
                                      .va = gp_range_address(made),
                                      .pages = pages,
                                      .stream = s,
                                      .users = 1u << s};
    return status;
}

void model_range_forget(struct model *model, struct model_range *range)
{
    for (size_t page = 0; page < MODEL_PAGES; page++)
        mark(model, range, page, false);
}

gp_status model_range_close(struct model *model, size_t index, int s, gp_error *error)
{
    struct model_range *range = &model->ranges[index];
    gp_status status = gp_range_close(range->range, s < 0 ? NULL : model->world->stream[s], error);

    CHECK((status == GP_ERR_PINNED) == (range->pin_count > 0 && status != GP_ERR_STATE),
          "closing a range with %zu pins: %s", range->pin_count, gp_status_text(status));
    if (status != GP_OK)
        return status;
    model_range_forget(model, range);
    gp_range_release(range->range);
    *range = (struct model_range){0};
    return status;
}

void model_ranges_end(struct model *model)
{
    for (size_t i = 0; i < MODEL_RANGES; i++) {
        struct model_range *range = &model->ranges[i];

        while (range->pin_count > 0)
            model_unpin(model, i, range->pin_count - 1);
        gp_range_release(range->range);
        *range = (struct model_range){0};
    }
}

/* ---- commit and decommit ---- */

/* What stream `s` has just been given must be mapped, and free of the work of others. */
static void check_given(const struct model *model, const struct model_range *range, size_t page,
                        int s)
{
    const struct world *world = model->world;
    uint64_t id = s < 0 ? 0 : gp__sim_stream_id(world->sim, world->handle[s]);
    uintptr_t va = range->va + page * PAGE;

    CHECK(gp__sim_is_accessible(world->sim, va, PAGE), "page %zu was given and not mapped", page);
    CHECK(!gp__sim_busy(world->sim, va, PAGE, id),
          "page %zu of a range went to stream %d under pending work of another stream", page, s);
}

static gp_status note_commit(struct model *model, struct model_range *range,
                             const gp_interval *parts, size_t count, int s, gp_status status,
                             size_t added)
{
    size_t expected = 0;

    if (status != GP_OK)
        return status;
    for (size_t page = 0; page < range->pages; page++) {
        if (range->page[page] || !contains(parts, count, page))
            continue;
        check_given(model, range, page, s < 0 ? range->stream : s);
        mark(model, range, page, true);
        expected += PAGE;
    }
    CHECK(added == expected || added == SIZE_MAX, "%zu bytes committed, not %zu", added, expected);
    if (s >= 0 && expected > 0)
        range->users |= 1u << s;
    return status;
}

gp_status model_commit(struct model *model, size_t index, const gp_interval *parts, size_t count,
                       int s, gp_error *error)
{
    struct model_range *range = &model->ranges[index];
    size_t added = SIZE_MAX - 1;
    gp_status status = gp_range_commit(range->range, parts, count,
                                       s < 0 ? NULL : model->world->stream[s], &added, error);

    CHECK(status == GP_OK || added == SIZE_MAX - 1, "a commit failed and yet wrote its output");
    return note_commit(model, range, parts, count, s, status, added);
}

static bool is_pinned(const struct model_range *range, const gp_interval *parts, size_t count)
{
    for (size_t p = 0; p < range->pin_count; p++)
        for (size_t i = 0; i < count; i++)
            if (range->pin[p].bytes > 0 && parts[i].bytes > 0 &&
                range->pin[p].offset < parts[i].offset + parts[i].bytes &&
                parts[i].offset < range->pin[p].offset + range->pin[p].bytes)
                return true;
    return false;
}

/* Whether the parts are decommitted now. They are all or none: also after an error, which may be
 * about waiting for memory that has left the range already. */
static bool took_effect(const struct model *model, const struct model_range *range,
                        const gp_interval *parts, size_t count)
{
    bool page[MODEL_PAGES], all = true, none = true;

    read_pages(model, range, page);
    for (size_t i = 0; i < range->pages; i++) {
        if (!range->page[i] || !contains(parts, count, i))
            continue;
        all = all && !page[i];
        none = none && page[i];
    }
    CHECK(all || none, "a decommit took effect in part");
    return all && !none;
}

static void note_decommit(struct model *model, struct model_range *range, const gp_interval *parts,
                          size_t count, gp_status status)
{
    /* A stream that the driver would not tell about is found to capture when its fence is recorded. */
    bool untold = status == GP_ERR_CAPTURE && gp__sim_faults_fired(model->world->sim) > 0;
    bool may_be_done = status == GP_ERR_DRIVER || status == GP_ERR_HOST_MEMORY ||
                       status == GP_ERR_INTERRUPTED || untold;
    bool pinned = is_pinned(range, parts, count);

    CHECK(status != GP_ERR_PINNED || pinned, "a decommit of what is not pinned was refused");
    CHECK(status != GP_OK || !pinned, "exported memory was decommitted");
    if (status != GP_OK && !(may_be_done && took_effect(model, range, parts, count)))
        return;
    for (size_t page = 0; page < range->pages; page++)
        if (contains(parts, count, page))
            mark(model, range, page, false);
}

gp_status model_decommit(struct model *model, size_t index, const gp_interval *parts, size_t count,
                         int s, unsigned flags, gp_error *error)
{
    struct model_range *range = &model->ranges[index];
    gp_release_result result = {SIZE_MAX, SIZE_MAX};
    gp_status status = gp_range_decommit(
        range->range, parts, count, s < 0 ? NULL : model->world->stream[s], flags, &result, error);

    CHECK(status == GP_OK || result.released_bytes == SIZE_MAX,
          "a decommit failed and yet wrote its output");
    note_decommit(model, range, parts, count, status);
    return status;
}

gp_status model_resize(struct model *model, size_t index, size_t bytes, int s, unsigned flags,
                       gp_error *error)
{
    struct model_range *range = &model->ranges[index];
    size_t middle = (bytes + PAGE - 1) / PAGE * PAGE;
    gp_interval kept = {0, middle}, gone = {middle, range->pages * PAGE - middle};
    gp_release_result result = {SIZE_MAX, SIZE_MAX};
    gp_status status = gp_range_resize(range->range, bytes, s < 0 ? NULL : model->world->stream[s],
                                       flags, &result, error);

    CHECK(status == GP_OK || result.released_bytes == SIZE_MAX,
          "a resize failed and yet wrote its output");
    if (bytes >= range->size)
        note_commit(model, range, &kept, 1, s, status, SIZE_MAX);
    else
        note_decommit(model, range, &gone, 1, status);
    /* After an error the size says whether it took effect; the pages were compared already. */
    if (status == GP_OK || (bytes < range->size && gp_range_size(range->range) == bytes))
        range->size = bytes;
    return status;
}

/* ---- pins ---- */

static bool is_committed(const struct model_range *range, size_t offset, size_t bytes)
{
    for (size_t page = offset / PAGE; bytes > 0 && page * PAGE < offset + bytes; page++)
        if (page >= range->pages || !range->page[page])
            return false;
    return true;
}

gp_status model_pin(struct model *model, size_t index, size_t offset, size_t bytes, bool unknown,
                    gp_error *error)
{
    struct model_range *range = &model->ranges[index];
    gp_status status = gp_range_pin(range->range, offset, bytes, unknown, error);

    CHECK(range->pin_count < MODEL_PINS, "no room for a pin in the model");
    CHECK(status != GP_OK || is_committed(range, offset, bytes), "a pin of what is not committed");
    CHECK(status != GP_ERR_ARGUMENT || !is_committed(range, offset, bytes),
          "a pin of committed memory was refused");
    if (status == GP_OK)
        range->pin[range->pin_count++] = (gp_interval){offset, bytes};
    return status;
}

void model_unpin(struct model *model, size_t index, size_t pin)
{
    struct model_range *range = &model->ranges[index];

    gp_range_unpin(range->range, range->pin[pin].offset, range->pin[pin].bytes);
    range->pin[pin] = range->pin[--range->pin_count];
}
