// Tests of engine/pool.c. Each test runs real threads; the data the tasks touch is plain memory
// wherever the pool promises an order, so that a thread sanitizer build proves the promise.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static _Atomic int claims_are_late;

static void delay_claim(void) {
    static _Thread_local uint32_t calls;
    if (atomic_load_explicit(&claims_are_late, memory_order_relaxed) && ++calls % 8 == 0) {
        nanosleep(&(struct timespec){0, 50000}, NULL);
    }
}

#undef atomic_compare_exchange_weak
#define atomic_compare_exchange_weak(word, old, new) \
    (delay_claim(), atomic_compare_exchange_strong(word, old, new))
#include "../engine/pool.c"
#include "counted.h"

#if defined(__SANITIZE_THREAD__)
#define NO_THREADS_AFTER_FORK true  // the sanitizer's rule
#else
#define NO_THREADS_AFTER_FORK false
#endif

enum { MAX_TASKS = 40, MAX_THREADS = 8 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_us(long us) {
    const struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

static uint32_t random_below(uint32_t n) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 20) % n);
}

static pool *new_pool(uint32_t n) {
    pool *p = NULL;
    const int status = pool_new(&p, n);
    if (status || !p) {
        printf("pool_new(%u): %d %s\n", n, status, mf_last_error());
        exit(1);
    }
    return p;
}

// One run's job. `out` is plain: a task writes its own element, the caller reads it after pool_run.
typedef struct job {
    uint32_t run, n_threads;
    uint32_t out[MAX_TASKS];
} job;

static _Atomic uint32_t bad_thread, thread_busy[MAX_THREADS], bad_overlap, used[MAX_THREADS];

static void count_task(void *arg, uint32_t task, uint32_t thread) {
    job *const j = arg;
    if (thread >= j->n_threads) {
        atomic_fetch_add(&bad_thread, 1);
        return;
    }
    if (atomic_exchange(&thread_busy[thread], 1)) atomic_fetch_add(&bad_overlap, 1);
    j->out[task] += j->run;  // a second execution shows as a wrong sum
    atomic_fetch_add_explicit(&used[thread], 1, memory_order_relaxed);
    atomic_store(&thread_busy[thread], 0);
}

static uint32_t run_once(pool *p, uint32_t run, uint32_t n_tasks) {
    static job jobs[2];  // alternating: a late helper that wrote into the job before would be seen
    job *const j = &jobs[run & 1];
    memset(j, 0, sizeof *j);
    j->run = run + 1;
    j->n_threads = pool_threads(p);
    pool_run(p, count_task, j, n_tasks);
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < MAX_TASKS; i++) wrong += j->out[i] != (i < n_tasks ? run + 1 : 0);
    return wrong;
}

static void test_every_task_once(void) {
    for (uint32_t n_threads = 1; n_threads <= 5; n_threads += 2) {
        pool *const p = new_pool(n_threads);
        uint32_t wrong = 0;
        const uint32_t n_runs = n_threads == 3 ? 100000 : 10000;
        for (uint32_t run = 0; run < n_runs; run++) {
            wrong += run_once(p, run, random_below(random_below(8) ? 6 : MAX_TASKS));
            if (random_below(2000) == 0) sleep_us(300);  // let the helpers fall asleep
        }
        CHECK(wrong == 0, "%u wrong task results with %u threads", wrong, n_threads);
        pool_free(p);
    }
    CHECK(bad_thread == 0, "%u tasks saw a thread index out of range", bad_thread);
    CHECK(bad_overlap == 0, "%u tasks shared a thread index with a running one", bad_overlap);
}

// A thread that read one job and claims during a later one must get nothing.
static void test_late_claims(void) {
    pool *const p = new_pool(4);
    uint32_t wrong = 0;
    atomic_store(&claims_are_late, 1);
    for (uint32_t run = 0; run < 3000; run++) wrong += run_once(p, run, 2 + random_below(4));
    atomic_store(&claims_are_late, 0);
    CHECK(wrong == 0, "%u wrong task results", wrong);
    pool_free(p);
}

static void note_thread(void *arg, uint32_t task, uint32_t thread) {
    pthread_t *const ids = arg;
    (void)thread;
    ids[task] = pthread_self();
}

static void test_one_task_stays_here(void) {
    pool *const p = new_pool(3);
    pthread_t id = 0;
    uint32_t elsewhere = 0;
    for (int i = 0; i < 1000; i++) {
        pool_run(p, note_thread, &id, 1);
        elsewhere += !pthread_equal(id, pthread_self());
    }
    pool_run(p, note_thread, NULL, 0);
    CHECK(elsewhere == 0, "%u single tasks ran on a helper", elsewhere);
    pool_free(p);
}

// A helper's task lasts longer than any spin, so the caller has to sleep and be woken.
static void slow_helper(void *arg, uint32_t task, uint32_t thread) {
    _Atomic uint32_t *const helped = arg;
    (void)task;
    sleep_us(thread ? 3000 : 500);
    if (thread) atomic_fetch_add(helped, 1);
}

static void test_sleep_and_wake(void) {
    pool *const p = new_pool(4);
    _Atomic uint32_t helped = 0;
    const double start = now();
    for (int i = 0; i < 30; i++) {
        sleep_us(1000);  // all helpers sleep
        pool_run(p, slow_helper, &helped, 4);
    }
    const double seconds = now() - start;
    CHECK(helped > 30, "only %u of 120 tasks ran on a helper", helped);
    CHECK(seconds < 5, "%.1f s for 30 runs of about 4 ms", seconds);
    pool_free(p);
}

static void small_work(void *arg, uint32_t task, uint32_t thread) {
    volatile uint32_t *const sums = arg;
    (void)thread;
    for (uint32_t i = 0; i < 2000; i++) sums[task * 32] += i;
}

static double time_jobs(uint32_t n_threads) {
    static uint32_t sums[16 * 32];
    pool *const p = new_pool(n_threads);
    const double start = now();
    for (int i = 0; i < 2000; i++) pool_run(p, small_work, sums, 16);
    const double seconds = now() - start;
    pool_free(p);
    return seconds;
}

// A pool that spins without bound, or waits for helpers that never got a core, needs a time slice
// per job: minutes.
static void test_crowded(void) {
    const uint32_t cores = pool_default_threads();
    const double alone = time_jobs(1), quiet = time_jobs(2 * cores);
    pid_t hogs[MAX_THREADS];
    const uint32_t n_hogs = u32_min(cores, MAX_THREADS);
    for (uint32_t i = 0; i < n_hogs; i++) {
        hogs[i] = fork();
        if (hogs[i] == 0) {
            alarm(60);  // never outlives the test
            for (volatile uint64_t n = 0;; n++) {
            }
        }
    }
    const double crowded = time_jobs(2 * cores), crowded_alone = time_jobs(1);
    for (uint32_t i = 0; i < n_hogs; i++) {
        kill(hogs[i], SIGKILL);
        waitpid(hogs[i], NULL, 0);
    }
    printf(
        "2000 jobs of 16 tasks: 1 thread %.3f s, %u threads on %u cores %.3f s; beside %u busy "
        "processes %.3f s and "
        "%.3f s\n",
        alone, 2 * cores, cores, quiet, n_hogs, crowded_alone, crowded);
    CHECK(crowded < 5 + 10 * crowded_alone, "%.2f s crowded, %.2f s with one thread", crowded,
          crowded_alone);
}

static int fork_and_wait(int (*child)(pool *), pool *p) {
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(10);  // a hang is a failure
        _exit(child(p));
    }
    int state = 0;
    waitpid(pid, &state, 0);
    return WIFEXITED(state) ? WEXITSTATUS(state) : 1000 + WTERMSIG(state);
}

static int use_in_child(pool *p) {
    const pthread_t me = pthread_self();
    pthread_t ids[6];
    pool_run(p, note_thread, ids, 6);
    for (int i = 0; i < 6; i++) {
        if (!pthread_equal(ids[i], me)) return 2;
    }
    pool_free(p);
    if (NO_THREADS_AFTER_FORK || getenv("MINFER_TEST_EMULATED")) return 0;
    pool *const own = new_pool(3);
    for (uint32_t run = 0; run < 1000; run++) {
        if (run_once(own, run, 9)) return 3;
    }
    pool_free(own);
    return 0;
}

static int run_in_child(pool *p) {
    pthread_t ids[6];
    pool_run(p, note_thread, ids, 6);
    return 0;
}

// Another thread of the parent was inside the pool: in the child its lock stays taken for ever.
static void test_fork_with_lock_held(void) {
    pool *const p = new_pool(3);
    sleep_us(2000);  // the helpers sleep, so waking them takes the lock
    pthread_mutex_lock(&p->lock);
    const int code = fork_and_wait(run_in_child, p);
    pthread_mutex_unlock(&p->lock);
    CHECK(code == 0, "child ended with %d (1000 + signal)", code);
    pool_free(p);
}

static void test_fork(void) {
    pool *const p = new_pool(4);
    if (NO_THREADS_AFTER_FORK || getenv("MINFER_TEST_EMULATED")) {
        printf("left out here: a new pool in a forked child\n");
    }
    for (int i = 0; i < 5; i++) {
        run_once(p, 0, 9);
        if (i & 1) sleep_us(1000);  // fork with the helpers spinning, and asleep
        const int code = fork_and_wait(use_in_child, p);
        CHECK(code == 0, "child %d ended with %d (1000 + signal, 2 helper used, 3 own pool)", i,
              code);
    }
    CHECK(run_once(p, 1, 9) == 0, "the parent's pool broke");
    pool_free(p);
}

static void test_churn(void) {
    const size_t alive = mem_alive();
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < 400; i++) {
        pool *const p = new_pool(1 + i % 5);
        for (uint32_t run = 0; run < i % 3; run++) wrong += run_once(p, run, 7);
        pool_free(p);
    }
    pool_free(NULL);
    CHECK(wrong == 0, "%u wrong results", wrong);
    CHECK(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
}

static void test_refusals(void) {
    pool *p = NULL;
    CHECK(pool_new(&p, 0) == MF_ARG && !p, "0 threads");
    CHECK(pool_new(&p, 1025) == MF_ARG && !p, "1025 threads");
    mem_fail_after(0);
    const int status = pool_new(&p, 2);
    mem_fail_after(SIZE_MAX);
    CHECK(status == MF_NOMEM && !p, "status %d", status);
    CHECK(pool_default_threads() >= 1, "no thread");
}

// Stacks larger than the address space: every pthread_create fails.
static int make_without_threads(pool *unused) {
    (void)unused;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    if (pthread_attr_setstacksize(&attr, (size_t)1 << 60) || pthread_setattr_default_np(&attr))
        return 2;
    pool *const p = new_pool(4);
    if (pool_threads(p) != 1) return 3;
    for (uint32_t run = 0; run < 100; run++) {
        if (run_once(p, run, 9)) return 4;
    }
    pool_free(p);
    return 0;
}

static void test_thread_creation_fails(void) {
    const int code = fork_and_wait(make_without_threads, NULL);
    CHECK(code == 0, "ended with %d (2 set-up, 3 pool size, 4 results)", code);
}

static void look_at_mask(void *arg, uint32_t task, uint32_t thread) {
    _Atomic uint32_t *const wrong = arg;
    (void)task;
    sleep_us(500);  // so that helpers get a share
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    const bool blocked =
        sigismember(&mask, SIGINT) && sigismember(&mask, SIGUSR1) && sigismember(&mask, SIGTERM);
    if (blocked != (thread > 0) || sigismember(&mask, SIGSEGV)) atomic_fetch_add(wrong, 1);
    atomic_fetch_add(&used[thread], 1);
}

static void test_signals(void) {
    pool *const p = new_pool(4);
    _Atomic uint32_t wrong = 0;
    memset(used, 0, sizeof used);
    for (int i = 0; i < 5; i++) pool_run(p, look_at_mask, &wrong, 8);
    CHECK(used[0] < 40, "no helper ran");
    CHECK(wrong == 0, "%u threads with a wrong signal mask", wrong);
    pool_free(p);
}

// Rounding up, results and operands flushed to zero.
static void set_hostile_floats(void) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(0x1f80 | 0x8040 | 0x4000);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)1 << 24 | 1u << 22));
#endif
}

static bool floats_are_lawful(void) {
    volatile float tiny = 1e-38f, tenth = 0.1f, one = 1, big = 1 << 24;
    return tiny * tenth > 0 && big + one == big;
}

static void look_at_floats(void *arg, uint32_t task, uint32_t thread) {
    _Atomic uint32_t *const wrong = arg;
    (void)task;
    sleep_us(500);
    if (thread && !floats_are_lawful()) atomic_fetch_add(wrong, 1);
    atomic_fetch_add(&used[thread], 1);
}

static void test_floating_point(void) {
    const uint64_t host = fpenv_enter();
    set_hostile_floats();
    CHECK(!floats_are_lawful(), "the hostile mode does nothing");
    const uint64_t hostile = fpenv_enter();
    CHECK(floats_are_lawful(), "fpenv_enter left the host's mode");
    fpenv_restore(hostile);
    CHECK(!floats_are_lawful(), "fpenv_restore did not give the mode back");
    pool *const p = new_pool(4);  // helpers inherit the hostile mode
    _Atomic uint32_t wrong = 0;
    memset(used, 0, sizeof used);
    for (int i = 0; i < 5; i++) pool_run(p, look_at_floats, &wrong, 8);
    pool_free(p);
    fpenv_restore(host);
    CHECK(used[0] < 40, "no helper ran");
    CHECK(wrong == 0, "%u helper tasks computed in the host's mode", wrong);
}

int main(void) {
    test_every_task_once();
    test_late_claims();
    test_one_task_stays_here();
    test_sleep_and_wake();
    test_fork();
    test_fork_with_lock_held();
    test_churn();
    test_refusals();
    test_thread_creation_fails();
    test_signals();
    test_floating_point();
    test_crowded();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
