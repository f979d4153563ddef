/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations on one tiny range: a part of test_small.c, which includes it once, behind its
 * world. The range has four pages, and chunks are planned, so that cuts leave rests.
 */
#ifndef GP__SMALL_RANGE_OPS_H
#define GP__SMALL_RANGE_OPS_H

#define RANGE_PAGES 4

static struct model_range *the_range(void)
{
    struct model_range *range = &small.model.ranges[0];

    return range->range != NULL ? range : NULL;
}

static void commit_pages(size_t first, size_t count, int s)
{
    gp_interval part = {first * WORLD_PAGE, count * WORLD_PAGE};
    gp_error error = {0};
    gp_status status;

    if (the_range() == NULL)
        return;
    status = model_commit(&small.model, 0, &part, 1, s, &error);
    CHECK(status == GP_OK || status == GP_ERR_OUT_OF_MEMORY || status == GP_ERR_LIMIT, "commit: %s",
          error.message);
}

static void decommit_pages(size_t first, size_t count, int s, unsigned flags)
{
    gp_interval part = {first * WORLD_PAGE, count * WORLD_PAGE};
    gp_error error = {0};
    gp_status status;

    if (the_range() == NULL)
        return;
    status = model_decommit(&small.model, 0, &part, 1, s, flags, &error);
    CHECK(status == GP_OK || status == GP_ERR_PINNED, "decommit: %s", error.message);
}

static void commit_two_a(void)
{
    commit_pages(0, 2, 0);
}

static void commit_two_b(void)
{
    commit_pages(1, 2, 1);
}

static void commit_all_a(void)
{
    commit_pages(0, RANGE_PAGES, 0);
}

static void decommit_one(void)
{
    decommit_pages(1, 1, -1, 0);
}

static void decommit_two_no_wait(void)
{
    decommit_pages(1, 2, 1, GP_TRIM_NO_WAIT);
}

static void decommit_all_no_wait(void)
{
    decommit_pages(0, RANGE_PAGES, -1, GP_TRIM_NO_WAIT);
}

static void resize_to_three(void)
{
    gp_error error = {0};
    gp_status status;

    if (the_range() == NULL)
        return;
    status = model_resize(&small.model, 0, 3 * WORLD_PAGE, 1, GP_TRIM_NO_WAIT, &error);
    CHECK(status == GP_OK || status == GP_ERR_PINNED || status == GP_ERR_OUT_OF_MEMORY ||
              status == GP_ERR_LIMIT,
          "resize: %s", error.message);
}

/* Ends the range, or makes the next one. */
static void close_or_create(void)
{
    gp_error error = {0};
    gp_status status = the_range() != NULL
                           ? model_range_close(&small.model, 0, -1, &error)
                           : model_range_create(&small.model, 0, RANGE_PAGES, 0, &error);

    CHECK(status == GP_OK || status == GP_ERR_PINNED || status == GP_ERR_ADDRESS_SPACE, "%s",
          error.message);
}

/* Exports page 1, where somebody unknown works on it; or ends the export. */
static void pin_or_unpin(void)
{
    struct model_range *range = the_range();

    if (range == NULL || !range->page[1])
        return;
    if (range->pin_count > 0) {
        model_unpin(&small.model, 0, 0);
        return;
    }
    CHECK_OK(model_pin(&small.model, 0, WORLD_PAGE, 512, true, NULL), NULL);
    world_launch(&small.world, 1, range->va + WORLD_PAGE, 512);
}

static void launch_on_the_range(void)
{
    const struct model_range *range = the_range();

    for (size_t page = 0; range != NULL && page < RANGE_PAGES; page++)
        for (int s = 0; s < 2; s++)
            if (range->page[page] && (range->users & (1u << s)) != 0)
                world_launch(&small.world, s, range->va + page * WORLD_PAGE, 512);
}

static void (*const range_operations[])(void) = {
    commit_two_a,         commit_two_b,    commit_all_a,    decommit_one, decommit_two_no_wait,
    decommit_all_no_wait, resize_to_three, close_or_create, pin_or_unpin, launch_on_the_range,
    complete_a,           complete_one_b,  page_b,          free_lowest,  trim,
    reaper_turn,          toggle_limit,    refuse_next,
};

#endif
