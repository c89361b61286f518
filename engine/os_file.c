// Owns the replacement of files. Refuses targets that are no regular file. Invariant: the name of a
// temporary file that somebody holds a lock on is created, renamed and removed by that one alone;
// so whoever gets the lock of a file and still finds it under its name may remove it.
#define _DEFAULT_SOURCE
#include "os_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>

#include "alloc.h"
#include "error.h"
#include "os_calls.h"
#include "os_posix.h"

enum {
    NEW_MODE = 0600,      // also while a file is incomplete, whatever the old one's is
    MODE_BITS = 0777,     // what is taken over from the old file
    NAME_KEPT = 200,      // bytes of a target's name that go into the temporary's
    CLAIM_ROUNDS = 2,     // over all slots: another's clean-up may cost a few
    SYNC_BYTES = 8 << 20  // given to the disk at a time: the last fsync has little to wait for
};

static int open_at(int folder, const char *path, int flags, mode_t mode) {
    int fd;
    do {
        fd = os_calls_now()->open(folder, path, flags | O_CLOEXEC | O_NOCTTY, mode);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

static int lock_now(int fd) {
    int result;
    do {
        result = os_calls_now()->lock(fd, LOCK_EX | LOCK_NB);
    } while (result && errno == EINTR);
    return result;
}

static int sync_fd(int fd) {
    int result;
    do {
        result = os_calls_now()->sync(fd);
    } while (result && errno == EINTR);
    return result;
}

// Opens the folder of r->path and keeps the name in it: from here on a renamed folder or a changed
// link above it cannot lead elsewhere.
static int open_folder(os_replace *r) {
    const char *slash = strrchr(r->path, '/');
    const char *name = slash ? slash + 1 : r->path;
    const size_t n = strlen(name), n_folder = slash ? (size_t)(slash - r->path) : 0;
    if (!n) return fail(MF_IO, "\"%s\" is not the path of a file", os_path_tail(r->path));
    if (n >= OS_NAME_BYTES) return os_refused("save", r->path, ENAMETOOLONG, "");
    memcpy(r->name, name, n + 1);
    char *folder = mem_alloc(n_folder + 2, 1);
    if (!folder) return MF_NOMEM;
    memcpy(folder, n_folder ? r->path : slash ? "/" : ".", n_folder ? n_folder : 1);
    r->folder = open_at(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY, 0);
    const int error = errno;
    mem_free(folder);
    if (r->folder < 0) return os_refused("open the folder of the file", r->path, error, "");
    return MF_OK;
}

static int examine_target(os_replace *r) {
    struct stat st;
    r->mode = NEW_MODE;
    if (os_calls_now()->stat(&st, r->folder, r->name, AT_SYMLINK_NOFOLLOW)) {
        return errno == ENOENT ? MF_OK : os_refused("examine", r->path, errno, "");
    }
    if (S_ISLNK(st.st_mode)) {
        return fail(MF_IO, "%s: is a symbolic link; give the path of the file it points to",
                    os_path_tail(r->path));
    }
    TRY(os_require_regular(st.st_mode, r->path));
    r->mode = st.st_mode & MODE_BITS;
    return MF_OK;
}

static void name_slot(os_replace *r, int slot) {
    size_t n = strlen(r->name);
    if (n > NAME_KEPT) {
        n = NAME_KEPT;
        while (n && (r->name[n] & 0xc0) == 0x80) n--;  // whole UTF-8 characters
    }
    snprintf(r->temporary, sizeof r->temporary, ".%.*s.save%d", (int)n, r->name, slot);
}

// Whether the temporary name means the file that is open as fd.
static bool is_named(const os_replace *r, int fd) {
    struct stat a, b;
    return !os_calls_now()->fstat(&a, fd) &&
           !os_calls_now()->stat(&b, r->folder, r->temporary, AT_SYMLINK_NOFOLLOW) &&
           a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

// Removes the temporary file of this slot if its writer is dead. What cannot be examined, opened or
// locked stays; claim_slot then passes over it.
static void clean_slot(const os_replace *r) {
    const os_calls *sys = os_calls_now();
    struct stat st;
    if (sys->stat(&st, r->folder, r->temporary, AT_SYMLINK_NOFOLLOW) || !S_ISREG(st.st_mode)) {
        return;
    }
    // Some systems lock only what is open for writing, and the mode may not allow that.
    int fd = open_at(r->folder, r->temporary, O_RDWR | O_NOFOLLOW | O_NONBLOCK, 0);
    if (fd < 0 && errno == EACCES) {
        fd = open_at(r->folder, r->temporary, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0);
    }
    if (fd < 0) return;
    if (!lock_now(fd) && is_named(r, fd)) sys->unlink(r->folder, r->temporary);
    sys->close(fd);
}

// Creates and locks the temporary file of this slot: r->fd, or -1 if somebody else has it.
static int claim_slot(os_replace *r) {
    const os_calls *sys = os_calls_now();
    const int fd =
        open_at(r->folder, r->temporary, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, NEW_MODE);
    if (fd < 0) {
        if (errno == EEXIST) return MF_OK;
        return os_refused("create a file beside", r->path, errno, "");
    }
    if (lock_now(fd)) {
        // Between the two calls somebody may have locked the file as a dead one's, to remove it.
        const int error = errno;
        if (error != EWOULDBLOCK) sys->unlink(r->folder, r->temporary);
        sys->close(fd);
        if (error == EWOULDBLOCK) return MF_OK;
        return os_refused("lock a file beside", r->path, error, "");
    }
    if (is_named(r, fd))
        r->fd = fd;
    else
        sys->close(fd);
    return MF_OK;
}

static int claim(os_replace *r) {
    for (int slot = 0; slot < OS_REPLACE_SLOTS; slot++) {
        name_slot(r, slot);
        clean_slot(r);
    }
    for (int i = 0; i < CLAIM_ROUNDS * OS_REPLACE_SLOTS && r->fd < 0; i++) {
        name_slot(r, i % OS_REPLACE_SLOTS);
        TRY(claim_slot(r));
    }
    if (r->fd >= 0) return MF_OK;
    return fail(MF_IO,
                "%s: all %d names for a new file beside it are taken, the last is %s; wait for the "
                "programs that save it, or remove these files",
                os_path_tail(r->path), OS_REPLACE_SLOTS, r->temporary);
}

static void let_go(os_replace *r) {
    if (r->fd >= 0) os_calls_now()->close(r->fd);
    if (r->folder >= 0) os_calls_now()->close(r->folder);
    r->fd = r->folder = -1;
}

int os_replace_begin(os_replace *r, const char *path) {
    *r = (os_replace){.path = path, .folder = -1, .fd = -1};
    int status;
    TRY_GOTO(refuse, open_folder(r));
    TRY_GOTO(refuse, examine_target(r));
    TRY_GOTO(refuse, claim(r));
    return MF_OK;
refuse:
    let_go(r);
    return status;
}

int os_replace_write(os_replace *r, uint64_t offset, const void *bytes, size_t n) {
    uint64_t end;
    if (!u64_add(&end, offset, n) || end > INT64_MAX || r->fd < 0) {
        return fail(MF_INTERNAL, "%s: a write of %zu bytes at %llu", os_path_tail(r->path), n,
                    (unsigned long long)offset);
    }
    const uint8_t *p = bytes;
    while (n) {
        const ssize_t written = os_calls_now()->write(r->fd, p, n, (off_t)offset);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return os_refused("write", r->path, written ? errno : ENOSPC, "");
        p += written, n -= (size_t)written, offset += (size_t)written;
        r->n_kept += (uint64_t)written;
    }
    if (r->n_kept >= SYNC_BYTES) {
        os_calls_now()->begin_sync(r->fd);
        r->n_kept = 0;
    }
    return MF_OK;
}

int os_replace_commit(os_replace *r) {
    const os_calls *sys = os_calls_now();
    int status = MF_OK;
    if (sys->chmod(r->fd, r->mode))
        status = os_refused("set the permissions of", r->path, errno, "");
    else if (sync_fd(r->fd))
        status = os_refused("bring to the disk", r->path, errno, "");
    else if (sys->rename(r->folder, r->temporary, r->name))
        status = os_refused("replace", r->path, errno, "");
    if (status) {
        os_replace_abort(r);
        return status;
    }
    // The lock is held to the end: until the rename the name is this writer's, and after it no
    // longer means this file. Some file systems cannot synchronise a folder and say EINVAL.
    if (sync_fd(r->folder) && errno != EINVAL) {
        status =
            os_refused("bring the folder to the disk of", r->path, errno,
                       "; the new file is in place, but a power cut may bring the old one back");
    }
    let_go(r);
    return status;
}

void os_replace_abort(os_replace *r) {
    if (r->fd >= 0) os_calls_now()->unlink(r->folder, r->temporary);
    let_go(r);
}
