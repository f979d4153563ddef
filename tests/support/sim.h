/* SPDX-License-Identifier: Apache-2.0
 *
 * The strict simulated driver: a device whose driver remembers everything, forgives nothing, and does
 * work only when a test says so. It implements the table of backing/driver.h with the rules measured
 * on a real GPU (which calls succeed, which fail with which status) and reports as a violation every
 * call that on real hardware would crash, corrupt memory, kill the context or invalidate a capture.
 *
 * LEDGER      reservations; chunks with their creation reference and mappings, one memory behind all
 *             handles that were imported from it; access for each mapping, of the device and of
 *             peers; streams with pending work that names the addresses it touches; events;
 *             captures and the graphs they become. A chunk's memory lives while it is unreleased or
 *             mapped.
 * VIOLATIONS  unmap, or free of addresses, under pending work; work launched on addresses that are
 *             not mapped with access, and work completing on addresses that were unmapped since;
 *             map, release or query of a junk or released handle; use of a destroyed stream; unmap of
 *             what is not mapped; half a mapping; map over a mapping or outside a reservation; a
 *             partial free of a reservation; access for a peer that is none or cannot reach; a chunk
 *             with properties that the device does not claim; an export of memory not made for it;
 *             free of addresses with mappings left; record in a
 *             capturing stream, or of a stream whose handle names another stream by now; query, wait or context-wide record that invalidates a capture
 *             (outside relaxed mode, or always for an implicit one); record on a thread-bound stream
 *             from another thread; record, query, wait, copy, fill or a question about a capture
 *             outside enter, or inside another device's; a copy or fill of addresses that are not mapped with access; a stream that
 *             waits while it captures, or for an event of a capture; copy, fill or stream wait on the
 *             legacy stream beside a blocking capture; launch of a destroyed graph, or of one whose
 *             addresses are not mapped with access; any call in a forked child;
 *             unbalanced enter and leave; destroying an event twice. A call that may block under a
 *             growpool lock is reported by the witness of lock.h instead.
 *             Where the real driver returns an error instead of crashing the call also returns that
 *             error, so error paths can be seen with the handler set to counting.
 * WORK        completes in order on each stream, only through gp__sim_complete*(), or, in
 *             GP__SIM_WAIT_COMPLETES mode, when growpool waits for an event that needs it. Copies and
 *             fills are work; addresses outside of the device's (host memory) are not looked at. A
 *             wait in a stream completes when its event has.
 * GRAPHS      what is enqueued while a stream captures becomes part of a graph; each launch of the
 *             graph is one item of work on all of its addresses. gone() of capture_keep runs once, on
 *             the thread whose call let the graph go and never under the simulator's lock: when the
 *             graph was destroyed and no launch of it is pending, when an invalidated capture ends, or
 *             when a stream that began a capture is destroyed. Not for graphs that are left when the
 *             simulator is destroyed.
 * FAULTS      the n-th table call from now fails, once or for ever, with a status that is legal for
 *             that call. enter, leave, event_destroy and the pure queries that cannot fail on hardware
 *             (stream_capturing, event_query) are counted and made to fail as well where their
 *             signature allows it.
 *
 * Thread safe under one lock of rank GP__RANK_DRIVER. Calls and outcomes are logged for golden order.
 */
#ifndef GP__SIM_H
#define GP__SIM_H

#include "backing/driver.h"

typedef struct gp__sim gp__sim;

struct gp__sim_options {
    int ordinal;
    size_t granularity; /* 0: 2 MiB */
    size_t memory_bytes; /* 0: 64 GiB; create beyond it is OUT_OF_MEMORY */
    size_t address_bytes; /* 0: 1 TiB in all; reserve beyond it is ADDRESS_SPACE */
    size_t largest_reserve; /* 0: no bound on one reservation */
};

/* NULL options: all defaults. NULL when out of host memory. Uses plain calloc, not gp__calloc, so that
 * the heap's fault injector never hits the simulator itself. */
gp__sim *gp__sim_create(const struct gp__sim_options *options);
/* Every pool on it must be closed. Leftovers in the ledger are for the test to assert before. */
void gp__sim_destroy(gp__sim *sim);
gp_device *gp__sim_device(gp__sim *sim);
gp__sim *gp__sim_of(gp_device *device);
/* Registers an opener so that gp_device_open(GP_DEVICE_SIM, n) makes and keeps one with defaults, but for
 * 16 TiB of addresses: many pools share it. */
void gp__sim_register(void);

/* Runs first in each table call, on the thread that calls, with the call's name ("create", "event_record"): a
 * test may stop the thread there. If the call may block, no growpool lock is held. A text that it returns is
 * reported as a violation of that call. One for the process, set while no device is in use; NULL: none. */
typedef const char *(*gp__sim_call_hook)(gp__sim *sim, const char *call, bool may_block);
void gp__sim_on_call(gp__sim_call_hook hook);
/* The device whose context is current on the calling thread, through enter(); NULL: none. */
gp__sim *gp__sim_current(void);

typedef void (*gp__sim_violation_handler)(void *context, const char *message);
/* NULL restores the default: print the message, the last 20 log lines, and abort. */
void gp__sim_on_violation(gp__sim *sim, gp__sim_violation_handler handler, void *context);
/* Prints the latest 20 calls to stderr, as the default handler does before it aborts. */
void gp__sim_print_latest(const gp__sim *sim);
uint64_t gp__sim_violations(const gp__sim *sim);
void gp__sim_forget_violations(gp__sim *sim);
/* The latest violation's message, or "". */
const char *gp__sim_violation_text(const gp__sim *sim);

/* -- streams and work -- */
enum {
    GP__SIM_STREAM_BLOCKING = 1
}; /* synchronises with the legacy stream, as CuPy's default kind */
uintptr_t gp__sim_stream_create(gp__sim *sim, unsigned flags);
/* The handle is handed out again by the next create: ids are what tells streams apart. Pending work
 * still completes. */
void gp__sim_stream_destroy(gp__sim *sim, uintptr_t handle);
/* Enqueues work that reads and writes [va, va + bytes). Handle 0, 1: legacy; 2: this thread's. */
void gp__sim_launch(gp__sim *sim, uintptr_t handle, uintptr_t va, size_t bytes);
/* Completes the oldest `count` items (work, event records or waits) of the stream, up to a wait whose
 * event has not completed; returns how many. */
size_t gp__sim_complete(gp__sim *sim, uintptr_t handle, size_t count);
void gp__sim_complete_all(gp__sim *sim);
size_t gp__sim_pending(const gp__sim *sim, uintptr_t handle);
size_t gp__sim_pending_all(const gp__sim *sim);
/* The same without records of events and waits for them: growpool may fence whatever it likes. */
size_t gp__sim_work_all(const gp__sim *sim);
/* True when pending work touches [va, va + bytes) on any stream but the one with id `except_id` (0: any
 * stream at all): memory that may not be handed to that stream yet. */
bool gp__sim_busy(const gp__sim *sim, uintptr_t va, size_t bytes, uint64_t except_id);
/* The id behind a handle now; 0 for a handle that is no stream. Handle 2: this thread's. */
uint64_t gp__sim_stream_id(gp__sim *sim, uintptr_t handle);

enum gp__sim_wait_mode {
    GP__SIM_WAIT_COMPLETES, /* the default: a wait lets the device run just far enough */
    GP__SIM_WAIT_TIMES_OUT, /* a wait returns GP_NOT_READY at once; the test completes work itself */
    GP__SIM_QUERY_COMPLETES /* a query does what a wait does: a device that is always done at once */
};
void gp__sim_set_wait_mode(gp__sim *sim, enum gp__sim_wait_mode mode);

enum gp__sim_capture_mode {
    GP__SIM_CAPTURE_GLOBAL,
    GP__SIM_CAPTURE_THREAD_LOCAL,
    GP__SIM_CAPTURE_RELAXED
};
void gp__sim_capture_begin(gp__sim *sim, uintptr_t handle, enum gp__sim_capture_mode mode);
/* Makes the stream part of the capture that of_handle is part of. */
void gp__sim_capture_join(gp__sim *sim, uintptr_t handle, uintptr_t of_handle);
/* True when the capture is still valid. The graph is destroyed at once. */
bool gp__sim_capture_end(gp__sim *sim, uintptr_t handle);

/* A captured graph, with the executables made of it. */
typedef struct gp__sim_graph gp__sim_graph;
/* Ends the capture on the stream where it began, and for all that joined it as if they had been
 * joined back. The graph, for gp__sim_graph_destroy(); NULL when the capture was invalidated. */
gp__sim_graph *gp__sim_capture_end_graph(gp__sim *sim, uintptr_t handle);
/* Enqueues one item that touches every address in the graph. */
void gp__sim_graph_launch(gp__sim *sim, gp__sim_graph *graph, uintptr_t handle);
/* Pending launches still run. */
void gp__sim_graph_destroy(gp__sim *sim, gp__sim_graph *graph);
/* True when a capture under way, or a graph that can still run, touches [va, va + bytes); the capture that
 * the stream `except_handle` is part of does not count. */
bool gp__sim_in_graph(const gp__sim *sim, uintptr_t va, size_t bytes, uintptr_t except_handle);
/* True when every address in such captures and graphs is mapped with access: they could run now. */
bool gp__sim_graphs_are_mapped(const gp__sim *sim);
/* -- sharing (sim_share.c): set before the device makes its first such chunk -- */
void gp__sim_set_sharing(gp__sim *sim, bool supported); /* on at creation */
enum gp__sim_rdma {
    GP__SIM_RDMA_WORKS, /* at creation */
    GP__SIM_RDMA_ABSENT, /* the device does not claim it */
    GP__SIM_RDMA_NO_CREATE, /* it does, and create fails with it */
    GP__SIM_RDMA_SMALL_ONLY, /* only the first create succeeds */
    GP__SIM_RDMA_NO_ACCESS /* set access fails with UNKNOWN, as seen on real systems */
};
void gp__sim_set_rdma(gp__sim *sim, enum gp__sim_rdma rdma);
/* Whether other devices can reach this one's memory; true at creation. */
void gp__sim_set_peers(gp__sim *sim, bool reachable);
/* Like gp__sim_launch(): work on a stream of `sim`, but done by the device `from`, which needs access of
 * its own to the addresses. */
void gp__sim_launch_from(gp__sim *sim, const gp_device *from, uintptr_t handle, uintptr_t va,
                         size_t bytes);

/* A sticky error: streams can no longer be resolved, pending work is gone, nothing captures, and events
 * have passed, those recorded later too. Memory calls go on working. */
void gp__sim_kill_context(gp__sim *sim);

/* -- faults -- */
/* fail_at 1 is the next call; 0 switches faults off. Resets the counter of gp__sim_fault_calls(). */
void gp__sim_fail_at(gp__sim *sim, uint64_t fail_at, bool forever);
/* A second single fault, counted from the moment the first one fires (1 is the next call after it). */
void gp__sim_then_fail_at(gp__sim *sim, uint64_t fail_at);
/* Table calls counted since gp__sim_fail_at(); and how many of them were made to fail. */
uint64_t gp__sim_fault_calls(const gp__sim *sim);
uint64_t gp__sim_faults_fired(const gp__sim *sim);
/* What a failed create reports: GP_ERR_OUT_OF_MEMORY (the default) or GP_ERR_DRIVER. Likewise reserve:
 * GP_ERR_ADDRESS_SPACE (the default) or GP_ERR_DRIVER. */
void gp__sim_fault_as_driver_error(gp__sim *sim, bool enabled);
/* The name of the table call that the last fault hit, such as "set_access", or "". */
const char *gp__sim_fault_name(const gp__sim *sim);
/* Like running out of device memory at will: create fails from this many bytes in use on. */
void gp__sim_set_memory(gp__sim *sim, size_t memory_bytes);

/* -- ledger -- */
struct gp__sim_ledger {
    size_t reservation_count, reserved_bytes;
    size_t chunk_count, physical_bytes; /* unreleased or mapped */
    size_t unreleased_count;
    size_t mapping_count, mapped_bytes;
    size_t event_count;
    size_t keep_count; /* capture_keep() calls whose gone() did not run yet */
    size_t entered; /* enter() without leave(), all threads */
    uint64_t calls; /* table calls in all */
};
void gp__sim_get_ledger(const gp__sim *sim, struct gp__sim_ledger *out);
/* True when [va, va + bytes) is mapped with access throughout. */
bool gp__sim_is_accessible(const gp__sim *sim, uintptr_t va, size_t bytes);

/* -- log: one line for each table call, oldest first: "map va=0x... bytes=2097152 memory=7 -> ok" -- */
size_t gp__sim_log_count(const gp__sim *sim);
const char *gp__sim_log_line(const gp__sim *sim, size_t index);
void gp__sim_log_clear(gp__sim *sim);
void gp__sim_log_enable(gp__sim *sim, bool enabled); /* on at creation */
/* Describes no call any more, violations by their name only: half the time, for runs that can be repeated
 * with words. */
void gp__sim_set_quiet(gp__sim *sim, bool quiet);

#endif
