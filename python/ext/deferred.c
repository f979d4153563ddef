/* SPDX-License-Identifier: Apache-2.0
 *
 * Backings that finalisers let go of, released on the core's delivery thread. Lock-free, so that a fork
 * at any moment leaves the child nothing locked.
 */
#include "backing.h"

#include <stdatomic.h>
#include <stdint.h>

#include "../../sync/reaper.h"
#include "gate.h"

static _Atomic(struct ext_deferred *) waiting;

/* Attached: Python's allocators may be replaced at any time by somebody who holds the interpreter, and even
 * the raw one is two words then, of which a detached thread may find one old and one new (tracemalloc and
 * _testcapi do that). At the end of the process it stays. */
static void free_node(struct ext_deferred *node)
{
    struct ext_attached attached;
    if (!ext_attach(&attached))
        return;
    PyMem_RawFree(node);
    ext_detach(&attached);
}

void ext_run_deferred(void)
{
    struct ext_deferred *node = atomic_exchange(&waiting, NULL);
    while (node != NULL) {
        struct ext_deferred *next = node->next;
        gp_backing_release(node->backing);
        free_node(node);
        node = next;
    }
}

static uint64_t deliver(void *unused)
{
    (void)unused;
    ext_run_deferred();
    return UINT64_MAX;
}

void ext_defer_release(struct ext_deferred *node, gp_backing *backing)
{
    static struct gp__reaper_client client = {.function = deliver, .due = UINT64_MAX};
    node->backing = backing;
    node->next = atomic_load(&waiting);
    while (!atomic_compare_exchange_weak(&waiting, &node->next, node)) {
    }
    gp__reaper_kick(&client);
}
