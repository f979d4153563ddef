/* SPDX-License-Identifier: Apache-2.0
 *
 * gp_stream as an object: references and getters; and what is known of the calling thread. What a stream
 * means is in timeline.c.
 */
#include "timeline.h"

#include "../backing/memory.h"

gp_stream *gp_stream_retain(gp_stream *stream)
{
    __atomic_add_fetch(&stream->references, 1, __ATOMIC_RELAXED);
    return stream;
}

void gp_stream_release(gp_stream *stream)
{
    if (stream != NULL && __atomic_sub_fetch(&stream->references, 1, __ATOMIC_ACQ_REL) == 0) {
        if (stream->attached != NULL)
            stream->attached->drop(stream->attached);
        gp__free(stream);
    }
}

uintptr_t gp_stream_handle(const gp_stream *stream)
{
    return stream->key.handle;
}

uint64_t gp_stream_id(const gp_stream *stream)
{
    return __atomic_load_n(&stream->key.id, __ATOMIC_RELAXED);
}

static _Thread_local bool has_stream;

void gp__thread_gets_stream(void)
{
    has_stream = true;
}

bool gp__thread_has_stream(void)
{
    return has_stream;
}

uint64_t gp__thread_id(void)
{
    static uint64_t threads;
    static _Thread_local uint64_t mine;
    if (mine == 0)
        mine = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
    return mine;
}
