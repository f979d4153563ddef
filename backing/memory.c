/* SPDX-License-Identifier: Apache-2.0
 *
 * growpool's own heap. It counts the bytes it holds; test builds count every allocation too, and can make
 * any of them fail.
 */
#include "memory.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "backing.h"

static _Atomic size_t held_bytes;

#ifdef GP_TESTING
static _Atomic uint64_t asked_count;
static _Atomic uint64_t failing_number; /* 0: none fails */
static _Atomic bool failing_forever;
static _Atomic int64_t live_count;

static bool must_fail(void)
{
    uint64_t number = atomic_fetch_add(&asked_count, 1) + 1;
    uint64_t failing = atomic_load(&failing_number);
    if (failing == 0) {
        return false;
    }
    return number == failing || (number > failing && atomic_load(&failing_forever));
}

static void count_live(int64_t change)
{
    atomic_fetch_add(&live_count, change);
}

uint64_t gp__memory_fail_at(uint64_t fail_at, int forever)
{
    atomic_store(&failing_number, 0);
    uint64_t asked = atomic_exchange(&asked_count, 0);
    atomic_store(&failing_forever, forever != 0);
    atomic_store(&failing_number, fail_at);
    return asked;
}

int64_t gp__memory_live(void)
{
    return atomic_load(&live_count);
}
#else
static inline bool must_fail(void)
{
    return false;
}

static inline void count_live(int64_t change)
{
    (void)change;
}
#endif

/* What the C library gave for it, which may be a little more than was asked. */
static void hold(void *pointer)
{
    atomic_fetch_add_explicit(&held_bytes, malloc_usable_size(pointer), memory_order_relaxed);
}

static void let_go(void *pointer)
{
    atomic_fetch_sub_explicit(&held_bytes, malloc_usable_size(pointer), memory_order_relaxed);
}

size_t gp_bookkeeping_bytes(void)
{
    return atomic_load_explicit(&held_bytes, memory_order_relaxed);
}

void *gp__calloc(size_t count, size_t size)
{
    size_t bytes;
    if (must_fail() || __builtin_mul_overflow(count, size, &bytes)) {
        return NULL;
    }
    /* A request for nothing must not look like a failure, so it gets one byte. */
    void *pointer = calloc(1, bytes == 0 ? 1 : bytes);
    if (pointer != NULL) {
        count_live(1);
        hold(pointer);
    }
    return pointer;
}

void *gp__realloc(void *pointer, size_t count, size_t size)
{
    size_t bytes;
    if (must_fail() || __builtin_mul_overflow(count, size, &bytes)) {
        return NULL;
    }
    let_go(pointer);
    void *grown = realloc(pointer, bytes == 0 ? 1 : bytes);
    hold(grown != NULL ? grown : pointer);
    if (grown != NULL && pointer == NULL) {
        count_live(1);
    }
    return grown;
}

void gp__free(void *pointer)
{
    if (pointer != NULL) {
        count_live(-1);
        let_go(pointer);
    }
    free(pointer);
}
