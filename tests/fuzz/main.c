/* SPDX-License-Identifier: Apache-2.0
 *
 * libFuzzer's door. GP_FUZZ_TRACE=1 prints each operation of an input.
 */
#include "fuzz.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    setenv("CMOCKA_TEST_ABORT", "1", 1); /* a failed check is a crash */
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_run("FILE", data, size);
    return 0;
}
