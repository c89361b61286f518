// Owns the kernel tables: made once, the scalar definitions first, then each instruction set of
// this machine on top of the one before. Refuses an instruction set that the processor or the
// operating system does not support.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../error.h"
#include "kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { MAX_TABLES = 5 };

static cpu_kernels tables[MAX_TABLES];  // in ISA order: scalar first
static size_t n_tables;

static cpu_kernels *table_add(const char *name) {
    cpu_kernels *k = &tables[n_tables];
    if (n_tables) *k = tables[n_tables - 1];
    k->name = name;
    n_tables++;
    return k;
}

#if defined(__x86_64__)
// Some compilers do not know the name of this one.
static bool has_f16c(void) {
    uint32_t a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

#if MF_HAS_AMX
// Also asks the system for the tile registers, which a process has on demand only.
static bool has_amx(void) {
#ifdef SYS_arch_prctl
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25 };
    const uint32_t all = AMX_BF16 | AMX_TILE | AMX_INT8;
    const long request = 0x1023, tile_data = 18;
    uint32_t a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & all) == all &&
           syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}
#endif

// __builtin_cpu_supports also asks the system whether it keeps the wide registers (XGETBV).
static void add_native(void) {
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())) return;
    cpu_kernels *k = table_add("avx2");
    matmul_init_avx2(k);
    ops_init_avx2(k);
    attn_init_avx2(k);
    peak_init_avx2(k);
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vnni")))
        return;
    k = table_add("avx512");
    matmul_init_avx512(k);
    ops_init_avx512(k);
    attn_init_avx512(k);
    peak_init_avx512(k);
#if MF_HAS_AMX
    if (!has_amx()) return;
    k = table_add("amx");
    matmul_init_amx(k);
#endif
}
#elif defined(__aarch64__)
enum { HWCAP_DOTPROD = 1 << 20 };  // ASIMDDP of the Linux ABI

static void add_native(void) {
    cpu_kernels *k = table_add("neon");
    matmul_init_neon(k);
    ops_init_neon(k);
    attn_init_neon(k);
    peak_init_neon(k);
    if (!(getauxval(AT_HWCAP) & HWCAP_DOTPROD)) return;
    k = table_add("dotprod");
    matmul_init_dotprod(k);
    peak_init_dotprod(k);
}
#else
static void add_native(void) {}
#endif

static void make_tables(void) {
    cpu_kernels *k = table_add("scalar");
    matmul_init_scalar(k);
    ops_init_scalar(k);
    rows_init_scalar(k);
    attn_init_scalar(k);
    peak_init_scalar(k);
    add_native();
}

static void ensure_tables(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_tables);
}

const cpu_kernels *kernels_scalar(void) {
    ensure_tables();
    return &tables[0];
}

const cpu_kernels *kernels_find(const char *isa) {
    ensure_tables();
    for (size_t i = 0; i < n_tables; i++)
        if (!strcmp(tables[i].name, isa)) return &tables[i];
    return NULL;
}

size_t kernels_list(const cpu_kernels *list[8]) {
    ensure_tables();
    for (size_t i = 0; i < n_tables; i++) list[i] = &tables[n_tables - 1 - i];
    return n_tables;
}

const char *kernels_names(void) {
    static _Thread_local char text[64];
    const cpu_kernels *list[8];
    const size_t n = kernels_list(list);
    size_t used = 0;
    for (size_t i = 0; i < n; i++)
        used +=
            (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? "," : "", list[i]->name);
    return text;
}

int kernels_choose(const cpu_kernels **out, const char *isa) {
    const char *origin = "isa";
    const cpu_kernels *list[8];
    if (!isa) {
        isa = getenv("MINFER_ISA");
        origin = "MINFER_ISA";
    }
    if (!isa || !*isa) {
        kernels_list(list);
        *out = list[0];
        return MF_OK;
    }
    *out = kernels_find(isa);
    return *out ? MF_OK
                : fail(MF_ARG, "%s: \"%.20s\" is not among %s, which this machine runs", origin,
                       isa, kernels_names());
}
