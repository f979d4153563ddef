/* SPDX-License-Identifier: Apache-2.0
 *
 * Host streams and the host device's fences. A stream is a worker thread with a queue and two
 * counters, submitted and completed; a fence is a number that `completed` has to reach. It never
 * touches memory that a pool owns.
 *
 * A stream's state is shared: the user's handle, the worker and every fence hold a reference. The
 * worker takes the state out of the list of live streams when it is closed and drained.
 */
#include "host_stream.h"
#include "backing_internal.h"
#include "host_internal.h"
#include "lock.h"
#include "memory.h"

#include <signal.h>
#include <stdatomic.h>
#include <string.h>

struct item {
    void (*function)(void *context);
    void *context;
    struct item *next;
};

struct stream_state {
    uint64_t id;
    _Atomic uint64_t references;
    struct gp__mutex lock; /* guards the queue and `closed`; both counters move under it */
    pthread_cond_t work; /* the queue has an item, or the stream was closed */
    pthread_cond_t done; /* `completed` moved */
    struct item *first;
    struct item *last;
    bool closed;
    pthread_t worker;
    _Atomic uint64_t submitted;
    _Atomic uint64_t completed; /* <= submitted */
    struct stream_state *next; /* live streams; guarded by live_lock */
};

struct gp_host_stream {
    struct stream_state *state;
};

struct target {
    struct stream_state *state; /* a reference */
    uint64_t number; /* passed when completed >= number */
};

/* Passed when every target is: no target, never recorded or nothing to wait for. */
struct gp__event {
    struct target *targets;
    size_t count;
    size_t capacity;
};

static struct gp__mutex live_lock = GP__MUTEX_INIT(GP__RANK_DRIVER);
static struct stream_state *live_streams; /* not closed, or not drained; guarded by live_lock */
static size_t live_count; /* guarded by live_lock */
static _Atomic uint64_t last_id; /* 0 is the calling thread */

/* ---- a stream's state ---------------------------------------------------------------------- */

static void retain_state(struct stream_state *state)
{
    atomic_fetch_add_explicit(&state->references, 1, memory_order_relaxed);
}

static void destroy_state(struct stream_state *state)
{
    (void)pthread_cond_destroy(&state->done);
    (void)pthread_cond_destroy(&state->work);
    gp__mutex_destroy(&state->lock);
    gp__free(state);
}

static void release_state(struct stream_state *state)
{
    if (atomic_fetch_sub_explicit(&state->references, 1, memory_order_acq_rel) == 1) {
        destroy_state(state);
    }
}

static struct stream_state *new_state(void)
{
    struct stream_state *state = gp__calloc(1, sizeof *state);
    if (state == NULL) {
        return NULL;
    }
    state->id = atomic_fetch_add(&last_id, 1) + 1;
    gp__mutex_init(&state->lock, GP__RANK_STREAM);
    gp__condition_init(&state->work);
    gp__condition_init(&state->done);
    atomic_init(&state->submitted, 0);
    atomic_init(&state->completed, 0);
    atomic_init(&state->references, 1);
    return state;
}

static bool has_passed(const struct stream_state *state, uint64_t number)
{
    return atomic_load_explicit(&state->completed, memory_order_acquire) >= number;
}

/* ---- the list of live streams -------------------------------------------------------------- */

static void list_live(struct stream_state *state)
{
    gp__mutex_lock(&live_lock);
    state->next = live_streams;
    live_streams = state;
    live_count++;
    gp__mutex_unlock(&live_lock);
}

static void unlist_live(struct stream_state *state)
{
    gp__mutex_lock(&live_lock);
    struct stream_state **link = &live_streams;
    while (*link != state) {
        link = &(*link)->next;
    }
    *link = state->next;
    live_count--;
    gp__mutex_unlock(&live_lock);
}

/* A reference, or NULL when no live stream has that id. */
static struct stream_state *find_live(uint64_t id)
{
    gp__mutex_lock(&live_lock);
    struct stream_state *state = live_streams;
    while (state != NULL && state->id != id) {
        state = state->next;
    }
    if (state != NULL) {
        retain_state(state);
    }
    gp__mutex_unlock(&live_lock);
    return state;
}

/* ---- the worker --------------------------------------------------------------------------- */

/* The next item, or NULL when the stream is closed and drained. */
static struct item *take_item(struct stream_state *state)
{
    gp__mutex_lock(&state->lock);
    while (state->first == NULL && !state->closed) {
        gp__condition_wait(&state->work, &state->lock, UINT64_MAX);
    }
    struct item *item = state->first;
    if (item != NULL) {
        state->first = item->next;
    }
    gp__mutex_unlock(&state->lock);
    return item;
}

static void count_completed(struct stream_state *state)
{
    gp__mutex_lock(&state->lock);
    atomic_fetch_add_explicit(&state->completed, 1, memory_order_release);
    gp__condition_broadcast(&state->done);
    gp__mutex_unlock(&state->lock);
}

static void *run_worker(void *argument)
{
    struct stream_state *state = argument;
    struct item *item;
    while ((item = take_item(state)) != NULL) {
        item->function(item->context);
        if (gp__host_check_fork(NULL) != GP_OK) {
            return NULL; /* the function forked: in the child this is the only thread */
        }
        gp__free(item);
        count_completed(state);
    }
    unlist_live(state);
    release_state(state);
    return NULL;
}

/* Signals belong to the program's own threads, so a worker has them blocked: all but those that say
 * that the worker itself went wrong, which must reach the program's handlers. */
static void signals_of_worker(sigset_t *blocked)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
    (void)sigfillset(blocked);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        (void)sigdelset(blocked, faults[i]);
    }
}

static int start_worker(struct stream_state *state)
{
    pthread_attr_t attributes;
    int code = pthread_attr_init(&attributes);
    if (code != 0) {
        return code;
    }
    sigset_t blocked;
    sigset_t previous;
    signals_of_worker(&blocked);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)pthread_sigmask(SIG_SETMASK, &blocked, &previous);
    /* The lock is held over the start, so that the worker cannot read `worker` before it is set. */
    gp__mutex_lock(&state->lock);
    code = pthread_create(&state->worker, &attributes, run_worker, state);
    gp__mutex_unlock(&state->lock);
    (void)pthread_sigmask(SIG_SETMASK, &previous, NULL);
    (void)pthread_attr_destroy(&attributes);
    return code;
}

/* ---- gp_host_stream ----------------------------------------------------------------------- */

gp_status gp_host_stream_create(gp_host_stream **out, gp_error *error)
{
    gp_status status = gp__check_process(error);
    if (status != GP_OK) {
        return status;
    }
    gp_host_stream *stream = gp__calloc(1, sizeof *stream);
    if (stream == NULL) {
        goto no_memory;
    }
    stream->state = new_state();
    if (stream->state == NULL) {
        goto free_stream;
    }
    retain_state(stream->state); /* the worker's */
    int code = start_worker(stream->state);
    if (code != 0) {
        goto no_thread;
    }
    /* The worker takes it off the list only after a close, so it is not too late to put it there.
     * */
    list_live(stream->state);
    *out = stream;
    return GP_OK;

no_thread:
    destroy_state(stream->state);
    gp__free(stream);
    return gp__errno_error(error, GP_ERR_DRIVER, "pthread_create", code, 0, 0);
free_stream:
    gp__free(stream);
no_memory:
    return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory to describe a host stream");
}

uint64_t gp_host_stream_id(const gp_host_stream *stream)
{
    return stream->state->id;
}

static bool append_item(struct stream_state *state, struct item *item)
{
    gp__mutex_lock(&state->lock);
    bool open = !state->closed;
    if (open) {
        if (state->first == NULL) {
            state->first = item;
        } else {
            state->last->next = item;
        }
        state->last = item;
        atomic_fetch_add_explicit(&state->submitted, 1, memory_order_release);
        (void)pthread_cond_signal(&state->work);
    }
    gp__mutex_unlock(&state->lock);
    return open;
}

static gp_status closed_stream(uint64_t id, gp_error *error)
{
    return gp__state_error(error, GP_REASON_CLOSED, "host stream %llu is closed: it takes no work",
                           (unsigned long long)id);
}

static gp_status submit_item(struct stream_state *state, void (*function)(void *context),
                             void *context, gp_error *error)
{
    struct item *item = gp__calloc(1, sizeof *item);
    if (item == NULL) {
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory to queue work");
    }
    item->function = function;
    item->context = context;
    if (append_item(state, item)) {
        return GP_OK;
    }
    gp__free(item);
    return closed_stream(state->id, error);
}

gp_status gp_host_stream_submit(gp_host_stream *stream, void (*function)(void *context),
                                void *context, gp_error *error)
{
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    if (function == NULL) {
        return gp_error_set(error, GP_ERR_ARGUMENT, "a host stream needs a function to run");
    }
    return submit_item(stream->state, function, context, error);
}

gp_status gp__host_submit(const struct gp__stream_key *stream, void (*function)(void *context),
                          void *context, gp_error *error)
{
    struct stream_state *state = find_live(stream->id);
    if (state == NULL) {
        return closed_stream(stream->id, error);
    }
    gp_status status = submit_item(state, function, context, error);
    release_state(state);
    return status;
}

void gp_host_stream_close(gp_host_stream *stream)
{
    if (stream == NULL) {
        return;
    }
    /* In a forked child the lock may be held by a thread that does not exist here. */
    if (gp__fork_generation() == 0) {
        struct stream_state *state = stream->state;
        gp__mutex_lock(&state->lock);
        state->closed = true;
        (void)pthread_cond_signal(&state->work);
        gp__mutex_unlock(&state->lock);
        release_state(state);
    }
    gp__free(stream);
}

/* ---- waiting ------------------------------------------------------------------------------ */

static uint64_t deadline_after(uint64_t timeout_ns)
{
    uint64_t now = gp__monotonic_ns();
    return timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
}

/* 0 when it is past; UINT64_MAX stays without end. */
static uint64_t time_left(uint64_t deadline)
{
    if (deadline == UINT64_MAX) {
        return UINT64_MAX;
    }
    uint64_t now = gp__monotonic_ns();
    return now < deadline ? deadline - now : 0;
}

/* Context: may block; no lock held. */
static gp_status wait_for(struct stream_state *state, uint64_t number, uint64_t deadline)
{
    if (has_passed(state, number)) {
        return GP_OK;
    }
    gp__assert_no_lock();
    gp__mutex_lock(&state->lock);
    /* The worker would wait for itself for ever. */
    bool is_worker = pthread_equal(state->worker, pthread_self()) != 0;
    uint64_t left = time_left(deadline);
    while (!has_passed(state, number) && left != 0 && !is_worker) {
        gp__condition_wait(&state->done, &state->lock, left);
        left = time_left(deadline);
    }
    gp__mutex_unlock(&state->lock);
    return has_passed(state, number) ? GP_OK : GP_NOT_READY;
}

gp_status gp_host_stream_wait(gp_host_stream *stream, uint64_t timeout_ns)
{
    gp_status status = gp__host_check_fork(NULL);
    if (status != GP_OK) {
        return status;
    }
    uint64_t number = atomic_load_explicit(&stream->state->submitted, memory_order_acquire);
    return wait_for(stream->state, number, deadline_after(timeout_ns));
}

/* ---- the device table: streams -------------------------------------------------------------- */

gp_status gp__host_stream_resolve(gp_device *device, uintptr_t handle, struct gp__stream_key *out,
                                  gp_error *error)
{
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    if (handle == 0) {
        *out = (struct gp__stream_key){.always_passed = true};
        return GP_OK;
    }
    struct stream_state *state = find_live((uint64_t)handle);
    if (state == NULL) {
        return gp_error_set(error, GP_ERR_ARGUMENT,
                            "%zu is no stream of device %s: it was never made, or it is closed and "
                            "its work is done",
                            (size_t)handle, device->name);
    }
    release_state(state);
    *out = (struct gp__stream_key){.handle = handle, .id = (uint64_t)handle};
    return GP_OK;
}

gp_status gp__host_stream_confirm(gp_device *device, const struct gp__stream_key *stream)
{
    struct gp__stream_key now = {0};
    gp_status status = gp__host_stream_resolve(device, stream->handle, &now, NULL);
    return status == GP_OK && now.id == stream->id ? GP_OK : GP_NOT_READY;
}

gp_status gp__host_stream_capturing(gp_device *device, const struct gp__stream_key *stream,
                                    bool *capturing, gp_error *error)
{
    (void)device;
    (void)stream;
    gp_status status = gp__host_check_fork(error);
    if (status == GP_OK) {
        *capturing = false; /* host streams cannot be captured */
    }
    return status;
}

/* ---- the device table: events --------------------------------------------------------------- */

gp_status gp__host_event_create(gp_device *device, uintptr_t context, gp__event **out,
                                gp_error *error)
{
    (void)device;
    (void)context;
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    gp__event *event = gp__calloc(1, sizeof *event);
    if (event == NULL) {
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory for a fence");
    }
    *out = event;
    return GP_OK;
}

static void drop_targets(gp__event *event)
{
    for (size_t i = 0; i < event->count; i++) {
        release_state(event->targets[i].state);
    }
    event->count = 0;
}

void gp__host_event_destroy(gp_device *device, gp__event *event)
{
    (void)device;
    /* In a forked child the streams' locks cannot be destroyed, so their states stay. */
    if (gp__fork_generation() == 0) {
        drop_targets(event);
    }
    gp__free(event->targets);
    gp__free(event);
}

static gp_status reserve_targets(gp__event *event, size_t count, gp_error *error)
{
    if (count <= event->capacity) {
        return GP_OK;
    }
    struct target *targets = gp__realloc(event->targets, count, sizeof *targets);
    if (targets == NULL) {
        return gp_error_set(error, GP_ERR_HOST_MEMORY, "no host memory for a fence on %zu streams",
                            count);
    }
    event->targets = targets;
    event->capacity = count;
    return GP_OK;
}

gp_status gp__host_event_copy(const gp__event *event, gp__event **out, gp_error *error)
{
    gp__event *copy = NULL;
    gp_status status = gp__host_event_create(NULL, 0, &copy, error);
    if (status != GP_OK) {
        return status;
    }
    status = reserve_targets(copy, event->count, error);
    if (status != GP_OK) {
        gp__free(copy);
        return status;
    }
    for (size_t i = 0; i < event->count; i++) {
        retain_state(event->targets[i].state);
        copy->targets[copy->count++] = event->targets[i];
    }
    *out = copy;
    return GP_OK;
}

/* Takes over the caller's reference. Precondition: there is room. */
static void add_target(gp__event *event, struct stream_state *state)
{
    uint64_t number = atomic_load_explicit(&state->submitted, memory_order_acquire);
    event->targets[event->count++] = (struct target){.state = state, .number = number};
}

gp_status gp__host_event_record(gp_device *device, gp__event *event,
                                const struct gp__stream_key *stream, gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status == GP_OK) {
        status = reserve_targets(event, 1, error);
    }
    if (status != GP_OK) {
        return status;
    }
    /* A stream that is no longer live has no work left, so the fence has passed already. */
    struct stream_state *state = stream->always_passed ? NULL : find_live(stream->id);
    drop_targets(event);
    if (state != NULL) {
        add_target(event, state);
    }
    return GP_OK;
}

/* lock: live_lock held. The old targets stay while the new ones are gathered behind them, so that
 * running out of memory changes nothing. */
static gp_status add_live_targets(gp__event *event, gp_error *error)
{
    gp_status status = reserve_targets(event, event->count + live_count, error);
    if (status != GP_OK) {
        return status;
    }
    for (struct stream_state *state = live_streams; state != NULL; state = state->next) {
        retain_state(state);
        add_target(event, state);
    }
    return GP_OK;
}

gp_status gp__host_event_record_context(gp_device *device, gp__event *event, gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    if (status != GP_OK) {
        return status;
    }
    size_t old_count = event->count;
    gp__mutex_lock(&live_lock);
    status = add_live_targets(event, error);
    gp__mutex_unlock(&live_lock);
    if (status != GP_OK || old_count == 0) {
        return status;
    }
    for (size_t i = 0; i < old_count; i++) {
        release_state(event->targets[i].state);
    }
    event->count -= old_count;
    memmove(event->targets, event->targets + old_count, event->count * sizeof *event->targets);
    return GP_OK;
}

gp_status gp__host_event_query(gp_device *device, gp__event *event, gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    for (size_t i = 0; status == GP_OK && i < event->count; i++) {
        if (!has_passed(event->targets[i].state, event->targets[i].number)) {
            status = GP_NOT_READY;
        }
    }
    return status;
}

gp_status gp__host_event_wait(gp_device *device, gp__event *event, uint64_t timeout_ns,
                              gp_error *error)
{
    (void)device;
    gp_status status = gp__host_check_fork(error);
    uint64_t deadline = deadline_after(timeout_ns);
    for (size_t i = 0; status == GP_OK && i < event->count; i++) {
        status = wait_for(event->targets[i].state, event->targets[i].number, deadline);
    }
    return status;
}
