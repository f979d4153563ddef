/* SPDX-License-Identifier: Apache-2.0
 *
 * How a failed check speaks: the line that reproduces it, where it is, and what was wrong.
 */
#include "check.h"

static char context_line[256];

void check_context(const char *line)
{
    snprintf(context_line, sizeof context_line, "%s", line == NULL ? "" : line);
}

const char *check_context_line(void)
{
    return context_line;
}

void check_failed(const char *condition, const char *file, int line, const char *format, ...)
{
    va_list arguments;
    char text[512];

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (context_line[0] != '\0')
        print_error("reproduce: %s\n", context_line);
    print_error("%s:%d: %s: %s\n", file, line, condition, text);
    context_line[0] = '\0'; /* the next test's failure is not this one's */
    _fail(file, line);
}

void check_status(gp_status want, gp_status got, const gp_error *error, const char *expression,
                  const char *file, int line)
{
    if (want != got)
        check_failed(expression, file, line, "want \"%s\", got \"%s\": %s", gp_status_text(want),
                     gp_status_text(got), error != NULL && got != GP_OK ? error->message : "");
}

uint64_t check_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);

    return text == NULL || *text == '\0' ? otherwise : strtoull(text, NULL, 0);
}
