/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded into a process, it counts the calls of malloc and its kin that one thread makes between two
 * points. It keeps nothing for a thread of its own: that would be memory too.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

/* glibc's own, under the names that stay when somebody replaces the public ones. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *pointer, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

void count_malloc_begin(void);
uint64_t count_malloc_end(void);

static _Atomic pid_t watched; /* the thread; 0: none */
static _Atomic uint64_t calls;

void count_malloc_begin(void)
{
    atomic_store(&calls, 0);
    atomic_store(&watched, gettid());
}

uint64_t count_malloc_end(void)
{
    atomic_store(&watched, 0);
    return atomic_load(&calls);
}

static void note(void)
{
    pid_t thread = atomic_load(&watched);
    if (thread != 0 && thread == gettid())
        atomic_fetch_add(&calls, 1);
}

void *malloc(size_t bytes)
{
    note();
    return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    note();
    return __libc_calloc(count, bytes);
}

void *realloc(void *pointer, size_t bytes)
{
    note();
    return __libc_realloc(pointer, bytes);
}

void *memalign(size_t alignment, size_t bytes)
{
    note();
    return __libc_memalign(alignment, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    note();
    return __libc_memalign(alignment, bytes);
}

int posix_memalign(void **out, size_t alignment, size_t bytes)
{
    note();
    *out = __libc_memalign(alignment, bytes);
    return *out != NULL ? 0 : ENOMEM;
}
