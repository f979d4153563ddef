/* SPDX-License-Identifier: Apache-2.0
 *
 * Arguments: names, sizes, devices and streams, turned into what the core takes, with clear errors.
 */
#ifndef EXT_ARGS_H
#define EXT_ARGS_H

#include "../../backing/backing.h"
#include "module.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The parameters of one function: names in order, NULL at the end. The first `positional` may be given
 * by position, the first `required` must be given. */
struct ext_signature {
    const char *function;
    const char *const *names;
    Py_ssize_t required;
    Py_ssize_t positional;
};
/* Vectorcall arguments into out[] (borrowed; NULL where left out). 0, or -1 with TypeError. */
int ext_parse(const struct ext_signature *signature, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames, PyObject **out);
/* The same for tp_new's tuple and dict. */
int ext_parse_tuple(const struct ext_signature *signature, PyObject *args, PyObject *kwargs,
                    PyObject **out);

/* Bytes from an int or text such as "8 GiB". `what` names the argument. TypeError, ValueError,
 * OverflowError. */
int ext_size(PyObject *object, const char *what, size_t *out);
/* None or left out: `fallback`. */
int ext_optional_size(PyObject *object, const char *what, size_t fallback, size_t *out);
/* An address: int only. */
int ext_address(PyObject *object, const char *what, uintptr_t *out);

enum {
    EXT_DEVICE_CALLBACK_IDS = 1, /* also -1 for the host and -2-N for sim:N, as callbacks get */
    EXT_DEVICE_GPU = 2 /* left out is the first GPU, even where there is none */
};
/* NULL or None: the first GPU, else the host. Opens the device, detached meanwhile. */
int ext_device(struct module_state *state, PyObject *object, unsigned flags, gp_device **out);

/* Left out, or None. */
static inline bool ext_is_none(PyObject *object)
{
    return object == NULL || object == Py_None;
}
/* The handle behind a stream argument of a device; None is 0. *keep is a new reference to the object
 * that must live while the stream is used, or NULL. */
int ext_stream(struct module_state *state, gp_device *device, PyObject *object, uintptr_t *handle,
               PyObject **keep);

/* True for a closed growpool stream. *handle is what a pool may still know it by, 0 for nothing. */
bool ext_stream_is_closed(struct module_state *state, PyObject *object, uintptr_t *handle);

/* "64.0 MiB" for messages and reprs; buffer of at least 32 bytes. */
const char *ext_size_text(size_t bytes, char *buffer);

#endif
