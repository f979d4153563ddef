/* SPDX-License-Identifier: Apache-2.0
 *
 * The lock witness (plan item 13, P1, B2): each kind of breach is reported, and nothing else is.
 */
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backing/backing_internal.h"
#include "backing/lock.h"
#include "child.h"
#include "fake_device.h"

static unsigned report_count;
static char last_report[200];

static void remember(const char *message)
{
    report_count++;
    snprintf(last_report, sizeof last_report, "%s", message);
}

static int set_up(void **state)
{
    (void)state;
    report_count = 0;
    last_report[0] = '\0';
    gp__witness_set_handler(remember);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    gp__witness_set_handler(NULL);
    return 0;
}

static void check_reports(unsigned count, const char *words)
{
    CHECK(report_count == count, "want %u reports, got %u: %s", count, report_count, last_report);
    CHECK(strstr(last_report, words) != NULL, "want \"%s\" in \"%s\"", words, last_report);
}

static void rising_ranks_are_silent(void **state)
{
    (void)state;
    struct gp__mutex pool;
    struct gp__mutex stream = GP__MUTEX_INIT(GP__RANK_STREAM);
    gp__mutex_init(&pool, GP__RANK_POOL);
    gp__mutex_lock(&pool);
    gp__assert_locked(&pool);
    gp__mutex_lock(&stream);
    gp__assert_locked(&pool);
    gp__assert_locked(&stream);
    /* Not in the order of taking: the outer one first. */
    gp__mutex_unlock(&pool);
    gp__assert_locked(&stream);
    gp__mutex_unlock(&stream);
    gp__assert_no_lock();
    gp__mutex_destroy(&pool);
    check_reports(0, "");
}

static void forced_inversion_is_reported(void **state)
{
    (void)state;
    struct gp__mutex pool = GP__MUTEX_INIT(GP__RANK_POOL);
    struct gp__mutex reaper = GP__MUTEX_INIT(GP__RANK_REAPER);
    gp__mutex_lock(&pool);
    gp__mutex_lock(&reaper);
    check_reports(1, "taking rank 20 while holding rank 30");
    gp__mutex_unlock(&reaper);
    gp__mutex_unlock(&pool);
    check_reports(1, "");
}

static void an_inversion_below_the_top_is_reported(void **state)
{
    (void)state;
    struct gp__mutex stream = GP__MUTEX_INIT(GP__RANK_STREAM);
    struct gp__mutex registry = GP__MUTEX_INIT(GP__RANK_REGISTRY);
    struct gp__mutex pool = GP__MUTEX_INIT(GP__RANK_POOL);
    gp__mutex_lock(&stream);
    gp__mutex_lock(&registry);
    check_reports(1, "taking rank 10 while holding rank 50");
    /* Rank 30 is above the lock taken last, and still below one that is held. */
    gp__mutex_lock(&pool);
    check_reports(2, "taking rank 30 while holding rank 50");
    gp__mutex_unlock(&pool);
    gp__mutex_unlock(&registry);
    gp__mutex_unlock(&stream);
}

static void the_same_rank_twice_is_reported(void **state)
{
    (void)state;
    struct gp__mutex first = GP__MUTEX_INIT(GP__RANK_POOL);
    struct gp__mutex second = GP__MUTEX_INIT(GP__RANK_POOL);
    gp__mutex_lock(&first);
    gp__mutex_lock(&second);
    check_reports(1, "taking rank 30 while holding rank 30");
    gp__mutex_unlock(&second);
    gp__mutex_unlock(&first);
}

static void a_missing_lock_is_reported(void **state)
{
    (void)state;
    struct gp__mutex mutex = GP__MUTEX_INIT(GP__RANK_POOL);
    gp__assert_locked(&mutex);
    check_reports(1, "needs rank 30");
}

static gp_status no_memory(void *context, const gp_request *request, gp_chunk **out,
                           gp_error *error)
{
    (void)context;
    (void)request;
    (void)out;
    (void)error;
    return GP_ERR_OUT_OF_MEMORY;
}

static gp_status takes_nothing(void *context, gp_chunk *chunk, const gp_request *request,
                               gp_error *error)
{
    (void)context;
    (void)chunk;
    (void)request;
    (void)error;
    return GP_ERR_CALLBACK;
}

/* The points that call a backing: with a lock held each of them says so. */
static void a_lock_held_across_a_backing_is_reported(void **state)
{
    (void)state;
    static const gp_backing_ops ops = {.alloc = no_memory, .free = takes_nothing};
    struct fake_device fake;
    gp_backing *backing;
    gp_chunk *chunk;
    fake_device_init(&fake);
    gp_request request = {.size = 2 * CHECK_MIB, .device = &fake.device};
    CHECK_OK(gp_backing_create(&ops, NULL, &backing, NULL), NULL);
    CHECK_OK(gp_chunk_create(&fake.device, request.size, GP_LOCATION_DEVICE, 0, &chunk, NULL),
             NULL);
    check_reports(0, "");

    struct gp__mutex pool = GP__MUTEX_INIT(GP__RANK_POOL);
    gp__mutex_lock(&pool);
    gp_chunk *answer;
    CHECK_STATUS(GP_ERR_OUT_OF_MEMORY, gp__backing_supply(backing, &request, &answer, NULL), NULL);
    check_reports(1, "calling out while holding rank 30");
    CHECK_STATUS(GP_ERR_CALLBACK, gp_backing_free(backing, chunk, &request, NULL), NULL);
    check_reports(2, "calling out while holding rank 30");
    gp_chunk_release(chunk); /* the driver's release may block */
    check_reports(3, "calling out while holding rank 30");
    gp__mutex_unlock(&pool);
    gp_backing_release(backing);
    check_reports(3, "");
    fake_device_check_clean(&fake);
}

static void a_wait_with_two_locks_is_reported(void **state)
{
    (void)state;
    struct gp__mutex pool = GP__MUTEX_INIT(GP__RANK_POOL);
    struct gp__mutex stream = GP__MUTEX_INIT(GP__RANK_STREAM);
    pthread_cond_t condition;
    gp__condition_init(&condition);
    gp__mutex_lock(&pool);
    gp__mutex_lock(&stream);
    gp__condition_wait(&condition, &stream, 1);
    check_reports(1, "waiting with rank 50 while holding 2 locks");
    gp__mutex_unlock(&pool);
    gp__condition_wait(&condition, &stream, 1);
    check_reports(1, "");
    gp__mutex_unlock(&stream);
    (void)pthread_cond_destroy(&condition);
}

static uint64_t monotonic_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static void a_wait_ends_with_its_timeout(void **state)
{
    (void)state;
    struct gp__mutex mutex = GP__MUTEX_INIT(GP__RANK_STREAM);
    pthread_cond_t condition;
    gp__condition_init(&condition);
    gp__mutex_lock(&mutex);
    /* Four times, so that the nanoseconds of some deadline carry into its seconds. */
    for (int i = 0; i < 4; i++) {
        uint64_t timeout_ns = UINT64_C(300000000);
        uint64_t start = monotonic_ns();
        gp__condition_wait(&condition, &mutex, timeout_ns);
        uint64_t waited = monotonic_ns() - start;
        CHECK(waited >= timeout_ns, "woke after %llu ns", (unsigned long long)waited);
        CHECK(waited < timeout_ns * 20, "woke after %llu ns", (unsigned long long)waited);
    }
    gp__mutex_unlock(&mutex);
    (void)pthread_cond_destroy(&condition);
    check_reports(0, "");
}

struct meeting {
    struct gp__mutex mutex;
    pthread_cond_t condition;
    bool arrived;
};

static void *arrive(void *context)
{
    struct meeting *meeting = context;
    /* This thread holds nothing, whatever the other one does: ranks are kept for each thread. */
    gp__assert_no_lock();
    gp__mutex_lock(&meeting->mutex);
    meeting->arrived = true;
    (void)pthread_cond_signal(&meeting->condition);
    gp__mutex_unlock(&meeting->mutex);
    return NULL;
}

static void a_wait_without_end_ends_with_a_signal(void **state)
{
    (void)state;
    struct meeting meeting = {.mutex = GP__MUTEX_INIT(GP__RANK_STREAM)};
    pthread_t thread;
    gp__condition_init(&meeting.condition);
    gp__mutex_lock(&meeting.mutex);
    CHECK(pthread_create(&thread, NULL, arrive, &meeting) == 0, "no thread");
    while (!meeting.arrived) {
        gp__condition_wait(&meeting.condition, &meeting.mutex, UINT64_MAX);
    }
    gp__mutex_unlock(&meeting.mutex);
    (void)pthread_join(thread, NULL);
    (void)pthread_cond_destroy(&meeting.condition);
    check_reports(0, "");
}

/* ---- in a forked child ---- */

static struct sleeper {
    struct gp__mutex mutex;
    pthread_cond_t condition;
    pid_t id;
    bool awake;
} first_sleeper, second_sleeper; /* the latter's mutex and condition are not used */

static int stop_pipe[2], told_pipe[2];

/* Keeps the thread where it is until a byte comes. */
static void stand_still(int signal_number)
{
    char byte = 0;
    (void)signal_number;
    (void)!write(told_pipe[1], &byte, 1);
    (void)!read(stop_pipe[0], &byte, 1);
}

static void *sleep_until_awake(void *context)
{
    struct sleeper *self = context;
    gp__mutex_lock(&first_sleeper.mutex);
    __atomic_store_n(&self->id, gettid(), __ATOMIC_RELEASE);
    while (!self->awake) {
        gp__condition_wait(&first_sleeper.condition, &first_sleeper.mutex, UINT64_MAX);
    }
    gp__mutex_unlock(&first_sleeper.mutex);
    return NULL;
}

/* Returns when the thread sleeps in the kernel, which it does nowhere but on the condition. */
static void start_sleeper(struct sleeper *sleeper, pthread_t *thread)
{
    char path[64], line[256], state;
    CHECK(pthread_create(thread, NULL, sleep_until_awake, sleeper) == 0, "no thread");
    do {
        pid_t id = __atomic_load_n(&sleeper->id, __ATOMIC_ACQUIRE);
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)id);
        FILE *file = id != 0 ? fopen(path, "r") : NULL;
        state = 'R';
        if (file != NULL && fgets(line, sizeof line, file) != NULL) {
            state = strrchr(line, ')')[2];
        }
        if (file != NULL) {
            (void)fclose(file);
        }
    } while (state != 'S');
}

static bool wake_in_child(void *context)
{
    (void)context;
    (void)alarm(10);
    gp__mutex_lock(&first_sleeper.mutex);
    gp__condition_broadcast(&first_sleeper.condition);
    gp__mutex_unlock(&first_sleeper.mutex);
    return true;
}

/* The C library would wait there for a thread of the parent's that is about to wake up. */
static void a_forked_child_wakes_nobody(void **state)
{
    (void)state;
    pthread_t threads[2];
    char byte = 0;
    gp__note_use();
    gp__mutex_init(&first_sleeper.mutex, GP__RANK_STREAM);
    gp__condition_init(&first_sleeper.condition);
    CHECK(pipe(stop_pipe) == 0 && pipe(told_pipe) == 0, "no pipes");
    CHECK(signal(SIGUSR1, stand_still) != SIG_ERR, "no handler");
    start_sleeper(&first_sleeper, &threads[0]);
    CHECK(pthread_kill(threads[0], SIGUSR1) == 0, "no signal");
    CHECK(read(told_pipe[0], &byte, 1) == 1, "the thread did not stop");
    gp__mutex_lock(&first_sleeper.mutex);
    first_sleeper.awake = true;
    gp__condition_broadcast(&first_sleeper.condition);
    gp__mutex_unlock(&first_sleeper.mutex);
    start_sleeper(&second_sleeper, &threads[1]);
    int ended = in_child(wake_in_child, NULL);
    CHECK(write(stop_pipe[1], &byte, 1) == 1, "the thread stands still");
    gp__mutex_lock(&first_sleeper.mutex);
    second_sleeper.awake = true;
    gp__condition_broadcast(&first_sleeper.condition);
    gp__mutex_unlock(&first_sleeper.mutex);
    for (int i = 0; i < 2; i++) {
        (void)pthread_join(threads[i], NULL);
        (void)close(stop_pipe[i]);
        (void)close(told_pipe[i]);
    }
    (void)pthread_cond_destroy(&first_sleeper.condition);
    gp__mutex_destroy(&first_sleeper.mutex);
    CHECK(ended == 0, "the child ended with %#x", (unsigned)ended);
    check_reports(0, "");
}

/* Without a handler of its own a test must not go on after a breach. */
static void the_default_handler_aborts(void **state)
{
    (void)state;
    pid_t child = fork();
    CHECK(child >= 0, "fork failed");
    if (child == 0) {
        struct gp__mutex mutex = GP__MUTEX_INIT(GP__RANK_POOL);
        (void)signal(SIGABRT, SIG_DFL);
        (void)close(STDERR_FILENO);
        gp__witness_set_handler(NULL);
        gp__assert_locked(&mutex);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child, "no child");
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "wait status %#x", status);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* First: the child of a process that has used growpool would check nothing. */
        cmocka_unit_test_setup_teardown(the_default_handler_aborts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(rising_ranks_are_silent, set_up, tear_down),
        cmocka_unit_test_setup_teardown(forced_inversion_is_reported, set_up, tear_down),
        cmocka_unit_test_setup_teardown(an_inversion_below_the_top_is_reported, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_same_rank_twice_is_reported, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_missing_lock_is_reported, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_lock_held_across_a_backing_is_reported, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_wait_with_two_locks_is_reported, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_wait_ends_with_its_timeout, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_wait_without_end_ends_with_a_signal, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_forked_child_wakes_nobody, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
