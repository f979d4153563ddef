/* SPDX-License-Identifier: Apache-2.0
 *
 * Steering the stand-in for libcuda.so.1 (fake_cuda*.c), which tests look up by name in the library
 * that cuda.c has opened, since the fake is never linked.
 *
 * A setting is a name and a number. Before the library is loaded they come from the environment
 * variable FAKE_CUDA as "name=number,name=number"; afterwards from fake_cuda_set().
 *   <function>     the CUresult that the function answers with; 0: it works
 *   no:<function>  1: the driver does not have it
 *   version, devices, vmm, host_numa, host_node   what the driver says of itself
 *   posix_fd, rdma 1: the device claims to share memory, to make it for network cards (the default)
 *   peers          0: no device can reach another's memory
 *   rdma_create, rdma_access   what creating memory for network cards, and setting access to it, answers
 *   imported_type, imported_id, imported_rdma   what the driver says of imported memory
 *   bad_fd         1: an export gives a descriptor that is none
 *   busy           1: recorded events have not completed
 *   capture        CUstreamCaptureStatus of every stream
 *   capture_id     the id of the one capture there is
 *   reused         added to the id of every stream: its handle now names another one
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

/* void fake_cuda_set(const char *name, long value) */
typedef void (*fake_cuda_set_function)(const char *name, long value);
/* How often the function was called; NULL: all of them together. */
typedef unsigned long (*fake_cuda_calls_function)(const char *name);
/* The arguments of the latest call of the function, such as "size=4096", or "". */
typedef const char *(*fake_cuda_last_function)(const char *name);
/* Destroys the user objects that the captured graph holds, on another thread; how many. */
typedef unsigned long (*fake_cuda_drop_graph_function)(void);
/* User objects not destroyed yet. */
typedef unsigned long (*fake_cuda_user_objects_function)(void);

#endif
