/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool's own heap: the one place where the C core allocates host memory, so that test builds can
 * make the n-th allocation fail. Never used for user memory.
 */
#ifndef GP__MEMORY_H
#define GP__MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* Zeroed memory or NULL. count * size is checked for overflow. */
void *gp__calloc(size_t count, size_t size);
/* Grows an array, keeping its contents; the new part is not zeroed. NULL leaves the old one alone. */
void *gp__realloc(void *pointer, size_t count, size_t size);
void gp__free(void *pointer); /* NULL is allowed */

#ifdef GP_TESTING
/* Fault injector: the fail_at-th allocation from now (1 is the next) fails; with `forever` all later
 * ones too. fail_at 0 switches it off. Returns how many allocations were asked for since the last
 * call. Process-wide; tests that use it are single-threaded. */
uint64_t gp__memory_fail_at(uint64_t fail_at, int forever);
/* Allocations not freed yet: 0 at the end of a clean test. */
int64_t gp__memory_live(void);
#endif

#endif
