/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs each scenario of a CUDA test in a process of its own, since a process loads its driver once
 * and forever: the test program starts itself again with the scenario's number and settings.
 */
#ifndef GP__CUDA_CASE_H
#define GP__CUDA_CASE_H

#include "tests/support/check.h"
#include "tests/support/fake_cuda.h"

#include <dlfcn.h>
#include <limits.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backing/driver.h"

#define CASE_COUNT(cases) (sizeof(cases) / sizeof((cases)[0]))

struct cuda_case {
    const char *name;
    void (*run)(void **state);
    const char *settings; /* FAKE_CUDA; NULL: none */
    const char *library; /* NULL: the fake */
};

extern char **environ;

/* The fake lies beside the test program unless the build says otherwise. */
static inline const char *case_library(void)
{
#ifdef FAKE_CUDA_PATH
    return FAKE_CUDA_PATH;
#else
    static char path[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 32);
    assert_true(length > 0);
    path[length] = '\0';
    strcpy(strrchr(path, '/'), "/libfake_cuda.so");
    return path;
#endif
}

/* What the fake exports; NULL before cuda.c has loaded it. */
static inline void *case_symbol(const char *name)
{
    void *library = dlopen(case_library(), RTLD_NOW | RTLD_NOLOAD);
    void *symbol = library != NULL ? dlsym(library, name) : NULL;
    if (library != NULL)
        dlclose(library);
    return symbol;
}

static inline void fake_set(const char *name, long value)
{
    fake_cuda_set_function set;
    *(void **)&set = case_symbol("fake_cuda_set");
    assert_non_null(set);
    set(name, value);
}

static inline unsigned long fake_calls(const char *name)
{
    fake_cuda_calls_function calls;
    *(void **)&calls = case_symbol("fake_cuda_calls");
    return calls != NULL ? calls(name) : 0;
}

static inline const char *fake_last(const char *name)
{
    fake_cuda_last_function last;
    *(void **)&last = case_symbol("fake_cuda_last");
    assert_non_null(last);
    return last(name);
}

/* "cuda:<ordinal>", opened. */
static inline gp_device *open_device(int ordinal)
{
    gp_device *device = NULL;
    gp_error error;
    CHECK_OK(gp_device_open(GP_DEVICE_CUDA, ordinal, &device, &error), &error);
    return device;
}

static inline void expect_text(const char *text, const char *part)
{
    CHECK(strstr(text, part) != NULL, "\"%s\" does not say \"%s\"", text, part);
}

/* A driver error must name the call, the CUresult and the sizes (P3). */
static inline void expect_driver_error(const gp_error *error, const char *call, int code,
                                       const char *name)
{
    assert_string_equal(error->call, call);
    assert_int_equal(error->code, code);
    assert_string_equal(error->name, name);
    expect_text(error->message, call);
    expect_text(error->message, name);
}

static inline void run_in_child(void **state)
{
    const struct cuda_case *scenario = *state;
    const char *settings = scenario->settings != NULL ? scenario->settings : "";
    char *arguments[] = {"/proc/self/exe", (char *)(uintptr_t)scenario->name, NULL};
    int status = -1;
    pid_t child;
    setenv("FAKE_CUDA", settings, 1);
    setenv("GROWPOOL_CUDA_LIBRARY", scenario->library != NULL ? scenario->library : case_library(),
           1);
    assert_int_equal(posix_spawn(&child, arguments[0], NULL, NULL, arguments, environ), 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "the process of \"%s\" ended with status 0x%x; run this program with that name",
          scenario->name, (unsigned)status);
}

/* main() of a CUDA test: every scenario in a child, or, given its name, one scenario here. */
static inline int run_cases(int argc, char **argv, const struct cuda_case *cases, size_t count)
{
    struct CMUnitTest tests[64];
    if (count > sizeof tests / sizeof tests[0])
        return EXIT_FAILURE;
    for (size_t i = 0; i < count; i++) {
        tests[i] = (struct CMUnitTest){.name = cases[i].name,
                                       .test_func = run_in_child,
                                       .initial_state = (void *)(uintptr_t)&cases[i]};
        if (argc == 2 && strcmp(argv[1], cases[i].name) == 0) {
            tests[0] = (struct CMUnitTest){.name = cases[i].name, .test_func = cases[i].run};
            return _cmocka_run_group_tests("child", tests, 1, NULL, NULL);
        }
    }
    if (argc != 1) {
        print_error("no scenario is called \"%s\"\n", argv[1]);
        return EXIT_FAILURE;
    }
    return _cmocka_run_group_tests("cuda", tests, count, NULL, NULL);
}

#endif
