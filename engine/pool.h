// Layer 0: a persistent thread pool. Work is split into tasks that are claimed one by one, so a
// thread that the system takes off its core delays its own task only; waiting threads spin for a
// bounded time, then sleep.
#ifndef MF_POOL_H
#define MF_POOL_H

#include "base.h"

typedef struct pool pool;
// Runs one task; `thread` in [0, n_threads) names scratch memory no other running task uses.
typedef void pool_task(void *arg, uint32_t task, uint32_t thread);

// Threads the process may run on (affinity mask, not just cores present); at least 1.
uint32_t pool_default_threads(void);
// n_threads - 1 helpers are started; if the system refuses some, the pool works with those it has.
int pool_new(pool **out, uint32_t n_threads);
void pool_free(pool *p);
uint32_t pool_threads(const pool *p);
// Runs tasks 0..n_tasks-1 and returns when all are done. Not re-entrant; one caller at a time. In a
// forked child, where helpers do not exist, the caller runs all tasks itself.
void pool_run(pool *p, pool_task *task, void *arg, uint32_t n_tasks);

// The floating-point environment the law needs (round to nearest, no flush to zero) for the calling
// thread; returns what it was, for fpenv_restore.
uint64_t fpenv_enter(void);
void fpenv_restore(uint64_t saved);

#endif
