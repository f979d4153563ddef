/* SPDX-License-Identifier: Apache-2.0
 *
 * Which tests run in emergency mode, and which do not, with the reason: nothing else decides that.
 */
#include "check.h"

#include <errno.h>

#include "vmm/pool.h"

/* A refusal makes a pool give idle memory back and wait for its streams, as it should. */
static const struct exemption {
    const char *suite, *test, *reason;
} exemptions[] = {
    {"test_capture", "a_capture_takes_only_what_everybody_has_passed",
     "the refused growth waits until everybody has passed all of it"},
    {"test_small", "orders_of_completion_and_reuse",
     "the refused growth waits for the very streams whose order is permuted"},
};

static bool is_on(void)
{
    return check_environment("GP_TEST_EMERGENCY", 0) != 0;
}

unsigned refusals(void)
{
    return is_on() ? 1 : 0;
}

static bool is_of_suite(const struct exemption *exemption)
{
    return strcmp(exemption->suite, program_invocation_short_name) == 0;
}

static const struct exemption *exemption_of(const char *test)
{
    for (size_t i = 0; i < sizeof exemptions / sizeof *exemptions; i++) {
        if (is_of_suite(&exemptions[i]) && strcmp(exemptions[i].test, test) == 0)
            return &exemptions[i];
    }
    return NULL;
}

static size_t count_of_suite(void)
{
    size_t count = 0;

    for (size_t i = 0; i < sizeof exemptions / sizeof *exemptions; i++)
        count += is_of_suite(&exemptions[i]);
    return count;
}

int emergency_run(const char *name, const struct CMUnitTest *tests, size_t count,
                  CMFixtureFunction set_up, CMFixtureFunction tear_down)
{
    struct CMUnitTest *kept;
    size_t kept_count = 0, exempt = 0;
    int failed;

    if (!is_on())
        return _cmocka_run_group_tests(name, tests, count, set_up, tear_down);
    kept = calloc(count, sizeof *kept);
    for (size_t i = 0; i < count && kept != NULL; i++) {
        const struct exemption *exemption = exemption_of(tests[i].name);

        if (exemption == NULL)
            kept[kept_count++] = tests[i];
        else
            printf("not in emergency mode: %s: %s\n", tests[i].name, exemption->reason);
        exempt += exemption != NULL;
    }
    if (kept == NULL || exempt != count_of_suite()) {
        fprintf(stderr, "emergency.c names a test that %s does not have\n",
                program_invocation_short_name);
        return 1;
    }
    gp__set_emergency(true);
    failed = _cmocka_run_group_tests(name, kept, kept_count, set_up, tear_down);
    gp__set_emergency(false);
    free(kept);
    return failed;
}
