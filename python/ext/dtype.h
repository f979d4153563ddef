/* SPDX-License-Identifier: Apache-2.0
 *
 * Element types: what one is called by NumPy, PyTorch, the buffer protocol, the array interface and
 * DLPack. Plain data; no other library is imported for it.
 */
#ifndef EXT_DTYPE_H
#define EXT_DTYPE_H

#include "py.h"

#include <stdint.h>

struct ext_dtype {
    const char *name; /* as NumPy and PyTorch call it */
    const char *format; /* of the buffer protocol; NULL: it has none */
    const char *typestr; /* of the array interfaces; NULL: they have none */
    uint8_t code; /* DLPack's type code */
    uint8_t bytes; /* of one element */
};

extern const struct ext_dtype ext_dtype_uint8;
/* From a name, a typestr, a NumPy or PyTorch dtype, or a scalar type. NULL with TypeError, ValueError. */
const struct ext_dtype *ext_dtype_of(PyObject *object);

#endif
