/* SPDX-License-Identifier: Apache-2.0
 *
 * Replays the fuzz target's inputs without libFuzzer: the kept corpus, or the files that are named on the
 * command line. GP_FUZZ_TRACE=1 prints what each operation does.
 */
#include "tests/fuzz/fuzz.h"

#include <dirent.h>

#define MOST_BYTES 4096
#define MOST_FILES 2000

static char **named;
static int named_count;

static void replay(const char *path)
{
    static uint8_t data[MOST_BYTES + 1];
    FILE *file = fopen(path, "rb");
    size_t size;

    CHECK(file != NULL, "no file %s", path);
    size = fread(data, 1, sizeof data, file);
    fclose(file);
    CHECK(size <= MOST_BYTES, "%s has more than %d bytes", path, MOST_BYTES);
    fuzz_run(path, data, size);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The paths of the folder's files, in order. */
static size_t list(const char *folder, char *paths[MOST_FILES])
{
    DIR *directory = opendir(folder);
    const struct dirent *entry;
    size_t count = 0;

    CHECK(directory != NULL, "no folder %s", folder);
    while ((entry = readdir(directory)) != NULL) {
        size_t room = strlen(folder) + strlen(entry->d_name) + 2;

        if (entry->d_name[0] == '.')
            continue;
        CHECK(count < MOST_FILES, "more than %d files in %s", MOST_FILES, folder);
        paths[count] = malloc(room);
        CHECK(paths[count] != NULL, "no memory for a name");
        snprintf(paths[count++], room, "%s/%s", folder, entry->d_name);
    }
    closedir(directory);
    qsort(paths, count, sizeof *paths, by_name);
    return count;
}

static void every_input_of_the_corpus_holds(void **state)
{
    static char *paths[MOST_FILES];
    size_t count;

    (void)state;
    if (named_count > 0) {
        for (int i = 0; i < named_count; i++)
            replay(named[i]);
        return;
    }
    count = list(FUZZ_CORPUS, paths);
    CHECK(count > 50, "only %zu inputs", count);
    for (size_t i = 0; i < count; i++) {
        replay(paths[i]);
        free(paths[i]);
    }
}

/* The same bytes twice are the same calls twice: what the fuzzer finds can be found again. */
static void the_same_bytes_are_the_same_run(void **state)
{
    static char *paths[MOST_FILES];
    size_t count;

    (void)state;
    if (named_count > 0)
        return;
    count = list(FUZZ_CORPUS, paths);
    for (size_t i = 0; i < count; i++) {
        uint64_t first, second;

        replay(paths[i]);
        first = fuzz.driver_calls;
        replay(paths[i]);
        second = fuzz.driver_calls;
        CHECK(first == second, "%s: %llu driver calls, and then %llu", paths[i],
              (unsigned long long)first, (unsigned long long)second);
        free(paths[i]);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_input_of_the_corpus_holds),
        cmocka_unit_test(the_same_bytes_are_the_same_run),
    };

    named = argv + 1;
    named_count = argc - 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
