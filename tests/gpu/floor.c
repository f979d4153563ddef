/* SPDX-License-Identifier: Apache-2.0
 *
 * The floor under bench_first_light.py: what the driver alone charges for the same memory, without
 * Python and without growpool. usage: floor BYTES CHUNK_BYTES ROUNDS
 * Prints one line: median microseconds to get the memory, and to give it back.
 */
#include "backing/cuda_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define MOST_ROUNDS 1000

static struct gp__cuda_api cuda;

static void must(gp__cu_result code, const char *call)
{
    if (code != GP__CUDA_SUCCESS) {
        fprintf(stderr, "%s failed with CUresult %u\n", call, code);
        exit(EXIT_FAILURE);
    }
}

#define MUST(name, ...) must(cuda.name(__VA_ARGS__), #name)

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    gp__cu_get_proc_address get_proc_address = NULL;
    if (library != NULL)
        *(void **)&get_proc_address = dlsym(library, "cuGetProcAddress");
    if (get_proc_address == NULL) {
        fprintf(stderr, "no CUDA driver\n");
        exit(EXIT_FAILURE);
    }
#define LOAD(name, version, need, parameters)                                                      \
    must(get_proc_address(#name, (void **)&cuda.name, version, 1), #name);
    GP__CUDA_FUNCTIONS(LOAD)
#undef LOAD
    MUST(cuInit, 0);
}

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int compare(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double median(double *values, size_t count)
{
    qsort(values, count, sizeof *values, compare);
    return values[count / 2];
}

static void grow(gp__cu_pointer va, size_t bytes, size_t chunk, gp__cu_memory *chunks)
{
    const gp__cu_allocation properties = {.type = GP__CU_MEM_ALLOCATION_TYPE_PINNED,
                                          .location = {GP__CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    const gp__cu_access access = {{GP__CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                  GP__CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    for (size_t at = 0; at < bytes; at += chunk) {
        MUST(cuMemCreate, &chunks[at / chunk], chunk, &properties, 0);
        MUST(cuMemMap, va + at, chunk, 0, chunks[at / chunk], 0);
    }
    MUST(cuMemSetAccess, va, bytes, &access, 1);
}

static void shrink(gp__cu_pointer va, size_t bytes, size_t chunk, const gp__cu_memory *chunks)
{
    for (size_t at = 0; at < bytes; at += chunk) {
        MUST(cuMemUnmap, va + at, chunk);
        MUST(cuMemRelease, chunks[at / chunk]);
    }
}

int main(int argc, char **argv)
{
    static double growing[MOST_ROUNDS], shrinking[MOST_ROUNDS];
    gp__cu_device device = 0;
    gp__cu_context context = NULL;
    gp__cu_pointer va = 0;
    size_t bytes = argc == 4 ? strtoull(argv[1], NULL, 0) : 0;
    size_t chunk = argc == 4 ? strtoull(argv[2], NULL, 0) : 0;
    size_t rounds = argc == 4 ? strtoull(argv[3], NULL, 0) : 0;
    if (chunk == 0 || bytes == 0 || bytes % chunk != 0 || rounds == 0 || rounds > MOST_ROUNDS) {
        fprintf(stderr, "usage: %s BYTES CHUNK_BYTES ROUNDS\n", argv[0]);
        return EXIT_FAILURE;
    }
    gp__cu_memory *chunks = calloc(bytes / chunk, sizeof *chunks);
    if (chunks == NULL)
        return EXIT_FAILURE;
    load();
    MUST(cuDeviceGet, &device, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, device);
    MUST(cuMemAddressReserve, &va, bytes, 0, 0, 0);
    for (size_t i = 0; i < rounds; i++) {
        double start = now_us();
        grow(va, bytes, chunk, chunks);
        double grown = now_us();
        shrink(va, bytes, chunk, chunks);
        growing[i] = grown - start;
        shrinking[i] = now_us() - grown;
    }
    printf("%.1f %.1f\n", median(growing, rounds), median(shrinking, rounds));
    free(chunks);
    return EXIT_SUCCESS;
}
