/* SPDX-License-Identifier: Apache-2.0
 *
 * What Python tests see of the simulated device's calls: a thread can be stopped inside one, and a call that
 * may block and is made with the interpreter held is a violation. In test builds alone.
 */
#include "sim.h"

#ifdef GROWPOOL_TESTING

#include <pthread.h>
#include <time.h>

#include "../../tests/support/sim.h"

#define LONGEST_STOP_S 20 /* a test that forgot the thread fails, and does not hang */

/* The one stop that is armed. Guarded by `lock`, which is held for moments only. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static gp__sim *stop_on; /* NULL: nothing is armed */
static char stop_call[32];
static bool is_stopped;
static bool timed_out;

/* lock: held. */
static void stand_still(void)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += LONGEST_STOP_S;
    is_stopped = true;
    while (is_stopped && !timed_out)
        timed_out = pthread_cond_timedwait(&changed, &lock, &end) != 0;
    is_stopped = false;
}

static const char *before_call(gp__sim *sim, const char *call, bool may_block)
{
    const bool attached = py_is_attached();
    pthread_mutex_lock(&lock);
    if (stop_on == sim && strcmp(stop_call, call) == 0) {
        stop_on = NULL;
        stand_still();
    }
    pthread_mutex_unlock(&lock);
    return may_block && attached ? "may block, and the interpreter is held" : NULL;
}

void ext_sim_stop_at(struct gp__sim *sim, const char *call)
{
    pthread_mutex_lock(&lock);
    PyOS_snprintf(stop_call, sizeof(stop_call), "%s", call);
    stop_on = sim;
    is_stopped = timed_out = false;
    pthread_mutex_unlock(&lock);
}

bool ext_sim_is_stopped(void)
{
    pthread_mutex_lock(&lock);
    bool stopped = is_stopped;
    pthread_mutex_unlock(&lock);
    return stopped;
}

bool ext_sim_go_on(void)
{
    pthread_mutex_lock(&lock);
    bool stopped = is_stopped;
    is_stopped = false;
    stop_on = NULL;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return stopped;
}

void ext_sim_watch_blocking_calls(void)
{
    gp__sim_on_call(before_call);
}

#endif
