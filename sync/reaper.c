/* SPDX-License-Identifier: Apache-2.0
 *
 * The reaper's thread and its list of clients. It knows neither pools nor streams: only functions, and
 * when to call them.
 */
#include "reaper.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>

#include "../backing/driver.h"
#include "../backing/lock.h"

#define IDLE_LOOK_NS UINT64_C(5000000) /* a client that was removed tells nobody */

static struct gp__mutex lock = GP__MUTEX_INIT(GP__RANK_REAPER);
static pthread_cond_t changed;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct gp__reaper_client *clients;
static struct gp__reaper_client *current; /* the one being called */
static bool started, stopping, ended;
static _Thread_local bool is_self;

static void init_once(void)
{
    gp__condition_init(&changed);
}

static struct gp__reaper_client *earliest(void)
{
    struct gp__reaper_client *best = NULL;
    for (struct gp__reaper_client *client = clients; client != NULL; client = client->next) {
        if (client->due != UINT64_MAX && (best == NULL || client->due < best->due))
            best = client;
    }
    return best;
}

static void unlist(struct gp__reaper_client *client)
{
    struct gp__reaper_client **link = &clients;
    while (*link != NULL && *link != client)
        link = &(*link)->next;
    if (*link != NULL)
        *link = client->next;
    client->listed = false;
    client->due = UINT64_MAX;
}

/* Calls one client with the lock dropped. A client that removed itself inside its call may be gone
 * afterwards, so `current` (cleared by the removal) says whether it can be touched. */
static void call(struct gp__reaper_client *client)
{
    current = client;
    client->due = UINT64_MAX;
    gp__mutex_unlock(&lock);
    uint64_t delay = client->function(client->context);
    gp__mutex_lock(&lock);
    if (current == client) {
        client->watches = delay >= GP__REAPER_WATCH_NS;
        uint64_t due = delay == UINT64_MAX ? UINT64_MAX : gp__monotonic_ns() + delay;
        if (due < client->due)
            client->due = due;
    }
    current = NULL;
    gp__condition_broadcast(&changed);
}

static void *run(void *unused)
{
    (void)unused;
    is_self = true;
    gp__mutex_lock(&lock);
    while (!stopping) {
        struct gp__reaper_client *client = earliest();
        uint64_t now = gp__monotonic_ns();
        if (client == NULL)
            gp__condition_wait(&changed, &lock, UINT64_C(3600000000000));
        else if (client->due > now)
            gp__condition_wait(&changed, &lock, client->due - now);
        else
            call(client);
        if (gp__fork_generation() != 0)
            return NULL; /* the client forked: in the child this is the only thread */
    }
    ended = true;
    gp__condition_broadcast(&changed);
    gp__mutex_unlock(&lock);
    return NULL;
}

/* Signals belong to the program's own threads. lock: held. */
static bool start_thread(void)
{
    sigset_t all, before;
    pthread_t thread;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool ok = pthread_create(&thread, &attributes, run, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return ok;
}

/* False in a forked child, which inherits the list but not the thread, and has nothing to deliver. */
static bool enter(void)
{
    gp__note_use();
    if (gp__fork_generation() != 0)
        return false;
    pthread_once(&once, init_once);
    return true;
}

/* lock: held. */
static void kick(struct gp__reaper_client *client)
{
    bool own_call = is_self && current == client; /* what it returns says when to come again */
    if (!stopping && !client->removed && !own_call) {
        if (!client->listed) {
            client->next = clients;
            clients = client;
            client->listed = true;
        }
        client->due = 0;
        client->watches = false;
        if (!started)
            started = start_thread();
        gp__condition_broadcast(&changed);
    }
}

void gp__reaper_kick(struct gp__reaper_client *client)
{
    if (!enter())
        return;
    gp__mutex_lock(&lock);
    kick(client);
    gp__mutex_unlock(&lock);
}

void gp__reaper_hand_over(struct gp__reaper_client *client, bool *flag)
{
    if (!enter())
        return;
    gp__mutex_lock(&lock);
    __atomic_store_n(flag, true, __ATOMIC_RELEASE);
    kick(client);
    gp__mutex_unlock(&lock);
}

void gp__reaper_remove(struct gp__reaper_client *client)
{
    if (!enter())
        return;
    gp__mutex_lock(&lock);
    client->removed = true;
    if (client->listed)
        unlist(client);
    if (is_self && current == client)
        current = NULL;
    while (current == client)
        gp__condition_wait(&changed, &lock, UINT64_C(100000000));
    gp__mutex_unlock(&lock);
}

/* Has those that watch called at once. lock: held. */
static void look_once_more(void)
{
    for (struct gp__reaper_client *client = clients; client != NULL; client = client->next) {
        if (client->due != UINT64_MAX && client->watches) {
            client->due = 0;
            client->watches = false;
        }
    }
    gp__condition_broadcast(&changed);
}

/* lock: held. */
static bool is_busy(void)
{
    bool busy = current != NULL;
    for (const struct gp__reaper_client *client = clients; client != NULL; client = client->next)
        busy = busy || (client->due != UINT64_MAX && !client->watches);
    return busy;
}

bool gp__reaper_stop(uint64_t timeout_ns)
{
    if (!enter())
        return true;
    uint64_t start = gp__monotonic_ns();
    uint64_t deadline = timeout_ns > UINT64_MAX - start ? UINT64_MAX : start + timeout_ns;
    gp__mutex_lock(&lock);
    uint64_t now = start;
    look_once_more();
    while (started && !ended && is_busy() && now < deadline) {
        uint64_t left = deadline - now;
        gp__condition_wait(&changed, &lock, left < IDLE_LOOK_NS ? left : IDLE_LOOK_NS);
        now = gp__monotonic_ns();
    }
    stopping = true;
    gp__condition_broadcast(&changed);
    while (started && !ended && (now = gp__monotonic_ns()) < deadline)
        gp__condition_wait(&changed, &lock, deadline - now);
    bool stopped = !started || ended;
    gp__mutex_unlock(&lock);
    return stopped;
}
