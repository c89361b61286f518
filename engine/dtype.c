// Owns the table of tensor element types: numbers and block sizes as GGUF files have them.
#include "dtype.h"

static const dtype_info supported[DTYPE_COUNT] = {
    [DTYPE_F32] = {"F32", 1, 4},           [DTYPE_F16] = {"F16", 1, 2},
    [DTYPE_BF16] = {"BF16", 1, 2},         [DTYPE_Q4_0] = {"Q4_0", 32, 18},
    [DTYPE_Q4_1] = {"Q4_1", 32, 20},       [DTYPE_Q5_0] = {"Q5_0", 32, 22},
    [DTYPE_Q5_1] = {"Q5_1", 32, 24},       [DTYPE_Q8_0] = {"Q8_0", 32, 34},
    [DTYPE_Q2_K] = {"Q2_K", 256, 84},      [DTYPE_Q3_K] = {"Q3_K", 256, 110},
    [DTYPE_Q4_K] = {"Q4_K", 256, 144},     [DTYPE_Q5_K] = {"Q5_K", 256, 176},
    [DTYPE_Q6_K] = {"Q6_K", 256, 210},     [DTYPE_IQ4_NL] = {"IQ4_NL", 32, 18},
    [DTYPE_IQ4_XS] = {"IQ4_XS", 256, 136}, [DTYPE_MXFP4] = {"MXFP4", 32, 17},
};

// The rest of the numbers that were ever given out.
static const char *const unsupported[] = {
    [4] = "Q4_2 (removed from GGUF)",
    [5] = "Q4_3 (removed from GGUF)",
    [9] = "Q8_1",
    [15] = "Q8_K",
    [16] = "IQ2_XXS",
    [17] = "IQ2_XS",
    [18] = "IQ3_XXS",
    [19] = "IQ1_S",
    [21] = "IQ3_S",
    [22] = "IQ2_S",
    [24] = "I8",
    [25] = "I16",
    [26] = "I32",
    [27] = "I64",
    [28] = "F64",
    [29] = "IQ1_M",
    [31] = "Q4_0_4_4 (removed from GGUF)",
    [32] = "Q4_0_4_8 (removed from GGUF)",
    [33] = "Q4_0_8_8 (removed from GGUF)",
    [34] = "TQ1_0",
    [35] = "TQ2_0",
    [36] = "IQ4_NL_4_4 (removed from GGUF)",
    [37] = "IQ4_NL_4_8 (removed from GGUF)",
    [38] = "IQ4_NL_8_8 (removed from GGUF)",
    [40] = "NVFP4",
    [41] = "Q1_0",
};

const dtype_info *dtype_get(uint32_t type) {
    return type < DTYPE_COUNT && supported[type].name ? &supported[type] : NULL;
}

const char *dtype_unsupported_name(uint32_t type) {
    return type < sizeof unsupported / sizeof *unsupported ? unsupported[type] : NULL;
}
