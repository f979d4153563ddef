/* SPDX-License-Identifier: Apache-2.0
 *
 * Emergency mode: with GP_TEST_EMERGENCY=1 in the environment every growth of every pool is told "no memory"
 * once before its backing is asked, and the tests must hold all the same. It knows which tests cannot, and
 * why.
 */
#ifndef GP__EMERGENCY_H
#define GP__EMERGENCY_H

#include <stddef.h>

#include <cmocka.h>

/* How many refusals of each growth are the mode's, and so never reach the backing: 0 or 1. For tests that
 * count requests. */
unsigned refusals(void);

/* Runs the group as cmocka does; in emergency mode without the tests that are listed in emergency.c. */
int emergency_run(const char *name, const struct CMUnitTest *tests, size_t count,
                  CMFixtureFunction set_up, CMFixtureFunction tear_down);

#undef cmocka_run_group_tests
#define cmocka_run_group_tests(tests, set_up, tear_down)                                           \
    emergency_run(#tests, (tests), sizeof(tests) / sizeof *(tests), (set_up), (tear_down))
#undef cmocka_run_group_tests_name
#define cmocka_run_group_tests_name(name, tests, set_up, tear_down)                                \
    emergency_run((name), (tests), sizeof(tests) / sizeof *(tests), (set_up), (tear_down))

#endif
