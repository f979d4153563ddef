/* SPDX-License-Identifier: Apache-2.0
 *
 * The reaper's functions without its thread: clients are called when fuzz_reaper_turn() says so, on the
 * thread that calls it. It stands in for sync/reaper.c, and its clock for the machine's, so that a run
 * depends on its input alone.
 */
#include "fuzz.h"

#include "sync/reaper.h"

#define NEXT_TURN 1 /* in `due`: not in this turn any more */

uint64_t __wrap_gp__monotonic_ns(void);

static struct gp__reaper_client *clients;
static struct gp__reaper_client *current;

uint64_t __wrap_gp__monotonic_ns(void)
{
    static uint64_t now;

    return now += UINT64_C(1000000);
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

void gp__reaper_kick(struct gp__reaper_client *client)
{
    if (client->removed || current == client)
        return;
    if (!client->listed) {
        client->next = clients;
        clients = client;
        client->listed = true;
        client->due = UINT64_MAX;
    }
    if (client->due == UINT64_MAX)
        client->due = 0;
}

void gp__reaper_hand_over(struct gp__reaper_client *client, bool *flag)
{
    *flag = true;
    gp__reaper_kick(client);
}

void gp__reaper_remove(struct gp__reaper_client *client)
{
    client->removed = true;
    if (client->listed)
        unlist(client);
    if (current == client)
        current = NULL;
}

bool gp__reaper_stop(uint64_t timeout_ns)
{
    (void)timeout_ns;
    return true;
}

static struct gp__reaper_client *next_due(void)
{
    struct gp__reaper_client *client = clients;

    while (client != NULL && client->due != 0)
        client = client->next;
    return client;
}

size_t fuzz_reaper_turn(void)
{
    struct gp__reaper_client *client;
    size_t calls = 0;

    if (current != NULL)
        return 0; /* inside a client's own call */
    while ((client = next_due()) != NULL) {
        uint64_t delay;

        client->due = UINT64_MAX;
        current = client;
        delay = client->function(client->context);
        if (current == client && delay != UINT64_MAX)
            client->due = NEXT_TURN;
        current = NULL;
        calls++;
    }
    for (client = clients; client != NULL; client = client->next)
        if (client->due == NEXT_TURN)
            client->due = 0;
    return calls;
}
