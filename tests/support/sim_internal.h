/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the simulated driver: its ledger and the frame around each table call. Only sim*.c include
 * this file; tests see sim.h.
 */
#ifndef GP__SIM_INTERNAL_H
#define GP__SIM_INTERNAL_H

#include "sim.h"

#include <sys/types.h>

#include "../../backing/lock.h"

#define GP__SIM_LINE       192 /* bytes of a log line, its end included */
#define GP__SIM_RING       32 /* latest lines kept for a violation's report, even with the log off */
#define GP__SIM_MESSAGE    320
#define GP__SIM_BASE_VA    UINT64_C(0x700000000000) /* made-up addresses: nothing is ever there */
#define GP__SIM_CONTEXT    UINT64_C(0x51300000)
#define GP__SIM_LEGACY_ID  1
#define GP__SIM_MOST_PEERS 8

/* The driver's numbers for its errors, as in cuda.h. */
enum gp__sim_code {
    GP__SIM_SUCCESS = 0,
    GP__SIM_INVALID_VALUE = 1,
    GP__SIM_OUT_OF_MEMORY = 2,
    GP__SIM_NOT_INITIALIZED = 3,
    GP__SIM_INVALID_HANDLE = 400,
    GP__SIM_NOT_READY = 600,
    GP__SIM_ILLEGAL_ADDRESS = 700,
    GP__SIM_NOT_SUPPORTED = 801,
    GP__SIM_CAPTURE_UNSUPPORTED = 900,
    GP__SIM_CAPTURE_INVALIDATED = 901,
    GP__SIM_CAPTURE_ISOLATION = 905,
    GP__SIM_CAPTURE_IMPLICIT = 906,
    GP__SIM_CAPTURED_EVENT = 907,
    GP__SIM_UNKNOWN = 999
};

struct gp__sim_reservation {
    uintptr_t va;
    size_t bytes;
};

struct gp__sim_memory {
    gp__memory handle; /* counts up, never reused: a released handle can be told from a live one */
    size_t bytes;
    gp_location location;
    bool unreleased;
    unsigned mappings;
    unsigned flags; /* GP_CHUNK_* */
    bool imported; /* its true size is `bytes`, whatever the importer was told */
    uint64_t shared; /* one number for all handles of one exported memory; 0: never exported */
};

struct gp__sim_mapping {
    uintptr_t va;
    size_t bytes;
    gp__memory memory;
    bool accessible;
    unsigned peer_count; /* with access too */
    const gp_device *peers[GP__SIM_MOST_PEERS];
};

struct gp__sim_range {
    uintptr_t va;
    size_t bytes; /* 0: none */
    const gp_device *from; /* the peer that does the work; NULL: the device itself */
};

/* One entry of a stream's queue: work on addresses, a graph, the record of an event, or a wait. */
struct gp__sim_item {
    struct gp__sim_item *next;
    gp__event *event; /* NULL: no record, or of an event destroyed meanwhile */
    uint64_t record; /* the number of the record; 0: none */
    uint64_t waits_for; /* the number of a record that completes first; 0: none */
    struct gp__sim_graph *graph; /* a launch of it: its addresses count, and not those below */
    struct gp__sim_range ranges[2];
};

/* Somebody to be told when a graph is gone. */
struct gp__sim_keep {
    void (*gone)(void *context);
    void *context;
    struct gp__sim_keep *next;
};

/* A capture, and after its valid end the graph with all its executables. Kept until the simulator
 * ends, to catch a use after its end. */
struct gp__sim_graph {
    uint64_t id; /* of the capture; counts up from 1 */
    bool capturing;
    bool valid;
    bool destroyed; /* or never made, since the capture was invalidated */
    enum gp__sim_capture_mode mode;
    uint64_t thread;
    const struct gp__sim_stream *origin; /* the stream it began on */
    struct gp__sim_range *ranges; /* what a launch touches */
    size_t range_count, range_room;
    size_t launches; /* in a queue */
    struct gp__sim_keep *keeps;
    struct gp__sim_graph *next;
};

struct gp__sim_stream {
    uintptr_t handle;
    uint64_t id;
    unsigned flags;
    bool live; /* false once destroyed; its queue may still hold work */
    uint64_t thread; /* owner of a per-thread default stream; 0 for the others */
    struct gp__sim_graph *capture; /* what it is part of; NULL: none */
    struct gp__sim_item *first, *last;
    size_t pending;
    struct gp__sim_stream *next;
};

struct gp__event {
    uint64_t record; /* number of the latest record; queue items of earlier ones no longer matter */
    size_t outstanding; /* items of the latest record that have not completed */
    bool captured; /* recorded into a capture: it can never be queried */
    bool destroyed; /* kept until the simulator ends, to catch a second destroy */
    struct gp__event *next;
};

struct gp__sim_faults {
    uint64_t calls;
    uint64_t fail_at;
    uint64_t then_at;
    uint64_t second_at;
    uint64_t fired;
    bool forever;
    bool as_driver_error;
    const char *name;
};

struct gp__sim {
    gp_device device;
    struct gp__mutex mutex; /* guards everything below */
    struct gp__sim_options options;
    pid_t process;

    struct gp__sim_reservation *reservations; /* by address */
    size_t reservation_count, reservation_room;
    size_t reserved_bytes;
    struct gp__sim_memory *memories; /* by handle; those unreleased or mapped */
    size_t memory_count, memory_room;
    gp__memory next_memory;
    size_t physical_bytes, unreleased_count;
    struct gp__sim_mapping *mappings; /* by address */
    size_t mapping_count, mapping_room;
    size_t mapped_bytes;
    enum gp__sim_rdma rdma;
    bool rdma_created; /* GP__SIM_RDMA_SMALL_ONLY: the one that succeeds was */
    bool out_of_reach; /* of every other device */

    struct gp__sim_stream *streams;
    uint64_t next_id;
    uintptr_t *free_handles; /* the next create takes the last one */
    size_t free_handle_count, free_handle_room;
    uintptr_t next_handle;
    gp__event *events;
    size_t event_count;
    uint64_t record_count; /* of all events: numbers records */
    struct gp__sim_graph *graphs;
    uint64_t capture_count; /* numbers captures */
    size_t keep_count; /* user objects not destroyed yet */
    struct gp__sim_keep *gone; /* to be told as soon as the lock is dropped */
    enum gp__sim_wait_mode wait_mode;
    bool dead; /* sticky error */
    size_t entered;
    uint64_t calls;

    struct gp__sim_faults faults;

    gp__sim_violation_handler handler;
    void *handler_context;
    uint64_t violations;
    char violation[GP__SIM_MESSAGE];

    bool quiet;
    bool log_enabled;
    char (*log)[GP__SIM_LINE];
    size_t log_count, log_room;
    char ring[GP__SIM_RING][GP__SIM_LINE];
    uint64_t ring_count;
};

/* What is fixed about a table call: its name, whether it may block, and how an injected fault of it
 * looks. fault_status GP_OK: it cannot fail. */
struct gp__sim_kind {
    const char *name;
    bool may_block;
    gp_status fault_status;
    int fault_code;
};

/* The frame around one call. A violation found inside is reported after the lock is dropped, so that
 * a handler may leave by longjmp and may use the simulator. */
struct gp__sim_call {
    gp__sim *sim;
    const struct gp__sim_kind *kind; /* NULL: a test's own call (launch, complete...) */
    gp_error *error;
    bool forked;
    bool fault;
    bool violated;
    char text[GP__SIM_LINE];
    char violation[GP__SIM_MESSAGE];
};

/* Opens the frame: takes the lock, counts the call. False when a fault or a fork decided its outcome;
 * then `return gp__sim_decided(call)`. */
bool gp__sim_begin(struct gp__sim_call *call, gp__sim *sim, const struct gp__sim_kind *kind,
                   gp_error *error, const char *format, ...) __attribute__((format(printf, 5, 6)));
gp_status gp__sim_decided(struct gp__sim_call *call);
/* Notes a violation of this call; the first one is the one reported. */
void gp__sim_violate(struct gp__sim_call *call, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Adds to the line that will be logged for the call. */
void gp__sim_note(struct gp__sim_call *call, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Closes the frame: logs, drops the lock, tells whose graphs are gone, fills the error, reports the
 * violation. */
gp_status gp__sim_end(struct gp__sim_call *call, gp_status status, int code, uintptr_t va,
                      size_t size);
static inline gp_status gp__sim_end_ok(struct gp__sim_call *call)
{
    return gp__sim_end(call, GP_OK, GP__SIM_SUCCESS, 0, 0);
}

/* sim_fault.c. lock: held. */
bool gp__sim_take_fault(gp__sim *sim, const struct gp__sim_kind *kind);
/* sim_log.c. lock: held. */
void gp__sim_log(gp__sim *sim, const char *line, bool table_call);

/* Grows an array to hold one more entry; ends the process when the host has no memory. */
void *gp__sim_room(void *array, size_t count, size_t *room, size_t entry);
void *gp__sim_calloc(size_t bytes);
/* A number for the calling thread, never 0, never reused. */
uint64_t gp__sim_thread(void);
/* True between enter and leave on this thread. */
bool gp__sim_thread_is_relaxed(void);

/* sim_stream.c. lock: held. */
struct gp__sim_stream *gp__sim_find(gp__sim *sim, uintptr_t handle);
struct gp__sim_stream *gp__sim_find_id(gp__sim *sim, uint64_t id);
/* True for a handle whose stream, or the latest of them, was destroyed. */
bool gp__sim_was_destroyed(const gp__sim *sim, uintptr_t handle);
void gp__sim_push(struct gp__sim_stream *stream, const struct gp__sim_item *item);
/* Completes the first item. Precondition: it does not wait. */
void gp__sim_pop(struct gp__sim_call *call, struct gp__sim_stream *stream);
/* Takes the first item out unseen: nothing runs any more. */
void gp__sim_drop(gp__sim *sim, struct gp__sim_stream *stream);
/* True when the stream's first item waits for a record that has not completed. */
bool gp__sim_is_blocked(const gp__sim *sim, const struct gp__sim_stream *stream);
bool gp__sim_holds_record(const struct gp__sim_stream *stream, uint64_t record);
/* Pending work that touches these addresses, or NULL. */
const struct gp__sim_range *gp__sim_overlap(const gp__sim *sim, uintptr_t va, size_t bytes,
                                            uint64_t except_id, uint64_t *stream_id);
/* sim_event.c. lock: held. */
void gp__sim_require_entered(struct gp__sim_call *call);
/* True when the event may be used; otherwise notes the violation. */
bool gp__sim_check_event(struct gp__sim_call *call, const gp__event *event);
/* Notes what is wrong with enqueueing on this stream (NULL: destroyed), apart from captures. */
void gp__sim_check_stream(struct gp__sim_call *call, const struct gp__sim_stream *stream,
                          const struct gp__stream_key *key);
/* sim_graph.c. lock: held. */
bool gp__sim_is_implicit(const gp__sim *sim, const struct gp__sim_stream *stream);
/* True for the legacy stream beside a blocking capture: notes the violation and ends the capture. */
bool gp__sim_hits_implicit(struct gp__sim_call *call, const struct gp__sim_stream *stream);
/* Ends every capture that a query by this thread would end; always, with `in_any_mode`. True when
 * there was one. */
bool gp__sim_invalidate(gp__sim *sim, bool in_any_mode);
/* The stream leaves its capture, which ends when the stream began it, and else is invalid. */
void gp__sim_leave_capture(gp__sim *sim, struct gp__sim_stream *stream);
void gp__sim_add_range(struct gp__sim_graph *graph, const struct gp__sim_range *range);
/* A launch completed, or will never run. */
void gp__sim_launch_ended(gp__sim *sim, struct gp__sim_graph *graph);
void gp__sim_free_graphs(gp__sim *sim);
/* The list to pass to gp__sim_tell_gone() once the lock is dropped. */
struct gp__sim_keep *gp__sim_take_gone(gp__sim *sim);
/* lock: not held. */
void gp__sim_tell_gone(struct gp__sim_keep *gone);
/* sim_memory.c. lock: held. */
bool gp__sim_covered(const gp__sim *sim, uintptr_t va, size_t bytes);
/* The same for work that another device does; NULL: the device itself. */
bool gp__sim_covered_for(const gp__sim *sim, uintptr_t va, size_t bytes, const gp_device *from);
/* NULL, with a violation, for junk, released handles and, but for imported memory, another size. */
struct gp__sim_memory *gp__sim_checked_memory(struct gp__sim_call *call, gp__memory handle,
                                              size_t bytes);
/* Enters memory, with a new handle, which it returns. */
gp__memory gp__sim_add_memory(gp__sim *sim, const struct gp__sim_memory *memory);
/* sim_share.c. lock: held. */
bool gp__sim_may_create(struct gp__sim_call *call, unsigned flags);
bool gp__sim_rdma_fails(const gp__sim *sim, const struct gp__sim_memory *memory);
/* True when another handle in the ledger is of the same physical memory. */
bool gp__sim_shares(const gp__sim *sim, const struct gp__sim_memory *memory);
bool gp__sim_may_grant(struct gp__sim_call *call, const struct gp__peers *peers);
bool gp__sim_may_reach(const struct gp__sim_mapping *mapping, const gp_device *from);

/* The table, from sim_memory.c, sim_stream.c, sim_event.c, sim_work.c and sim_graph.c. */
extern const struct gp__driver gp__sim_driver;

gp_status gp__sim_memory_info(gp_device *device, size_t *free_bytes, size_t *total_bytes,
                              gp_error *error);
gp_status gp__sim_reserve(gp_device *device, size_t bytes, uintptr_t *va, gp_error *error);
gp_status gp__sim_free_address(gp_device *device, uintptr_t va, size_t bytes, gp_error *error);
gp_status gp__sim_create_memory(gp_device *device, size_t bytes, gp_location location,
                                unsigned flags, gp__memory *out, gp_error *error);
gp_status gp__sim_export_fd(gp_device *device, gp__memory memory, size_t bytes, int *fd,
                            gp_error *error);
gp_status gp__sim_import_fd(gp_device *device, int fd, size_t bytes, struct gp__imported *out,
                            gp_error *error);
gp_status gp__sim_can_access(gp_device *device, gp_device *peer, bool *can, gp_error *error);
gp_status gp__sim_release(gp_device *device, gp__memory memory, size_t bytes, gp_error *error);
gp_status gp__sim_map(gp_device *device, uintptr_t va, size_t bytes, gp__memory memory,
                      gp_error *error);
gp_status gp__sim_set_access(gp_device *device, uintptr_t va, size_t bytes, gp_location location,
                             const struct gp__peers *peers, gp_error *error);
gp_status gp__sim_unmap(gp_device *device, uintptr_t va, size_t bytes, gp__memory memory,
                        gp_error *error);
gp_status gp__sim_stream_resolve(gp_device *device, uintptr_t handle, struct gp__stream_key *out,
                                 gp_error *error);
gp_status gp__sim_stream_confirm(gp_device *device, const struct gp__stream_key *key);
gp_status gp__sim_stream_capturing(gp_device *device, const struct gp__stream_key *key,
                                   bool *capturing, gp_error *error);
gp_status gp__sim_event_create(gp_device *device, uintptr_t context, gp__event **out,
                               gp_error *error);
void gp__sim_event_destroy(gp_device *device, gp__event *event);
gp_status gp__sim_event_record(gp_device *device, gp__event *event,
                               const struct gp__stream_key *key, gp_error *error);
gp_status gp__sim_event_record_context(gp_device *device, gp__event *event, gp_error *error);
gp_status gp__sim_event_query(gp_device *device, gp__event *event, gp_error *error);
gp_status gp__sim_event_wait(gp_device *device, gp__event *event, uint64_t timeout_ns,
                             gp_error *error);
gp_status gp__sim_copy(gp_device *device, uintptr_t to, uintptr_t from, size_t bytes,
                       const struct gp__stream_key *key, gp_error *error);
gp_status gp__sim_fill(gp_device *device, uintptr_t va, size_t bytes, unsigned char value,
                       const struct gp__stream_key *key, gp_error *error);
gp_status gp__sim_stream_wait(gp_device *device, const struct gp__stream_key *key, gp__event *event,
                              gp_error *error);
gp_status gp__sim_capture_id(gp_device *device, const struct gp__stream_key *key, uint64_t *id,
                             gp_error *error);
gp_status gp__sim_capture_keep(gp_device *device, const struct gp__stream_key *key,
                               void (*gone)(void *context), void *context, gp_error *error);
gp_status gp__sim_enter(gp_device *device, struct gp__entry *entry, gp_error *error);
void gp__sim_leave(gp_device *device, const struct gp__entry *entry);

#endif
