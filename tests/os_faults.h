// A table of file calls that fails, writes short or kills the process at the N-th call of a kind.
#ifndef MF_TESTS_OS_FAULTS_H
#define MF_TESTS_OS_FAULTS_H

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../engine/os_calls.h"

enum fault_call {
    FAULT_OPEN,
    FAULT_STAT,
    FAULT_FSTAT,
    FAULT_CHMOD,
    FAULT_LOCK,
    FAULT_MAP,
    FAULT_WRITE,
    FAULT_SYNC,
    FAULT_RENAME,
    FAULT_UNLINK,
    FAULT_CLOSE,
    FAULT_CALLS
};

static const char *const fault_names[FAULT_CALLS] = {
    "open", "stat", "fstat", "chmod", "lock", "map", "write", "sync", "rename", "unlink", "close",
};

enum fault_manner {
    FAULT_ERROR,      // the call does nothing and gives fault.error (close closes nevertheless)
    FAULT_SHORT,      // a write writes half, at least 1 byte
    FAULT_DIE_BEFORE  // the process is killed; a write has written half
};

static struct {
    int call, manner, error;
    long at;                  // the call that is struck, from 0
    long calls[FAULT_CALLS];  // seen so far
    int struck;
} fault;

static int fault_strikes(int call) {
    if (fault.calls[call]++ != fault.at || fault.call != call) return 0;
    fault.struck = 1;
    if (fault.manner == FAULT_DIE_BEFORE && call != FAULT_WRITE) kill(getpid(), SIGKILL);
    errno = fault.error;
    return fault.manner == FAULT_ERROR || call == FAULT_WRITE;
}

static int fault_open(int folder, const char *path, int flags, mode_t mode) {
    if (fault_strikes(FAULT_OPEN)) return -1;
    return os_calls_system.open(folder, path, flags, mode);
}

static int fault_stat(struct stat *out, int folder, const char *path, int flags) {
    if (fault_strikes(FAULT_STAT)) return -1;
    return os_calls_system.stat(out, folder, path, flags);
}

static int fault_fstat(struct stat *out, int fd) {
    return fault_strikes(FAULT_FSTAT) ? -1 : os_calls_system.fstat(out, fd);
}

static int fault_chmod(int fd, mode_t mode) {
    return fault_strikes(FAULT_CHMOD) ? -1 : os_calls_system.chmod(fd, mode);
}

static int fault_lock(int fd, int operation) {
    return fault_strikes(FAULT_LOCK) ? -1 : os_calls_system.lock(fd, operation);
}

static void *fault_map(size_t n, int fd) {
    return fault_strikes(FAULT_MAP) ? MAP_FAILED : os_calls_system.map(n, fd);
}

static ssize_t fault_write(int fd, const void *bytes, size_t n, off_t offset) {
    if (!fault_strikes(FAULT_WRITE)) return os_calls_system.write(fd, bytes, n, offset);
    if (fault.manner == FAULT_ERROR) return -1;
    const ssize_t written = os_calls_system.write(fd, bytes, n > 1 ? n / 2 : n, offset);
    if (fault.manner == FAULT_DIE_BEFORE) kill(getpid(), SIGKILL);
    return written;
}

static void fault_begin_sync(int fd) { os_calls_system.begin_sync(fd); }

static int fault_sync(int fd) { return fault_strikes(FAULT_SYNC) ? -1 : os_calls_system.sync(fd); }

static int fault_rename(int folder, const char *from, const char *to) {
    return fault_strikes(FAULT_RENAME) ? -1 : os_calls_system.rename(folder, from, to);
}

static int fault_unlink(int folder, const char *path) {
    return fault_strikes(FAULT_UNLINK) ? -1 : os_calls_system.unlink(folder, path);
}

static int fault_close(int fd) {
    const int strikes = fault_strikes(FAULT_CLOSE), error = errno;
    const int result = os_calls_system.close(fd);
    if (!strikes) return result;
    errno = error;
    return -1;
}

// From here on, until fault_off.
static void fault_on(int call, long at, int manner, int error) {
    static const os_calls table = {
        .open = fault_open,
        .stat = fault_stat,
        .fstat = fault_fstat,
        .chmod = fault_chmod,
        .lock = fault_lock,
        .map = fault_map,
        .write = fault_write,
        .begin_sync = fault_begin_sync,
        .sync = fault_sync,
        .rename = fault_rename,
        .unlink = fault_unlink,
        .close = fault_close,
    };
    memset(&fault, 0, sizeof fault);
    fault.call = call;
    fault.at = at;
    fault.manner = manner;
    fault.error = error;
    os_calls_replace(&table);
}

// Returns whether a call was struck.
static int fault_off(void) {
    os_calls_replace(NULL);
    return fault.struck;
}

#endif
