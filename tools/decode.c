// decode MODEL N_TOKENS ID...: feeds the token ids to a model, decodes N_TOKENS more by always
// taking the likeliest, and prints their ids on one line. A program on the public ABI alone:
//
//   cc -std=c11 decode.c $(pkg-config --cflags --libs minfer) -o decode
#include <errno.h>
#include <minfer.h>
#include <stdio.h>
#include <stdlib.h>

static int complain(const char *what) {
    fprintf(stderr, "decode: %s: %s\n", what, mf_last_error());
    return 1;
}

// Appends `tokens` [n_tokens] to sequence 0 and picks the likeliest next one.
static int next_token(int32_t *next, mf_engine *engine, const int32_t *tokens, size_t n_tokens,
                      float *logits, size_t n_vocab) {
    const mf_chunk chunk = {
        .seq = 0, .logits = MF_LOGITS_LAST, .tokens = tokens, .n_tokens = n_tokens};
    const mf_sampling greedy = {.size = sizeof greedy};
    uint32_t pos;
    int status = mf_engine_forward(logits, n_vocab, engine, &chunk, 1);
    if (!status) status = mf_kv_next_pos(&pos, engine, 0);
    if (!status) status = mf_sample(next, logits, n_vocab, &greedy, NULL, 0, pos);
    return status;
}

static int decode(mf_engine *engine, size_t n_vocab, int32_t n_tokens, const int32_t *prompt,
                  size_t n_prompt) {
    float *logits = malloc(n_vocab * sizeof *logits);
    if (!logits) return MF_NOMEM;
    int32_t token = 0;
    int status = MF_OK;
    for (int32_t i = 0; i < n_tokens && !status; i++) {
        status = i ? next_token(&token, engine, &token, 1, logits, n_vocab)
                   : next_token(&token, engine, prompt, n_prompt, logits, n_vocab);
        if (!status) printf(i ? " %d" : "%d", (int)token);
    }
    if (!status) printf("\n");
    free(logits);
    return status;
}

// Reads all of `word` as a number from 0 on; returns whether it is one.
static int read_number(int32_t *number, const char *word) {
    char *end;
    errno = 0;
    const long value = strtol(word, &end, 10);
    if (end == word || *end || errno || value < 0 || value > INT32_MAX) return 0;
    *number = (int32_t)value;
    return 1;
}

static int usage(const char *word) {
    if (word) fprintf(stderr, "decode: \"%s\" is not a number in [0, 2^31)\n", word);
    fprintf(stderr, "usage: decode MODEL N_TOKENS ID...\n");
    return 2;
}

int main(int argc, char **argv) {
    if (argc < 4) return usage(NULL);
    int32_t n_tokens;
    if (!read_number(&n_tokens, argv[2])) return usage(argv[2]);
    const size_t n_prompt = (size_t)argc - 3;
    int32_t *prompt = malloc(n_prompt * sizeof *prompt);
    if (!prompt) return 1;
    for (size_t i = 0; i < n_prompt; i++) {
        if (read_number(&prompt[i], argv[3 + i])) continue;
        free(prompt);
        return usage(argv[3 + i]);
    }

    mf_gguf *file = NULL;
    mf_model *model = NULL;
    mf_engine *engine = NULL;
    mf_model_info info = {.size = sizeof info};
    int status = mf_gguf_open(&file, argv[1]);
    if (!status) status = mf_model_load(&model, file, NULL);
    if (!status) status = mf_model_get_info(&info, model);
    if (!status) status = mf_engine_new(&engine, model, NULL);
    mf_model_free(model);  // the engine keeps what it needs
    mf_gguf_free(file);
    if (!status) status = decode(engine, info.n_vocab, n_tokens, prompt, n_prompt);
    mf_engine_free(engine);
    free(prompt);
    return status ? complain(argv[1]) : 0;
}
