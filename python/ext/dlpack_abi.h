/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of DLPack 1.0 that an exporter needs, written from its specification: the layout of a tensor
 * in memory and of the two ways to hand one over. It owns no behaviour.
 */
#ifndef EXT_DLPACK_ABI_H
#define EXT_DLPACK_ABI_H

#include <stdint.h>

enum { DL_MAJOR = 1, DL_MINOR = 0 };

/* Kinds of devices. */
enum { DL_CPU = 1, DL_CUDA = 2, DL_EXTENSION = 12 };

/* Kinds of elements. */
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };

struct dl_device {
    int32_t kind;
    int32_t id;
};

struct dl_type {
    uint8_t code;
    uint8_t bits; /* of one lane */
    uint16_t lanes; /* 1: no vector */
};

struct dl_tensor {
    void *data; /* NULL where there are no elements */
    struct dl_device device;
    int32_t dimensions;
    struct dl_type type;
    int64_t *shape; /* elements */
    int64_t *strides; /* elements */
    uint64_t byte_offset; /* from data to the first element */
};

/* In a capsule named "dltensor", and "used_dltensor" once somebody took it over. */
struct dl_managed_tensor {
    struct dl_tensor tensor;
    void *context; /* the exporter's */
    void (*deleter)(struct dl_managed_tensor *self); /* any thread */
};

struct dl_version {
    uint32_t major;
    uint32_t minor;
};

/* In a capsule named "dltensor_versioned", and "used_dltensor_versioned" once somebody took it over. */
struct dl_managed_tensor_versioned {
    struct dl_version version;
    void *context;
    void (*deleter)(struct dl_managed_tensor_versioned *self);
    uint64_t flags; /* 1: read only; 2: a copy */
    struct dl_tensor tensor;
};

#endif
