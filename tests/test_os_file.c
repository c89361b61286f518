// Replacing a file: at every moment, whatever fails and whoever dies, the old or the new one is
// there, whole, and the next save leaves nothing beside it.
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "../engine/alloc.h"
#include "../engine/error.h"
#include "../engine/os_file.h"
#include "../engine/os_posix.h"
#include "counted.h"
#include "os_faults.h"

enum {
    OLD = 'o',
    NEW = 'n',
    OLD_BYTES = 5000,
    NEW_BYTES = 9000,
    PIECE = 1000,  // bytes a save writes at a time
    SAVES = 200,   // of each of two processes
    MANY_CALLS = 64
};

static char folder[] = "/tmp/minfer_file_XXXXXX";

static const char *in_folder(const char *name) {
    static char paths[16][512];
    static int next;
    char *path = paths[next++ % 16];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void must(bool ok, const char *what) {
    if (ok) return;
    printf("FAILED: %s: %s\n", what, strerror(errno));
    exit(1);
}

// A file of n bytes, each `letter`.
static void put_file(const char *path, int letter, size_t n) {
    FILE *f = fopen(path, "wb");
    must(f != NULL, path);
    for (size_t i = 0; i < n; i++) fputc(letter, f);
    must(!fclose(f), path);
}

// The letter a whole old or new file consists of; '?' for anything else, '-' for no file.
static int whole_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return '-';
    char bytes[NEW_BYTES + 1];
    const size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    const int letter = n ? bytes[0] : '?';
    if (n != (letter == OLD ? OLD_BYTES : NEW_BYTES)) return '?';
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] != letter) return '?';
    }
    return letter;
}

static int save(const char *path, int letter) {
    const size_t n = letter == OLD ? OLD_BYTES : NEW_BYTES;
    char piece[PIECE];
    memset(piece, letter, sizeof piece);
    os_replace r;
    TRY(os_replace_begin(&r, path));
    int status = MF_OK;
    // The first piece last, as a header that is written once all is known.
    for (size_t at = PIECE; at < n && !status; at += PIECE) {
        status = os_replace_write(&r, at, piece, PIECE);
    }
    if (!status) status = os_replace_write(&r, 0, piece, PIECE);
    if (!status) return os_replace_commit(&r);
    os_replace_abort(&r);
    os_replace_abort(&r);
    return status;
}

// Files in the folder whose name has the word.
static int count_files(const char *word) {
    DIR *dir = opendir(folder);
    must(dir != NULL, folder);
    int n = 0;
    for (struct dirent *e; (e = readdir(dir)) != NULL;) n += strstr(e->d_name, word) != NULL;
    closedir(dir);
    return n;
}

static int open_files(void) {
    int n = 0;
    for (int fd = 0; fd < 256; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static mode_t mode_of(const char *path) {
    struct stat st;
    must(!lstat(path, &st), path);
    return st.st_mode & 07777;
}

static void expect(const char *path, int status, const char *words) {
    const int got = save(path, NEW);
    CHECK(got == status, "%s: status %d, not %d", path, got, status);
    CHECK(strstr(mf_last_error(), words) != NULL, "\"%s\" lacks \"%s\"", mf_last_error(), words);
}

static void test_new_and_old(void) {
    const char *path = in_folder("s.kv");
    CHECK(!save(path, OLD) && whole_file(path) == OLD, "%s", mf_last_error());
    CHECK(mode_of(path) == 0600, "mode %o", mode_of(path));
    must(!chmod(path, 04640), path);
    CHECK(!save(path, NEW) && whole_file(path) == NEW, "%s", mf_last_error());
    CHECK(mode_of(path) == 0640, "mode %o", mode_of(path));
    CHECK(count_files(".save") == 0, "%d temporary files", count_files(".save"));

    must(!chdir(folder), folder);
    CHECK(!save("s.kv", OLD) && whole_file(path) == OLD, "a name alone: %s", mf_last_error());
    must(!chdir("/"), "/");
    must(!link(path, in_folder("hard")), "link");
    CHECK(!save(path, NEW) && whole_file(in_folder("hard")) == OLD, "a hard link keeps the old");
    unlink(in_folder("hard"));
    unlink(path);
}

static void test_refused_targets(void) {
    const int before = open_files();
    expect("", MF_IO, "not the path of a file");
    expect("/", MF_IO, "not the path of a file");
    expect(in_folder(""), MF_IO, "not the path of a file");
    expect(folder, MF_IO, "is a folder");
    expect(in_folder("."), MF_IO, "is a folder");
    expect(in_folder("none/s.kv"), MF_IO, "cannot open the folder of the file: No such file");
    expect("/dev/full", MF_IO, "is a character device");
    must(!mkfifo(in_folder("fifo"), 0600), "mkfifo");
    expect(in_folder("fifo"), MF_IO, "is a FIFO");
    unlink(in_folder("fifo"));

    char name[300] = {0};
    memset(name, 'x', 256);
    expect(in_folder(name), MF_IO, "File name too long");
    name[255] = '\0';
    CHECK(!save(in_folder(name), NEW), "255 bytes of name: %s", mf_last_error());
    unlink(in_folder(name));
    CHECK(open_files() == before, "%d files open, not %d", open_files(), before);
    CHECK(count_files(".save") == 0, "%d temporary files", count_files(".save"));
}

static void test_links(void) {
    const char *victim = in_folder("victim"), *path = in_folder("s.kv");
    put_file(victim, OLD, OLD_BYTES);
    must(!symlink("victim", path), "symlink");
    expect(path, MF_IO, "is a symbolic link");
    CHECK(whole_file(victim) == OLD && readlink(path, (char[8]){0}, 8) == 6, "nothing followed");
    unlink(path);
    must(!symlink("absent", path), "symlink");
    expect(path, MF_IO, "is a symbolic link");
    CHECK(count_files("absent") == 0, "nothing created through a link");
    unlink(path);

    // Links planted under the names of the temporary files lead nowhere either.
    must(!symlink("victim", in_folder(".s.kv.save0")), "symlink");
    must(!link(victim, in_folder(".s.kv.save1")), "link");
    must(!mkdir(in_folder(".s.kv.save2"), 0700), "mkdir");
    must(!mkfifo(in_folder(".s.kv.save3"), 0600), "mkfifo");
    CHECK(!save(path, NEW) && whole_file(path) == NEW, "%s", mf_last_error());
    CHECK(whole_file(victim) == OLD, "the victim of a planted link");
    CHECK(count_files(".save") == 3, "%d left: only a dead writer's is removed",
          count_files(".save"));
    rmdir(in_folder(".s.kv.save2"));
    unlink(in_folder(".s.kv.save0"));
    unlink(in_folder(".s.kv.save3"));
    unlink(victim);
    unlink(path);
}

static void test_writers_at_work(void) {
    const char *path = in_folder("s.kv");
    os_replace r[OS_REPLACE_SLOTS];
    for (int i = 0; i < OS_REPLACE_SLOTS; i++) {
        CHECK(!os_replace_begin(&r[i], path), "writer %d: %s", i, mf_last_error());
        CHECK(count_files(".save") == i + 1, "%d files of %d writers", count_files(".save"), i + 1);
    }
    expect(path, MF_IO, "all 16 names");
    char piece[NEW_BYTES];
    memset(piece, NEW, sizeof piece);
    for (int i = 0; i < OS_REPLACE_SLOTS; i++) {
        CHECK(!os_replace_write(&r[i], 0, piece, sizeof piece), "%s", mf_last_error());
        CHECK(os_replace_write(&r[i], UINT64_MAX, piece, 1) == MF_INTERNAL, "an offset that wraps");
        if (i % 2)
            os_replace_abort(&r[i]);
        else
            CHECK(!os_replace_commit(&r[i]), "%s", mf_last_error());
        CHECK(whole_file(path) == NEW, "after writer %d", i);
    }
    CHECK(os_replace_write(&r[0], 0, piece, 1) == MF_INTERNAL, "a write after the end");
    CHECK(count_files(".save") == 0, "%d temporary files", count_files(".save"));
    unlink(path);
}

// Each call of each kind fails once: the old file stands, nothing lies beside it.
static void test_faults(void) {
    static const int errors[] = {EIO, ENOSPC, EACCES};
    const char *path = in_folder("s.kv");
    for (int call = 0; call < FAULT_CALLS; call++) {
        for (long at = 0, struck = 1; struck; at++) {
            const int error = errors[at % 3], before = open_files();
            put_file(path, OLD, OLD_BYTES);
            fault_on(call, at, FAULT_ERROR, error);
            const int status = save(path, NEW);
            struck = fault_off();
            const int left = whole_file(path);
            // A close may fail once all is on the disk, and what only looks for leftovers too. Who
            // cannot tell whether a name is still his leaves it to the next save.
            const bool looks = call == FAULT_STAT || call == FAULT_FSTAT;
            const bool may_pass = call == FAULT_CLOSE || call == FAULT_UNLINK || !struck ||
                                  call == FAULT_FSTAT || (at && (looks || call == FAULT_OPEN));
            // The last sync is that of the folder, after the rename.
            const bool is_folder = call == FAULT_SYNC && at == 1 && struck;
            CHECK(status ? status == MF_IO : may_pass, "%s %ld: status %d", fault_names[call], at,
                  status);
            CHECK(left == (status && !is_folder ? OLD : NEW), "%s %ld: the file is %c",
                  fault_names[call], at, left);
            CHECK(!status || strstr(mf_last_error(), strerror(error)), "%s %ld: \"%s\"",
                  fault_names[call], at, mf_last_error());
            CHECK(count_files(".save") <= looks, "%s %ld: %d temporary files", fault_names[call],
                  at, count_files(".save"));
            CHECK(!looks || (!save(path, NEW) && !count_files(".save")), "%s %ld: the next save",
                  fault_names[call], at);
            CHECK(open_files() == before, "%s %ld: %d files open, not %d", fault_names[call], at,
                  open_files(), before);
            CHECK(at < MANY_CALLS, "%s: no end", fault_names[call]);
            if (at >= MANY_CALLS) break;
        }
    }
    // Failing to remove a leftover, or the own file after a failure, leaves it to the next save.
    put_file(in_folder(".s.kv.save0"), OLD, 10);
    fault_on(FAULT_UNLINK, 0, FAULT_ERROR, EIO);
    CHECK(!save(path, NEW) && fault_off(), "a leftover that stays: %s", mf_last_error());
    CHECK(count_files(".save") == 1 && !save(path, NEW) && !count_files(".save"), "the next save");
    // Folders that cannot be synchronised at all.
    fault_on(FAULT_SYNC, 1, FAULT_ERROR, EINVAL);
    CHECK(!save(path, NEW) && fault_off(), "%s", mf_last_error());
    fault_on(FAULT_SYNC, 1, FAULT_ERROR, EIO);
    expect(path, MF_IO, "the new file is in place, but a power cut may bring the old one back");
    fault_off();
    mem_fail_after(0);
    expect(path, MF_NOMEM, "out of memory");
    mem_fail_after(SIZE_MAX);
    CHECK(count_files(".save") == 0, "%d temporary files", count_files(".save"));
    unlink(path);
}

static void test_interrupted_and_short(void) {
    static const int calls[] = {FAULT_OPEN, FAULT_LOCK, FAULT_WRITE, FAULT_SYNC};
    const char *path = in_folder("s.kv");
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (long at = 0, struck = 1; struck && at < MANY_CALLS; at++) {
            put_file(path, OLD, OLD_BYTES);
            fault_on(calls[i], at, FAULT_ERROR, EINTR);
            CHECK(!save(path, NEW), "%s %ld interrupted: %s", fault_names[calls[i]], at,
                  mf_last_error());
            struck = fault_off();
            CHECK(whole_file(path) == NEW, "%s %ld interrupted", fault_names[calls[i]], at);
        }
    }
    for (long at = 0, struck = 1; struck && at < MANY_CALLS; at++) {
        put_file(path, OLD, OLD_BYTES);
        fault_on(FAULT_WRITE, at, FAULT_SHORT, 0);
        CHECK(!save(path, NEW), "write %ld short: %s", at, mf_last_error());
        struck = fault_off();
        CHECK(whole_file(path) == NEW, "write %ld short", at);
    }
    unlink(path);
}

// The process is killed in each call of each kind, in a write half-way through it.
static void test_killed(void) {
    const char *path = in_folder("s.kv");
    int deaths = 0;
    fflush(stdout);
    for (int call = 0; call < FAULT_CALLS; call++) {
        for (long at = 0, died = 1; died; at++) {
            put_file(path, OLD, OLD_BYTES);
            const pid_t child = fork();
            must(child >= 0, "fork");
            if (!child) {
                fault_on(call, at, FAULT_DIE_BEFORE, 0);
                _exit(save(path, NEW));
            }
            int how;
            must(waitpid(child, &how, 0) == child, "waitpid");
            died = WIFSIGNALED(how);
            deaths += died != 0;
            CHECK(died || !WEXITSTATUS(how), "%s %ld: status %d", fault_names[call], at,
                  WEXITSTATUS(how));
            const int left = whole_file(path);
            CHECK(left == OLD || left == NEW, "killed in %s %ld: the file is %c", fault_names[call],
                  at, left);
            CHECK(!save(path, NEW) && whole_file(path) == NEW, "after %s %ld: %s",
                  fault_names[call], at, mf_last_error());
            CHECK(count_files(".save") == 0, "after %s %ld: %d temporary files", fault_names[call],
                  at, count_files(".save"));
            if (at >= MANY_CALLS) break;
        }
    }
    CHECK(deaths > 30, "only %d deaths", deaths);
    unlink(path);
}

// Two processes save one path all the time; a third sees whole files only.
static void test_two_processes(void) {
    const char *path = in_folder("s.kv");
    put_file(path, OLD, OLD_BYTES);
    pid_t children[2];
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        children[i] = fork();
        must(children[i] >= 0, "fork");
        if (children[i]) continue;
        int failures = 0;
        for (int k = 0; k < SAVES; k++) failures += save(path, i ? NEW : OLD) != 0;
        if (failures) fprintf(stderr, "%s\n", mf_last_error());
        _exit(failures != 0);
    }
    int running = 2, reads = 0, bad = 0;
    while (running) {
        const int letter = whole_file(path);
        bad += letter != OLD && letter != NEW;
        reads++;
        int how;
        const pid_t ended = waitpid(-1, &how, WNOHANG);
        if (ended <= 0) continue;
        running--;
        CHECK(WIFEXITED(how) && !WEXITSTATUS(how), "a writer ended with %d", how);
    }
    CHECK(bad == 0, "%d of %d reads saw a file that is not whole", bad, reads);
    CHECK(count_files(".save") == 0, "%d temporary files", count_files(".save"));
    unlink(path);
}

// In a child that is nobody, so that permissions count for root as well.
static void test_read_only_folder(void) {
    const char *path = in_folder("closed/s.kv");
    must(!mkdir(in_folder("closed"), 0755), "mkdir");
    put_file(path, OLD, OLD_BYTES);
    must(!chmod(path, 0666) && !chmod(in_folder("closed"), 0555) && !chmod(folder, 0755), "chmod");
    fflush(stdout);
    const pid_t child = fork();
    must(child >= 0, "fork");
    if (!child) {
        if (!geteuid() && setuid(65534)) _exit(2);
        const int status = save(path, NEW);
        _exit(!(status == MF_IO && strstr(mf_last_error(), "Permission denied")));
    }
    int how;
    must(waitpid(child, &how, 0) == child, "waitpid");
    if (WIFEXITED(how) && WEXITSTATUS(how) == 2) {
        printf(
            "read-only folder: root may write there and cannot become another user here; "
            "only the injected refusals were tested\n");
    } else {
        CHECK(WIFEXITED(how) && !WEXITSTATUS(how), "a read-only folder: %d", how);
    }
    CHECK(whole_file(path) == OLD, "the old file in a read-only folder");
    must(!chmod(in_folder("closed"), 0755), "chmod");
    unlink(path);
    CHECK(!rmdir(in_folder("closed")), "a temporary file in the read-only folder");
}

// A limit on the size of files stands for a full disk: the system itself writes short, then fails.
static void test_full_disk(void) {
    const char *path = in_folder("s.kv");
    put_file(path, OLD, OLD_BYTES);
    struct rlimit old;
    must(!getrlimit(RLIMIT_FSIZE, &old), "getrlimit");
    struct rlimit low = {.rlim_cur = OLD_BYTES + 100, .rlim_max = old.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    must(!setrlimit(RLIMIT_FSIZE, &low), "setrlimit");
    const int status = save(path, NEW);
    must(!setrlimit(RLIMIT_FSIZE, &old), "setrlimit");
    CHECK(status == MF_IO && strstr(mf_last_error(), "File too large"), "status %d: %s", status,
          mf_last_error());
    CHECK(whole_file(path) == OLD && !count_files(".save"), "the old file alone");
    unlink(path);
}

// Mapping, the reading half, fails call by call as well.
static void test_map_faults(void) {
    static const int calls[] = {FAULT_STAT, FAULT_OPEN, FAULT_FSTAT, FAULT_MAP};
    const char *path = in_folder("s.kv");
    put_file(path, OLD, OLD_BYTES);
    const int before = open_files();
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        os_map map;
        fault_on(calls[i], 0, FAULT_ERROR, EIO);
        const int status = os_map_open(&map, path, " (a note)");
        CHECK(fault_off() && status == MF_IO, "%s: status %d", fault_names[calls[i]], status);
        CHECK(strstr(mf_last_error(), strerror(EIO)) && strstr(mf_last_error(), " (a note)"), "%s",
              mf_last_error());
        CHECK(open_files() == before, "%s: %d files open", fault_names[calls[i]], open_files());
    }
    unlink(path);
}

int main(void) {
    must(mkdtemp(folder) != NULL, folder);
    const size_t alive = mem_alive();
    test_new_and_old();
    test_refused_targets();
    test_links();
    test_writers_at_work();
    test_faults();
    test_interrupted_and_short();
    test_killed();
    test_two_processes();
    test_read_only_folder();
    test_full_disk();
    test_map_faults();
    CHECK(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
    CHECK(!rmdir(folder), "%s is not empty", folder);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
