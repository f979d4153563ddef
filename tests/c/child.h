/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs a piece of a test in a forked child: for what ends the process, and for what a fork changes.
 */
#ifndef GP__CHILD_H
#define GP__CHILD_H

#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/check.h"

/* Runs body(context) in a forked child and returns its wait status: 0 when it returned true. */
static inline int in_child(bool (*body)(void *context), void *context)
{
    pid_t child = fork();
    CHECK(child >= 0, "fork failed");
    if (child == 0) {
        (void)signal(SIGABRT, SIG_DFL);
        (void)close(STDERR_FILENO);
        _exit(body(context) ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child, "no child");
    return status;
}

#endif
