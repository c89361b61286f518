// Owns the helper threads and the one job they share. Refuses a pool of no threads or of more than
// POOL_MAX_THREADS; a system that gives fewer threads makes a smaller pool, not an error.
//
// Invariant: `word` = {generation, next task}. The job's fields are written only while next is
// CLOSED, and whoever claims the last task closes it. A thread reads the word, then the fields,
// then claims by compare-and-swap of the whole word: a thread that slept in between holds an old
// generation, so its swap fails and the fields it read, old or new, are never used. The caller
// returns when every task is finished, and waits for no thread that claimed nothing.
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#include <fenv.h>
#endif

#include "alloc.h"
#include "error.h"

enum {
    POOL_MAX_THREADS = 1024,
    SPIN_NS = 80000,         // longer than the gap between two operators, shorter than a time slice
    SPIN_NS_CROWDED = 2000,  // more threads than cores: the awaited one may need this very core
    PAUSES_PER_LOOK = 16,    // at the clock: pauses last 10 to 140 cycles, a clock read about 60
    CACHE_LINE = 64
};
#define CLOSED UINT32_MAX

typedef struct helper {
    pool *pool;
    pthread_t id;
    uint32_t thread;
} helper;

struct pool {
    _Atomic uint64_t word;  // generation << 32 | next task
    char pad0[CACHE_LINE - sizeof(uint64_t)];
    _Atomic uint32_t unfinished;  // tasks of this generation
    _Atomic bool caller_sleeps;
    char pad1[CACHE_LINE - 2 * sizeof(uint32_t)];
    _Atomic(pool_task *) task;
    _Atomic(void *) arg;
    _Atomic uint32_t n_tasks;
    _Atomic uint32_t sleepers;  // helpers that must be woken
    _Atomic bool stop;

    pthread_mutex_t lock;
    pthread_cond_t work, done;
    uint32_t n_threads, generation;
    uint32_t spin_ns;
    unsigned forks;    // in a process with another number the helpers do not exist
    helper helpers[];  // [n_threads - 1], but room for as many as were asked for
};

// ---- floating point --------------------------------------------------------------------------

#if defined(__x86_64__)
uint64_t fpenv_enter(void) {
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(
        0x1f80);  // all exceptions masked, nearest even, no flush to zero, denormals are read
    return saved;
}

void fpenv_restore(uint64_t saved) { _mm_setcsr((unsigned)saved); }
#elif defined(__aarch64__)
uint64_t fpenv_enter(void) {
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved) : : "memory");
    __asm__ volatile("msr fpcr, xzr" : : : "memory");  // zero is what the law needs
    return saved;
}

void fpenv_restore(uint64_t saved) { __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory"); }
#else
uint64_t fpenv_enter(void) {
    const int saved = fegetround();
    fesetround(FE_TONEAREST);
    return (uint64_t)saved;
}

void fpenv_restore(uint64_t saved) { fesetround((int)saved); }
#endif

// ---- forks -----------------------------------------------------------------------------------

static atomic_uint forks;
static pthread_once_t forks_once = PTHREAD_ONCE_INIT;

static void count_fork(void) { atomic_fetch_add(&forks, 1); }
static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }
static bool is_forked(const pool *p) {
    return atomic_load_explicit(&forks, memory_order_relaxed) != p->forks;
}

// ---- waiting ---------------------------------------------------------------------------------

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // yield is a no-op on most cores
#endif
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static bool has_work(pool *p) {
    return (uint32_t)atomic_load(&p->word) != CLOSED || atomic_load(&p->stop);
}
static bool is_done(pool *p) { return atomic_load(&p->unfinished) == 0; }

// False when the time is up and the condition still does not hold.
static bool spin_until(bool (*holds)(pool *), pool *p) {
    if (holds(p)) return true;
    const uint64_t end = now_ns() + p->spin_ns;
    do {
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
            pause_briefly();
            if (holds(p)) return true;
        }
    } while (now_ns() < end);
    return false;
}

// Both sleeps announce themselves before the last look at the condition, and both wakers make the
// condition true before they look for sleepers (all sequentially consistent): one of the two sees
// the other. Each of these writes is a read-modify-write, because qemu lets a plain one be
// overtaken by the load behind it, which no ARM does; on x86 both are the same instruction.
static void wait_for_work(pool *p) {
    if (spin_until(has_work, p)) return;
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleepers, 1);
    while (!has_work(p)) pthread_cond_wait(&p->work, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

static void wait_until_done(pool *p) {
    if (spin_until(is_done, p)) return;
    pthread_mutex_lock(&p->lock);
    (void)atomic_exchange(&p->caller_sleeps, true);
    while (!is_done(p)) pthread_cond_wait(&p->done, &p->lock);
    atomic_store(&p->caller_sleeps, false);
    pthread_mutex_unlock(&p->lock);
}

static void wake_helpers(pool *p, uint32_t most) {
    const uint32_t sleepers = atomic_load(&p->sleepers);
    if (!sleepers) return;
    pthread_mutex_lock(&p->lock);
    if (most >= sleepers) {
        pthread_cond_broadcast(&p->work);
    } else {
        for (uint32_t i = 0; i < most; i++) pthread_cond_signal(&p->work);
    }
    pthread_mutex_unlock(&p->lock);
}

// ---- work ------------------------------------------------------------------------------------

static void work_off(pool *p, uint32_t thread) {
    uint64_t word = atomic_load(&p->word);
    while ((uint32_t)word != CLOSED) {
        pool_task *const task = atomic_load_explicit(&p->task, memory_order_relaxed);
        void *const arg = atomic_load_explicit(&p->arg, memory_order_relaxed);
        const uint32_t n = atomic_load_explicit(&p->n_tasks, memory_order_relaxed);
        const uint32_t next = (uint32_t)word;
        const uint64_t claimed = next + 1 == n ? word | CLOSED : word + 1;
        if (!atomic_compare_exchange_weak(&p->word, &word, claimed)) continue;
        task(arg, next, thread);
        if (atomic_fetch_sub(&p->unfinished, 1) == 1 && atomic_load(&p->caller_sleeps)) {
            pthread_mutex_lock(&p->lock);
            pthread_cond_signal(&p->done);
            pthread_mutex_unlock(&p->lock);
        }
        word = atomic_load(&p->word);
    }
}

static void *helper_main(void *arg) {
    const helper *const h = arg;
    fpenv_enter();
    for (;;) {
        wait_for_work(h->pool);
        if (atomic_load(&h->pool->stop)) return NULL;
        work_off(h->pool, h->thread);
    }
}

void pool_run(pool *p, pool_task *task, void *arg, uint32_t n_tasks) {
    if (n_tasks <= 1 || p->n_threads == 1 || is_forked(p)) {
        for (uint32_t i = 0; i < n_tasks; i++) task(arg, i, 0);
        return;
    }
    atomic_store_explicit(&p->task, task, memory_order_relaxed);
    atomic_store_explicit(&p->arg, arg, memory_order_relaxed);
    atomic_store_explicit(&p->n_tasks, n_tasks, memory_order_relaxed);
    atomic_store_explicit(&p->unfinished, n_tasks, memory_order_relaxed);
    (void)atomic_exchange(&p->word, (uint64_t)++p->generation << 32);
    wake_helpers(p, n_tasks - 1);
    work_off(p, 0);
    wait_until_done(p);
}

// ---- life ------------------------------------------------------------------------------------

uint32_t pool_default_threads(void) {
#if defined(__linux__)
    for (size_t n_cpus = CPU_SETSIZE; n_cpus <= (size_t)CPU_SETSIZE << 8; n_cpus *= 2) {
        cpu_set_t *const set = CPU_ALLOC(n_cpus);
        if (!set) break;
        const bool known =
            !sched_getaffinity(0, CPU_ALLOC_SIZE(n_cpus), set);  // fails if the set is too small
        const int n = known ? CPU_COUNT_S(CPU_ALLOC_SIZE(n_cpus), set) : 0;
        CPU_FREE(set);
        if (n > 0) return u32_min((uint32_t)n, POOL_MAX_THREADS);
    }
#endif
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online < 1 ? 1 : u32_min((uint32_t)online, POOL_MAX_THREADS);
}

// Helpers inherit the mask: the host's handlers run in the host's threads. A fault of a helper
// itself stays unblocked, or the host's crash reporter would never see it.
static void block_signals(sigset_t *saved) {
    static const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t set;
    sigfillset(&set);
    for (size_t i = 0; i < sizeof own_faults / sizeof *own_faults; i++)
        sigdelset(&set, own_faults[i]);
    pthread_sigmask(SIG_SETMASK, &set, saved);
}

int pool_new(pool **out, uint32_t n_threads) {
    if (n_threads < 1 || n_threads > POOL_MAX_THREADS) {
        return fail(MF_ARG, "%u threads: give 1 to %d", n_threads, POOL_MAX_THREADS);
    }
    pool *const p = mem_alloc(1, sizeof *p + (n_threads - 1) * sizeof *p->helpers);
    if (!p) return MF_NOMEM;
    pthread_once(&forks_once, watch_forks);
    atomic_store(&p->word, CLOSED);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->done, NULL);
    p->forks = atomic_load(&forks);
    p->spin_ns = n_threads > pool_default_threads() ? SPIN_NS_CROWDED : SPIN_NS;
    p->n_threads = 1;
    sigset_t saved;
    block_signals(&saved);
    while (p->n_threads < n_threads) {
        helper *const h = &p->helpers[p->n_threads - 1];
        h->pool = p;
        h->thread = p->n_threads;
        if (pthread_create(&h->id, NULL, helper_main, h)) break;
        p->n_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
    *out = p;
    return MF_OK;
}

void pool_free(pool *p) {
    if (!p) return;
    if (!is_forked(p)) {  // in a child there is nobody to join, and destroying a condition variable
                          // waits for its waiters
        (void)atomic_exchange(&p->stop, true);
        wake_helpers(p, UINT32_MAX);
        for (uint32_t i = 0; i + 1 < p->n_threads; i++) pthread_join(p->helpers[i].id, NULL);
        pthread_mutex_destroy(&p->lock);
        pthread_cond_destroy(&p->work);
        pthread_cond_destroy(&p->done);
    }
    mem_free(p);
}

uint32_t pool_threads(const pool *p) { return p->n_threads; }
