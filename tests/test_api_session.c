// The session functions of minfer.h: what each refuses, with which status and which words, and that
// a refusal changes neither engine nor file, whatever it ran into: a bad pointer, a failed
// allocation, or a system call that fails.
#define _DEFAULT_SOURCE
#include <dirent.h>
#include <limits.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "api_kv_test.h"
#include "os_faults.h"

static char folder[64], path[96], other[96];  // files in a folder that is otherwise empty

// The logits that a sequence would answer with; it is as before afterwards.
static void next_logits(float logits[VOCAB], mf_engine *e, int32_t seq) {
    const int32_t token = 5;
    const mf_chunk c = {.seq = seq, .logits = MF_LOGITS_LAST, .tokens = &token, .n_tokens = 1};
    ACCEPTED(mf_engine_forward(logits, VOCAB, e, &c, 1));
    ACCEPTED(mf_kv_trim(e, seq, 1));
}

// ---- files -----------------------------------------------------------------------------------

typedef struct content {
    size_t n;
    uint8_t bytes[1 << 16];
} content;

static void read_content(content *c, const char *name) {
    memset(c, 0, sizeof *c);
    FILE *const file = fopen(name, "rb");
    if (!file) return;
    c->n = fread(c->bytes, 1, sizeof c->bytes, file);
    fclose(file);
    check(c->n < sizeof c->bytes, "%s is too large for this test", name);
}

static bool equal(const content *a, const content *b) {
    return a->n == b->n && !memcmp(a->bytes, b->bytes, a->n);
}

// Names in the folder.
static int count_files(void) {
    int n = 0;
    DIR *const dir = opendir(folder);
    if (!dir) return -1;
    while (readdir(dir)) n++;
    closedir(dir);
    return n - 2;
}

static void make_folder(void) {
    strcpy(folder, "/tmp/minfer_session_XXXXXX");
    if (!mkdtemp(folder)) {
        printf("FAILED: no folder for the test\n");
        exit(1);
    }
    snprintf(path, sizeof path, "%s/a.kv", folder);
    snprintf(other, sizeof other, "%s/b.kv", folder);
}

// ---- arguments -------------------------------------------------------------------------------

static void *const untouched = (void *)(uintptr_t)64;  // what a refusal must leave

static void test_arguments(mf_engine *e) {
    void *host = untouched;
    size_t n = 7;
    const int32_t zero = 0, one[] = {0, 1, 2, 3, 0}, same[] = {1, 1};
    mf_kv_save_options s = {.size = sizeof s};
    mf_kv_load_options l = {.size = sizeof l};
    unlink(path);
    KEPT(MF_ARG, "path is NULL", mf_kv_save(e, NULL, NULL));
    KEPT(MF_ARG, "engine is NULL", mf_kv_save(NULL, path, NULL));
    s.n_seqs = 1;
    KEPT(MF_ARG, "options.seqs is NULL", mf_kv_save(e, path, &s));
    s.seqs = one;
    s.n_seqs = 5;
    KEPT(MF_ARG, "n_seqs is 5; this engine has 4", mf_kv_save(e, path, &s));
    s.n_seqs = SIZE_MAX;
    KEPT(MF_ARG, "this engine has 4", mf_kv_save(e, path, &s));
    s.seqs = same;
    s.n_seqs = 2;
    KEPT(MF_ARG, "sequence 1 twice", mf_kv_save(e, path, &s));
    s = (mf_kv_save_options){.size = sizeof s, .host_bytes = 1};
    KEPT(MF_ARG, "options.host_state is NULL", mf_kv_save(e, path, &s));
    check(!count_files(), "a refused save left a file");

    ACCEPTED(mf_kv_save(e, path, NULL));
    KEPT(MF_ARG, "host_state is NULL", mf_kv_load(NULL, &n, e, path, NULL));
    KEPT(MF_ARG, "host_bytes is NULL", mf_kv_load(&host, NULL, e, path, NULL));
    KEPT(MF_ARG, "path is NULL", mf_kv_load(&host, &n, e, NULL, NULL));
    KEPT(MF_ARG, "engine is NULL", mf_kv_load(&host, &n, NULL, path, NULL));
    l.n_seqs = 1;
    KEPT(MF_ARG, "options.seqs is NULL", mf_kv_load(&host, &n, e, path, &l));
    l.seqs = one;
    l.n_seqs = 5;
    KEPT(MF_ARG, "n_seqs is 5", mf_kv_load(&host, &n, e, path, &l));
    for (l.n_seqs = 0; l.n_seqs <= 4; l.n_seqs++)
        if (l.n_seqs != 3) KEPT(MF_ARG, "the image has 3", mf_kv_load(&host, &n, e, path, &l));
    l.seqs = (const int32_t[]){2, 0, 2};
    l.n_seqs = 3;
    KEPT(MF_ARG, "sequence 2 twice", mf_kv_load(&host, &n, e, path, &l));
    static const int32_t wrong[] = {-1, N_SEQ, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char words[64];
        snprintf(words, sizeof words, "sequence %d; this engine has 0 to 3", wrong[i]);
        s = (mf_kv_save_options){.size = sizeof s, .seqs = &wrong[i], .n_seqs = 1};
        l = (mf_kv_load_options){.size = sizeof l, .seqs = &wrong[i], .n_seqs = 1};
        KEPT(MF_ARG, words, mf_kv_save(e, other, &s));
        KEPT(MF_ARG, words, mf_kv_load(&host, &n, e, path, &l));
    }
    KEPT(MF_IO, "b.kv", mf_kv_load(&host, &n, e, other, NULL));
    check(host == untouched && n == 7 && count_files() == 1, "a refusal wrote: %p %zu", host, n);
    s = (mf_kv_save_options){.size = sizeof s, .seqs = &zero, .host_state = "x"};
    ACCEPTED(mf_kv_save(e, path, &s));  // none of them
    ACCEPTED(mf_kv_load(&host, &n, e, path, NULL));
    check(!n, "%zu host bytes", n);
    mf_kv_host_free(host);
    mf_kv_host_free(NULL);
}

// Sizes that no header had, and fields of a later one.
static void test_sizes(mf_engine *e) {
    static const size_t wrong[] = {0, 1, 7, 9, 4104, SIZE_MAX};
    void *host = untouched;
    size_t n = 7;
    struct {
        mf_kv_save_options o;
        size_t later;
    } s = {.later = 1};
    struct {
        mf_kv_load_options o;
        size_t later;
    } l = {.later = 1};
    ACCEPTED(mf_kv_save(e, path, NULL));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        s.o.size = l.o.size = wrong[i];
        KEPT(MF_ARG, "options.size", mf_kv_save(e, path, &s.o));
        KEPT(MF_ARG, "options.size", mf_kv_load(&host, &n, e, path, &l.o));
    }
    s.o.size = sizeof s;
    l.o.size = sizeof l;
    KEPT(MF_UNSUPPORTED, "options.size", mf_kv_save(e, path, &s.o));
    KEPT(MF_UNSUPPORTED, "options.size", mf_kv_load(&host, &n, e, path, &l.o));
    check(host == untouched && n == 7, "a refusal wrote");
    s.later = l.later = 0;
    ACCEPTED(mf_kv_save(e, path, &s.o));
    ACCEPTED(mf_kv_load(&host, &n, e, path, &l.o));
    mf_kv_host_free(host);
    s.o.size = l.o.size = sizeof(size_t);  // all defaults
    ACCEPTED(mf_kv_save(e, path, &s.o));
    ACCEPTED(mf_kv_load(&host, &n, e, path, &l.o));
    mf_kv_host_free(host);
}

static void test_closed(void) {
    static uint64_t closed[64];
    mf_engine *const e = (mf_engine *)(void *)closed;
    void *host = untouched;
    size_t n = 7;
    REFUSED(MF_ARG, "not an open", mf_kv_save(e, path, NULL));
    REFUSED(MF_ARG, "not an open", mf_kv_load(&host, &n, e, path, NULL));
    check(host == untouched && n == 7, "a refusal wrote");
}

// ---- there and back --------------------------------------------------------------------------

static void test_round_trip(mf_model *model) {
    mf_engine *const a = start_edited(model), *const b = start(model);
    const int32_t seqs[] = {1, 2}, into[] = {3, 0};
    char state[] = "host state";
    mf_kv_save_options s = {.size = sizeof s,
                            .seqs = seqs,
                            .n_seqs = 2,
                            .host_state = state,
                            .host_bytes = sizeof state};
    mf_kv_load_options l = {.size = sizeof l, .seqs = into, .n_seqs = 2};
    append(b, 1, 9);
    float kept[VOCAB], wanted[VOCAB], found[VOCAB];
    next_logits(kept, b, 1);
    ACCEPTED(mf_kv_save(a, path, &s));
    void *host = NULL;
    size_t n = 0;
    ACCEPTED(mf_kv_load(&host, &n, b, path, &l));
    check(n == sizeof state && !memcmp(host, state, n), "%zu host bytes", n);
    mf_kv_host_free(host);
    for (int i = 0; i < 2; i++) {
        next_logits(wanted, a, seqs[i]);
        next_logits(found, b, into[i]);
        check(!memcmp(wanted, found, sizeof found), "sequence %d says something else", seqs[i]);
    }
    next_logits(found, b, 1);
    check(!memcmp(kept, found, sizeof found), "sequence 1 says something else");
    static content x, y;
    read_content(&x, path);
    ACCEPTED(mf_kv_load(&host, &n, b, path, NULL));
    mf_kv_host_free(host);
    ACCEPTED(mf_kv_save(b, other, &s));
    read_content(&y, other);
    check(x.n && equal(&x, &y), "saving what was loaded gives another file");
    unlink(other);
    mf_engine_free(a);
    mf_engine_free(b);
}

// ---- faults ----------------------------------------------------------------------------------

static int save(mf_engine *e) {
    const mf_kv_save_options s = {.size = sizeof s, .host_state = "new", .host_bytes = 3};
    return mf_kv_save(e, path, &s);
}

static int save_some(mf_engine *e) {
    const int32_t seqs[] = {2, 0};
    const mf_kv_save_options s = {.size = sizeof s, .seqs = seqs, .n_seqs = 2};
    return mf_kv_save(e, path, &s);
}

// Does not keep the host state, but looks at it.
static int load_into(mf_engine *e, const int32_t *into, size_t n_into) {
    void *host = untouched;
    size_t n = 7;
    const mf_kv_load_options l = {.size = sizeof l, .seqs = into, .n_seqs = n_into};
    const int status = mf_kv_load(&host, &n, e, path, &l);
    if (status) {
        check(host == untouched && n == 7, "a refused load wrote: %p %zu", host, n);
    } else {
        check(n == 3 && !memcmp(host, "new", 3), "%zu host bytes", n);
        mf_kv_host_free(host);
    }
    return status;
}

static int load(mf_engine *e) { return load_into(e, NULL, 0); }

static int load_elsewhere(mf_engine *e) {
    static const int32_t into[] = {3, 2, 0};
    return load_into(e, into, 3);
}

// Each allocation of a call fails once: the call is refused, engine and file are as they were, but
// for room that a sequence may keep for spans to come.
static void test_short_of_memory(mf_engine *e, int (*call)(mf_engine *), const char *name) {
    static content before, after;
    view seen, now;
    read_content(&before, path);
    look(&seen, e);
    const size_t alive = mem_alive();
    int status = MF_NOMEM;
    size_t n = 0;
    for (; status && n < 1000; n++) {
        mem_fail_after(n);
        status = call(e);
        mem_fail_after(SIZE_MAX);
        check(mem_alive() - alive <= N_SEQ * N_GROUPS, "%s without allocation %zu leaves %zu", name,
              n, mem_alive() - alive);
        if (!status) break;
        look(&now, e);
        read_content(&after, path);
        check(status == MF_NOMEM, "%s without allocation %zu: status %d", name, n, status);
        check(!memcmp(&seen, &now, sizeof now), "%s without allocation %zu: engine", name, n);
        check(equal(&before, &after) && count_files() == 1, "%s without allocation %zu: file", name,
              n);
    }
    check(!status && n > 5, "%s: status %d after %zu tries", name, status, n);
}

// Whether the system's refusal of that call makes a save fail. Closing and looking after what a
// dead process left are not worth losing a file for.
static bool may_succeed(int call) {
    return call == FAULT_CLOSE || call == FAULT_STAT || call == FAULT_UNLINK || call == FAULT_FSTAT;
}

// Each system call of a save fails once: the old file or the new one is there, whole, and nothing
// beside it; the engine is as it was.
static void test_save_faults(mf_engine *e, int call, int manner) {
    static content old, new, now;
    view seen, after;
    unlink(path);
    ACCEPTED(save_some(e));
    read_content(&old, path);
    ACCEPTED(save(e));
    read_content(&new, path);
    const size_t alive = mem_alive();
    look(&seen, e);
    bool struck = true;
    int refused = 0;
    for (long at = 0; struck && at < 1000; at++) {
        ACCEPTED(save_some(e));
        fault_on(call, at, manner, EIO);
        const int status = save(e);
        struck = fault_off();
        read_content(&now, path);
        look(&after, e);
        check(mem_alive() == alive && !memcmp(&seen, &after, sizeof after),
              "%s %ld: the engine changed", fault_names[call], at);
        if (!struck || manner == FAULT_SHORT || (!status && may_succeed(call))) {
            check(!status && equal(&now, &new), "%s %ld: status %d", fault_names[call], at, status);
        } else {
            refused++;
            // The sync of the folder comes last, when the new file is in place.
            check(status == MF_IO && (equal(&now, &old) || equal(&now, &new)),
                  "%s %ld: status %d, %zu bytes", fault_names[call], at, status, now.n);
            check(strstr(mf_last_error(), "a.kv"), "%s %ld: which file", fault_names[call], at);
            check(call != FAULT_WRITE || equal(&now, &old), "write %ld: not the old file", at);
        }
        ACCEPTED(save_some(e));
        check(count_files() == 1, "%s %ld: %d files", fault_names[call], at, count_files());
    }
    check(!struck, "%s without end", fault_names[call]);
    check(manner == FAULT_SHORT || may_succeed(call) || call == FAULT_MAP || refused,
          "no %s was refused", fault_names[call]);
}

static void test_load_faults(mf_engine *e, int call) {
    view seen, after;
    ACCEPTED(save(e));
    const size_t alive = mem_alive();
    look(&seen, e);
    bool struck = true;
    int strikes = 0;
    for (long at = 0; struck && at < 100; at++) {
        fault_on(call, at, FAULT_ERROR, EIO);
        const int status = load(e);
        struck = fault_off();
        if (!status) continue;
        strikes++;
        look(&after, e);
        check(struck && status == MF_IO && strstr(mf_last_error(), "a.kv"), "%s %ld: status %d",
              fault_names[call], at, status);
        check(mem_alive() == alive && !memcmp(&seen, &after, sizeof after),
              "%s %ld: the engine changed", fault_names[call], at);
    }
    const bool wanted =
        call == FAULT_OPEN || call == FAULT_MAP || call == FAULT_STAT || call == FAULT_FSTAT;
    check(!struck && (strikes > 0) == wanted, "%d loads were refused by %s", strikes,
          fault_names[call]);
}

// A full disk: the line says so.
static void test_disk_full(mf_engine *e) {
    static content before, after;
    ACCEPTED(save(e));
    read_content(&before, path);
    fault_on(FAULT_WRITE, 0, FAULT_ERROR, ENOSPC);
    KEPT(MF_IO, "No space left", save_some(e));
    fault_off();
    read_content(&after, path);
    check(equal(&before, &after) && count_files() == 1, "a full disk changed the file");
}

// Runs a call in a child; whether it ended by itself, with the call refused or not.
static bool in_child(int *status, mf_engine *e, int call, long at) {
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        if (call >= 0) fault_on(call, at, FAULT_DIE_BEFORE, 0);
        _exit(save(e));
    }
    int how = 0;
    check(child > 0 && waitpid(child, &how, 0) == child, "no child");
    *status = WIFEXITED(how) ? WEXITSTATUS(how) : -1;
    return WIFEXITED(how);
}

// Killed at any system call: the old file or the new one is there, whole, and the next save leaves
// nothing beside it.
static void test_killed(mf_engine *e) {
    static content old, new, now;
    ACCEPTED(save(e));
    read_content(&new, path);
    ACCEPTED(save_some(e));
    read_content(&old, path);
    int killed = 0;
    for (int call = 0; call < FAULT_CALLS; call++) {
        int status = -1;
        for (long at = 0; !in_child(&status, e, call, at); at++) {
            read_content(&now, path);
            check(equal(&now, &old) || equal(&now, &new), "killed at %s %ld: %zu bytes",
                  fault_names[call], at, now.n);
            killed++;
            ACCEPTED(save_some(e));
            check(count_files() == 1, "killed at %s %ld: %d files", fault_names[call], at,
                  count_files());
        }
        check(!status, "a save in a child: %d", status);
        ACCEPTED(save_some(e));
    }
    check(killed > 10, "killed %d times", killed);
}

// The system allows nothing: for that the test must not be root.
static void test_read_only_folder(mf_engine *e) {
    static content before, after;
    ACCEPTED(save_some(e));
    read_content(&before, path);
    check(!chmod(folder, 0555), "chmod");
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        if (!geteuid() && setuid(65534)) _exit(100);
        const int status = save(e);
        _exit(strstr(mf_last_error(), "a.kv") ? status : 101);
    }
    int how = 0;
    check(child > 0 && waitpid(child, &how, 0) == child, "no child");
    check(WIFEXITED(how) && WEXITSTATUS(how) == MF_IO, "a read-only folder: %d", how);
    check(!chmod(folder, 0700), "chmod");
    read_content(&after, path);
    check(equal(&before, &after) && count_files() == 1, "a read-only folder has changed");
}

static void test_progress(mf_engine *e) {
    static content now;
    uint64_t done[2] = {5, 5};
    const mf_kv_save_options s = {.size = sizeof s, .progress = done};
    ACCEPTED(mf_kv_save(e, path, &s));
    read_content(&now, path);
    check(done[0] == now.n && done[1] == now.n, "saved %llu of %llu, the file has %zu",
          (unsigned long long)done[0], (unsigned long long)done[1], now.n);
    const mf_kv_load_options l = {.size = sizeof l, .progress = done};
    void *host;
    size_t n;
    done[0] = done[1] = 5;
    ACCEPTED(mf_kv_load(&host, &n, e, path, &l));
    mf_kv_host_free(host);
    check(done[0] == now.n && done[1] == now.n, "loaded %llu of %llu, the file has %zu",
          (unsigned long long)done[0], (unsigned long long)done[1], now.n);
}

int main(void) {
    unsetenv("MINFER_ISA");
    unsetenv("MINFER_CACHE_TYPE");
    make_folder();
    const size_t alive = mem_alive();
    const gguf_build b = build_model(&two_groups);
    mf_model *model = must_load(&b);
    mf_engine *e = start_edited(model);
    test_arguments(e);
    test_sizes(e);
    test_closed();
    test_round_trip(model);
    test_short_of_memory(e, save_some, "save of some");
    test_short_of_memory(e, save, "save");
    test_short_of_memory(e, load, "load");
    test_short_of_memory(e, load_elsewhere, "load elsewhere");
    for (int call = 0; call < FAULT_CALLS; call++) {
        test_save_faults(e, call, FAULT_ERROR);
        test_load_faults(e, call);
    }
    test_save_faults(e, FAULT_WRITE, FAULT_SHORT);
    test_disk_full(e);
    test_killed(e);
    test_read_only_folder(e);
    test_progress(e);
    mf_engine_free(e);
    mf_model_free(model);
    check(mem_alive() == alive, "%zu allocations left", mem_alive() - alive);
    unlink(path);
    check(!rmdir(folder), "the folder is not empty");
    free(b.bytes);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
