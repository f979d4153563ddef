/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated driver's fault counter and its log of calls. It decides that a call fails, never how
 * the call looks when it does.
 */
#include "sim_internal.h"

#include <stdio.h>
#include <string.h>

bool gp__sim_take_fault(gp__sim *sim, const struct gp__sim_kind *kind)
{
    struct gp__sim_faults *faults = &sim->faults;
    bool first, second;

    faults->calls++;
    first = faults->fail_at != 0 &&
            (faults->forever ? faults->calls >= faults->fail_at : faults->calls == faults->fail_at);
    second = faults->second_at != 0 && faults->calls == faults->second_at;
    if ((!first && !second) || kind->fault_status == GP_OK)
        return false;
    faults->fired++;
    faults->name = kind->name;
    if (first && faults->then_at != 0 && faults->second_at == 0)
        faults->second_at = faults->calls + faults->then_at;
    return true;
}

void gp__sim_fail_at(gp__sim *sim, uint64_t fail_at, bool forever)
{
    struct gp__sim_faults *faults = &sim->faults;

    gp__mutex_lock(&sim->mutex);
    faults->calls = 0;
    faults->fail_at = fail_at;
    faults->forever = forever;
    faults->then_at = 0;
    faults->second_at = 0;
    faults->fired = 0;
    faults->name = "";
    gp__mutex_unlock(&sim->mutex);
}

void gp__sim_then_fail_at(gp__sim *sim, uint64_t fail_at)
{
    gp__mutex_lock(&sim->mutex);
    sim->faults.then_at = fail_at;
    gp__mutex_unlock(&sim->mutex);
}

void gp__sim_fault_as_driver_error(gp__sim *sim, bool enabled)
{
    gp__mutex_lock(&sim->mutex);
    sim->faults.as_driver_error = enabled;
    gp__mutex_unlock(&sim->mutex);
}

uint64_t gp__sim_fault_calls(const gp__sim *sim)
{
    return sim->faults.calls;
}

uint64_t gp__sim_faults_fired(const gp__sim *sim)
{
    return sim->faults.fired;
}

const char *gp__sim_fault_name(const gp__sim *sim)
{
    return sim->faults.name;
}

void gp__sim_set_memory(gp__sim *sim, size_t memory_bytes)
{
    gp__mutex_lock(&sim->mutex);
    sim->options.memory_bytes = memory_bytes;
    gp__mutex_unlock(&sim->mutex);
}

void gp__sim_log(gp__sim *sim, const char *line, bool table_call)
{
    snprintf(sim->ring[sim->ring_count % GP__SIM_RING], GP__SIM_LINE, "%s", line);
    sim->ring_count++;
    if (!sim->log_enabled || !table_call)
        return;
    sim->log = gp__sim_room(sim->log, sim->log_count, &sim->log_room, sizeof *sim->log);
    snprintf(sim->log[sim->log_count], GP__SIM_LINE, "%s", line);
    sim->log_count++;
}

size_t gp__sim_log_count(const gp__sim *sim)
{
    return sim->log_count;
}

const char *gp__sim_log_line(const gp__sim *sim, size_t index)
{
    return index < sim->log_count ? sim->log[index] : "";
}

void gp__sim_log_clear(gp__sim *sim)
{
    gp__mutex_lock(&sim->mutex);
    sim->log_count = 0;
    gp__mutex_unlock(&sim->mutex);
}

void gp__sim_log_enable(gp__sim *sim, bool enabled)
{
    gp__mutex_lock(&sim->mutex);
    sim->log_enabled = enabled;
    gp__mutex_unlock(&sim->mutex);
}

void gp__sim_set_quiet(gp__sim *sim, bool quiet)
{
    gp__mutex_lock(&sim->mutex);
    sim->quiet = quiet;
    gp__mutex_unlock(&sim->mutex);
}
