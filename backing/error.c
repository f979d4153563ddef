/* SPDX-License-Identifier: Apache-2.0
 *
 * Fills gp_error. It never decides anything, keeps no error of its own and allocates nothing.
 */
#include "backing_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void fill(gp_error *error, gp_status status, gp_reason reason, const char *format,
                 va_list arguments)
{
    if (error == NULL) {
        return;
    }
    /* Callers may wrap the message that *error holds now, so it is read before it is cleared. */
    char message[sizeof error->message];
    (void)vsnprintf(message, sizeof message, format, arguments);
    memset(error, 0, sizeof *error);
    error->status = status;
    error->reason = reason;
    error->limit = SIZE_MAX;
    memcpy(error->message, message, sizeof message);
}

gp_status gp_error_set(gp_error *error, gp_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fill(error, status, GP_REASON_NONE, format, arguments);
    va_end(arguments);
    return status;
}

gp_status gp__state_error(gp_error *error, gp_reason reason, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fill(error, GP_ERR_STATE, reason, format, arguments);
    va_end(arguments);
    return GP_ERR_STATE;
}

const char *gp_status_text(gp_status status)
{
    switch (status) {
    case GP_OK:
        return "ok";
    case GP_NOT_READY:
        return "not ready";
    case GP_ERR_ARGUMENT:
        return "wrong argument";
    case GP_ERR_HOST_MEMORY:
        return "out of host memory";
    case GP_ERR_OUT_OF_MEMORY:
        return "out of memory";
    case GP_ERR_LIMIT:
        return "limit reached";
    case GP_ERR_ADDRESS_SPACE:
        return "out of addresses";
    case GP_ERR_DRIVER:
        return "driver error";
    case GP_ERR_CAPTURE:
        return "stream is being captured";
    case GP_ERR_STATE:
        return "wrong state";
    case GP_ERR_REENTRANT:
        return "called from the pool's own callback";
    case GP_ERR_PINNED:
        return "memory is exported";
    case GP_ERR_CALLBACK:
        return "callback failed";
    case GP_ERR_CONTRACT_TYPE:
        return "callback answered with no chunk";
    case GP_ERR_CONTRACT_VALUE:
        return "callback answered with an unfit chunk";
    case GP_ERR_INTERRUPTED:
        return "interrupted";
    case GP_ERR_UNAVAILABLE:
        return "unavailable";
    }
    return "unknown status";
}

static const char *advice(gp_status status)
{
    switch (status) {
    case GP_ERR_OUT_OF_MEMORY:
        return "; free memory of the device, or ask for less";
    case GP_ERR_ADDRESS_SPACE:
        return "; this is a shortage of addresses, not of memory: ask for a smaller address space";
    case GP_ERR_UNAVAILABLE:
        return "; this device does not support it";
    default:
        return "";
    }
}

gp_status gp__driver_error(gp_error *error, gp_status status, const char *call, int code,
                           const char *name, uintptr_t va, size_t size)
{
    char bytes[32] = "";
    char at[32] = "";
    if (size != 0) {
        (void)snprintf(bytes, sizeof bytes, " of %zu bytes", size);
    }
    if (va != 0) {
        (void)snprintf(at, sizeof at, " at %#zx", (size_t)va);
    }
    (void)gp_error_set(error, status, "%s%s%s failed: %s (%d)%s", call, bytes, at, name, code,
                       advice(status));
    if (error != NULL) {
        error->code = code;
        error->call = call;
        error->size = size;
        (void)snprintf(error->name, sizeof error->name, "%s", name);
    }
    return status;
}

static const char *errno_name(int code)
{
    switch (code) {
    case EINVAL:
        return "EINVAL";
    case ENOMEM:
        return "ENOMEM";
    case EBADF:
        return "EBADF";
    case EMFILE:
        return "EMFILE";
    case ENFILE:
        return "ENFILE";
    case EAGAIN:
        return "EAGAIN";
    case EFAULT:
        return "EFAULT";
    case EBUSY:
        return "EBUSY";
    case EEXIST:
        return "EEXIST";
    case ENOENT:
        return "ENOENT";
    case EPERM:
        return "EPERM";
    case EACCES:
        return "EACCES";
    default:
        return NULL;
    }
}

gp_status gp__errno_error(gp_error *error, gp_status status, const char *call, int code,
                          uintptr_t va, size_t size)
{
    char unknown[24];
    const char *name = errno_name(code);
    if (name == NULL) {
        (void)snprintf(unknown, sizeof unknown, "errno %d", code);
        name = unknown;
    }
    return gp__driver_error(error, status, call, code, name, va, size);
}

const char *gp__size_text(size_t bytes, char buffer[static 32])
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;
    while (unit + 1 < sizeof units / sizeof *units && bytes != 0 && bytes % 1024 == 0) {
        bytes /= 1024;
        unit++;
    }
    snprintf(buffer, 32, "%zu %s", bytes, units[unit]);
    return buffer;
}
