/* SPDX-License-Identifier: Apache-2.0
 *
 * What every C test includes: cmocka with the headers it wants first, and checks that print a status
 * and its error in words. It knows no scenario and no pool.
 */
#ifndef GP__CHECK_H
#define GP__CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backing/backing.h"
#include "tests/support/emergency.h"

#define CHECK_MIB (UINT64_C(1) << 20)
#define CHECK_GIB (UINT64_C(1) << 30)

/* Fails the test unless `got` is `want`; `error` (may be NULL) explains a status that is not. */
#define CHECK_STATUS(want, got, error)                                                             \
    check_status((want), (got), (error), #got, __FILE__, __LINE__)
#define CHECK_OK(got, error) CHECK_STATUS(GP_OK, got, error)
/* Fails the test with a sentence of its own. */
#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition))                                                                          \
            check_failed(#condition, __FILE__, __LINE__, __VA_ARGS__);                             \
    } while (0)

/* The line that reproduces what runs now; printed before a failed check. NULL: none. */
void check_context(const char *line);
const char *check_context_line(void);
void check_failed(const char *condition, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void check_status(gp_status want, gp_status got, const gp_error *error, const char *expression,
                  const char *file, int line);
/* A whole number from the environment, or `otherwise`. */
uint64_t check_environment(const char *name, uint64_t otherwise);

#endif
