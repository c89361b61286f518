// mf_measure_limits: what it refuses, and what is certain of its numbers on any machine, however
// busy: they are there, and no core is faster than physics. A loop that the compiler has done away
// with would be.
#define _DEFAULT_SOURCE
#include <sys/resource.h>
#include <unistd.h>

#include "../engine/cpu/kernels.h"
#include "api_test.h"

static const mf_limits unwritten = {.size = sizeof unwritten, .int8_macs = -7};

static bool is_unwritten(const mf_limits *l) { return !memcmp(l, &unwritten, sizeof *l); }

static void test_arguments(void) {
    mf_limits l = unwritten;
    REFUSED(MF_ARG, "out is NULL", mf_measure_limits(NULL, NULL, 0));
    REFUSED(MF_ARG, "n_threads is 1025; at most 1024", mf_measure_limits(&l, NULL, 1025));
    REFUSED(MF_ARG, "isa: \"sse9\" is not among", mf_measure_limits(&l, "sse9", 1));
    REFUSED(MF_ARG, mf_isas(), mf_measure_limits(&l, "sse9", 1));
    setenv("MINFER_ISA", "sse8", 1);
    REFUSED(MF_ARG, "MINFER_ISA: \"sse8\" is not among", mf_measure_limits(&l, NULL, 1));
    unsetenv("MINFER_ISA");
    check(is_unwritten(&l), "a refusal wrote");
    l.size = 12;
    REFUSED(MF_ARG, "out.size is 12", mf_measure_limits(&l, NULL, 1));
    check(l.int8_macs == unwritten.int8_macs, "a refusal wrote");
}

// At most, of one core: four pipes, all as wide as the registers, and 6.5 GHz; 300 GB/s.
static void test_numbers(const cpu_kernels *k, uint32_t n_threads) {
    mf_limits l = unwritten;
    const char *const isa = k->name;
    ACCEPTED(mf_measure_limits(&l, isa, n_threads));
    const double cores = n_threads ? n_threads : 1024;
    const double bytes = !strcmp(isa, "amx") || !strcmp(isa, "avx512") ? 64 : 32;
    const double most = 4 * bytes * 6.5e9 * cores;
    check(l.int8_macs > 0 && l.int8_macs < most, "%s: %g int8 multiply-adds", isa, l.int8_macs);
    check(l.f32_fmas > 0 && l.f32_fmas < most / 4, "%s: %g f32 multiply-adds", isa, l.f32_fmas);
    check(l.read_bytes > 0 && l.read_bytes < 300e9 * cores, "%s: %g bytes", isa, l.read_bytes);
    check(l.size == sizeof l, "size %zu", l.size);
}

// As many multiply-adds as rounds have.
static void test_peaks(const cpu_kernels *k) {
    peak_fn *const peaks[] = {k->peak_int8, k->peak_f32};
    for (int i = 0; i < 2; i++) {
        const uint64_t one = peaks[i](1);
        check(one && peaks[i](0) == 0 && peaks[i](20) == 20 * one, "%s: %llu in a round of peak %d",
              k->name, (unsigned long long)one, i);
    }
}

// The bytes that are read are in memory: untouched, they would all be one page of zeros, and the
// rate a cache's. Of the GiB, or the eighth of a small machine, a good part at least.
static void test_memory(void) {
    const double all = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    struct rusage use;
    check(!getrusage(RUSAGE_SELF, &use), "no usage");
    const double most = (double)use.ru_maxrss * 1024;
    check(most > 0.5 * (1 << 30) || most > all / 16, "%g bytes of %g were held", most, all);
}

// All memory is had before the first run, so a failure is also quick.
static void test_short_of_memory(void) {
    const size_t alive = mem_alive();
    int status = MF_NOMEM;
    for (size_t n = 0; status == MF_NOMEM && n < 10; n++) {
        mf_limits l = unwritten;
        mem_fail_after(n);
        status = mf_measure_limits(&l, NULL, 2);
        mem_fail_after(SIZE_MAX);
        check(status == MF_NOMEM ? is_unwritten(&l) : n > 1 && l.int8_macs > 0,
              "allocation %zu: status %d, %g", n, status, l.int8_macs);
        check(mem_alive() == alive, "allocation %zu: %zu left", n, mem_alive() - alive);
    }
    check(status == MF_OK, "status %d", status);
}

int main(void) {
    unsetenv("MINFER_ISA");
    test_arguments();
    const cpu_kernels *list[8];
    const size_t n = kernels_list(list);
    for (size_t i = 0; i < n; i++) {
        test_peaks(list[i]);
        test_numbers(list[i], (uint32_t)(i + 1) % 3);
    }
    test_memory();
    test_short_of_memory();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
