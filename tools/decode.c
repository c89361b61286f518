// decode [-s FILE] MODEL N_TOKENS [ID...]: feeds the token ids to a model, decodes N_TOKENS more by
// always taking the likeliest, and prints their ids on one line. With -s it goes on from the
// session in FILE, if there is one, and leaves a session there. A program on the public ABI alone:
//
//   cc -std=c11 decode.c $(pkg-config --cflags --libs minfer) -o decode
#include <errno.h>
#include <minfer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

// *token: the one picked last, which is not appended yet; at first that of the session, or -1.
static int decode(int32_t *token, mf_engine *engine, size_t n_vocab, int32_t n_tokens,
                  const int32_t *prompt, size_t n_prompt) {
    float *logits = malloc(n_vocab * sizeof *logits);
    if (!logits) return MF_NOMEM;
    int status = MF_OK;
    if (*token >= 0 && n_prompt) status = next_token(token, engine, token, 1, logits, n_vocab);
    for (int32_t i = 0; i < n_tokens && !status; i++) {
        status = i || !n_prompt ? next_token(token, engine, token, 1, logits, n_vocab)
                                : next_token(token, engine, prompt, n_prompt, logits, n_vocab);
        if (!status) printf(i ? " %d" : "%d", (int)*token);
    }
    if (!status) printf("\n");
    free(logits);
    return status;
}

// The rows of sequence 0 and, as the host's part of the file, the token to go on with.
static int resume(int32_t *token, mf_engine *engine, const char *path) {
    void *state;
    size_t n;
    int status = mf_kv_load(&state, &n, engine, path, NULL);
    if (status) return status;
    if (n == sizeof *token) memcpy(token, state, n);
    mf_kv_host_free(state);
    return MF_OK;
}

static int save(int32_t token, mf_engine *engine, const char *path) {
    const mf_kv_save_options options = {
        .size = sizeof options, .host_state = &token, .host_bytes = sizeof token};
    return mf_kv_save(engine, path, &options);
}

static int exists(const char *path) {
    FILE *const file = fopen(path, "rb");
    if (file) fclose(file);
    return file != NULL;
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
    fprintf(stderr, "usage: decode [-s FILE] MODEL N_TOKENS [ID...]\n");
    return 2;
}

int main(int argc, char **argv) {
    const char *session = NULL;
    if (argc > 2 && !strcmp(argv[1], "-s")) {
        session = argv[2];
        argv += 2;
        argc -= 2;
    }
    const int resumes = session && exists(session);
    if (argc < (resumes ? 3 : 4)) return usage(NULL);
    int32_t n_tokens, token = -1;
    if (!read_number(&n_tokens, argv[2])) return usage(argv[2]);
    const size_t n_prompt = (size_t)argc - 3;
    int32_t *prompt = malloc((n_prompt + 1) * sizeof *prompt);
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
    if (!status && resumes) status = resume(&token, engine, session);
    if (!status) status = decode(&token, engine, info.n_vocab, n_tokens, prompt, n_prompt);
    if (!status && session) status = save(token, engine, session);
    mf_engine_free(engine);
    free(prompt);
    return status ? complain(argv[1]) : 0;
}
