// minfer: run GGUF language models with a KV cache that can be trusted.
//
// This header is the manual, the ABI and the source of the Python bindings (the preprocessor turns
// it into the cffi declarations, so constants are enums and only two headers are included).
//
// Conventions. Every function that can fail returns an mf_status; on failure one line saying cause,
// value and fix is kept per thread (mf_last_error) and nothing has changed. Out-parameters come
// first and are written only on success. A pointer out-parameter is borrowed from the object it
// was read from; a pointer-to-pointer is yours to free with the matching *_free, which takes NULL.
// Objects keep what they were made from alive, so they may be freed in any order. Option structs
// start with `size` = sizeof of the struct as the caller compiled it; zero means the default.
//
// The law: the logits of a sequence are a function of the weights, the KV format and the sequence's
// own history. Cells, chunks, batch mates, threads and instruction sets do not change one bit.
//
// Threads. An mf_gguf and an mf_model may be read by many threads. Calls on one mf_engine from
// several threads are run one after the other; mf_engine_cancel is the exception and returns at
// once.
#ifndef MINFER_H
#define MINFER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mf_gguf mf_gguf;      // an open GGUF file, all its parts: metadata and tensor table
typedef struct mf_model mf_model;    // weights, packed for a device; immutable
typedef struct mf_engine mf_engine;  // a model with its KV cache, graphs and threads
typedef struct mf_session mf_session;  // an open session file, verified whole; immutable

typedef enum mf_status {
    MF_OK = 0,
    MF_ARG = 1,            // an argument is NULL, of the wrong size or out of range
    MF_IO = 2,             // the operating system refused: the message has its reason
    MF_FORMAT = 3,         // the bytes of a file contradict its format
    MF_UNSUPPORTED = 4,    // well-formed, but this build or device cannot do it
    MF_LIMIT = 5,          // a documented limit is exceeded
    MF_NOMEM = 6,          // an allocation failed
    MF_NOT_FOUND = 7,      // no such key or tensor
    MF_CANCELLED = 8,      // mf_engine_cancel stopped the call; the unfinished batch left no rows
    MF_KV_FULL = 9,        // not enough free cells
    MF_KV_GONE = 10,       // the edit needs rows that a sliding window has dropped
    MF_KV_RANGE = 11,      // a position outside [0, 2^24)
    MF_INTERNAL = 12,      // a broken invariant of the library: please report it
    MF_KV_COLLIDES = 13,   // a shift would put a row at or below the position of the row before
    MF_KV_GAPS = 14,       // more gaps between positions than a read can carry
    MF_KV_NOT_EMPTY = 15,  // a share into a sequence that has rows
    MF_KV_SPANS = 16,      // a window in more pieces than the read mode can carry
    MF_KV_OVERLAP = 17,    // moves that read or write a row twice
    MF_KV_CYCLE = 18,      // moves in a circle, which no order makes right
    MF_KV_SHARED = 19      // a store into a row that others read: please report it
} mf_status;

// "0.1.0"; equals the Python package's version.
const char *mf_version(void);

// The calling thread's last failure, one line; "" if it never failed. Valid until its next failure.
const char *mf_last_error(void);

// ---- the machine -----------------------------------------------------------------------------

// Instruction sets this machine can run, best first, comma separated: "amx,avx512,avx2,scalar".
const char *mf_isas(void);

// What bounds every computation, per second and of all threads together.
typedef struct mf_limits {
    size_t size;
    double int8_macs;   // multiply-adds of bytes in vector registers; tiles may pass this
    double f32_fmas;    // fused multiply-adds of floats, likewise
    double read_bytes;  // from memory, far more than the caches hold
} mf_limits;

// Measures them, which takes about a second, up to 1 GiB of memory, and an idle machine if the
// numbers are to mean anything. isa and n_threads as in mf_engine_options.
int mf_measure_limits(mf_limits *out, const char *isa, uint32_t n_threads);

// ---- GGUF files ------------------------------------------------------------------------------

typedef enum mf_gguf_type {  // the value types of the file format
    MF_GGUF_U8 = 0,
    MF_GGUF_I8 = 1,
    MF_GGUF_U16 = 2,
    MF_GGUF_I16 = 3,
    MF_GGUF_U32 = 4,
    MF_GGUF_I32 = 5,
    MF_GGUF_F32 = 6,
    MF_GGUF_BOOL = 7,
    MF_GGUF_STRING = 8,
    MF_GGUF_ARRAY = 9,
    MF_GGUF_U64 = 10,
    MF_GGUF_I64 = 11,
    MF_GGUF_F64 = 12
} mf_gguf_type;

typedef struct mf_kv_info {
    const char *key;  // [key_len], UTF-8, NOT zero-terminated
    size_t key_len;
    int32_t type;      // mf_gguf_type of a scalar or of the elements of an array
    int32_t is_array;  // 0 or 1
    uint64_t n;        // number of elements; 1 for a scalar
} mf_kv_info;

typedef struct mf_tensor_info {
    const char *name;  // [name_len], UTF-8, NOT zero-terminated
    size_t name_len;
    const char *type;  // "Q4_K"
    uint32_t n_dims;   // 1..4
    uint64_t dims[4];  // fastest first; 1 beyond n_dims
    uint64_t bytes;
} mf_tensor_info;

// Opens and validates a GGUF (version 2 or 3; of a split model the first part, the others are found
// beside it). The file is mapped read-only: while it is open it must not be truncated.
int mf_gguf_open(mf_gguf **out, const char *path);
void mf_gguf_free(mf_gguf *file);

uint64_t mf_gguf_n_kv(const mf_gguf *file);
uint64_t mf_gguf_n_tensors(const mf_gguf *file);
uint64_t mf_gguf_data_bytes(const mf_gguf *file);  // of all tensors
int mf_gguf_kv(mf_kv_info *out, const mf_gguf *file, uint64_t index);
int mf_gguf_tensor(mf_tensor_info *out, const mf_gguf *file, uint64_t index);

// Index of `key`, or MF_NOT_FOUND.
int mf_gguf_find(uint64_t *index, const mf_gguf *file, const char *key);

// Elements [first, first + n) of value `index`; a scalar is an array of one. Integers and bools as
// int64 (MF_FORMAT above INT64_MAX), floats as double. MF_ARG where the type does not fit.
int mf_gguf_ints(int64_t *out, const mf_gguf *file, uint64_t index, uint64_t first, uint64_t n);
int mf_gguf_floats(double *out, const mf_gguf *file, uint64_t index, uint64_t first, uint64_t n);

// All strings of value `index` without separators: `bytes` [*n_bytes], `ends` [n] offsets. With
// bytes == NULL only *n_bytes is written; otherwise `capacity` must be at least that.
int mf_gguf_strings(size_t *n_bytes, char *bytes, size_t capacity, uint64_t *ends,
                    const mf_gguf *file, uint64_t index);

// ---- models ----------------------------------------------------------------------------------

typedef struct mf_model_options {
    size_t size;
    const char *device;  // "cpu" (default)
    uint32_t n_threads;  // for packing; 0: one per available core
    uint64_t *progress;  // optional: bytes packed so far, of mf_gguf_data_bytes; added to
                         // atomically by several threads, so read it atomically
} mf_model_options;

typedef struct mf_model_info {
    size_t size;
    const char *arch;  // "gemma3"
    uint32_t n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff;
    uint32_t n_vocab;
    uint32_t n_ctx_train;
    uint32_t n_groups;  // KV groups
    uint64_t n_params;
    uint64_t weight_bytes;  // packed, in memory
} mf_model_info;

// Packs the weights for `device`. After it the file is no longer read, except its metadata.
int mf_model_load(mf_model **out, mf_gguf *file, const mf_model_options *options);
void mf_model_free(mf_model *model);
int mf_model_get_info(mf_model_info *out, const mf_model *model);

// ---- engines ---------------------------------------------------------------------------------

typedef struct mf_engine_options {
    size_t size;
    uint32_t n_ctx;  // cells of a full group, shared by all sequences, and most cells of a sliding
                     // one; 0: 4096 or less if the model says so. A model whose layers are all
                     // windowed may run longer than that
    uint32_t n_seq;  // sequences 0..n_seq-1; 0: 1
    uint32_t n_batch;        // most tokens per pass over the weights; 0: 512
    uint32_t n_threads;      // 0: one per available core
    const char *isa;         // NULL: MINFER_ISA, else the best present
    const char *cache_type;  // NULL: MINFER_CACHE_TYPE, else auto
} mf_engine_options;

int mf_engine_new(mf_engine **out, mf_model *model, const mf_engine_options *options);
void mf_engine_free(mf_engine *engine);

typedef enum mf_logits { MF_LOGITS_NONE = 0, MF_LOGITS_LAST = 1, MF_LOGITS_ALL = 2 } mf_logits;

typedef struct mf_chunk {
    int32_t seq;            // a sequence occurs at most once in a call
    int32_t logits;         // mf_logits
    const int32_t *tokens;  // [n_tokens], each in [0, n_vocab)
    size_t n_tokens;        // at least 1
} mf_chunk;

// Appends the chunks to their sequences. `logits` [rows][n_vocab] receives the wanted rows, chunk
// after chunk; `n_floats` must be exactly rows * n_vocab (logits may be NULL if 0). Calls of more
// than n_batch tokens are cut into batches; room for all rows is checked first, and a failing batch
// leaves the earlier ones. After a failure in between, `logits` may hold rows, and rows that had
// left their window may be gone (mf_kv_max_trim is smaller): what it took to try.
int mf_engine_forward(float *logits, size_t n_floats, mf_engine *engine, const mf_chunk *chunks,
                      size_t n_chunks);

// Makes the running forward return MF_CANCELLED soon; without one, does nothing. Any thread, also a
// signal handler.
void mf_engine_cancel(mf_engine *engine);

typedef struct mf_stats {
    size_t size;
    uint64_t graph_builds, graph_reuses;
    uint64_t prefill_tokens, decode_tokens;  // decode: batches with at most one token a sequence
    double prefill_seconds, decode_seconds;
    uint64_t weight_bytes, kv_bytes, compute_bytes;
    double kv_seconds;  // finding cells and windows for batches; a part of the seconds above
} mf_stats;

int mf_engine_stats(mf_stats *out, mf_engine *engine);

// "avx512": the instruction set this engine computes with; valid as long as the engine.
const char *mf_engine_isa(const mf_engine *engine);
// "f32": the KV format, resolved at load.
const char *mf_engine_kv_format(const mf_engine *engine);
uint32_t mf_engine_n_threads(const mf_engine *engine);
uint32_t mf_engine_n_ctx(const mf_engine *engine);

// ---- KV cache --------------------------------------------------------------------------------

// The format that a request gives on a device for a model of n_params weights: *name is "f32",
// "f16" or "q8_0", static. NULL and "auto" leave the choice to the device; on the CPU it is f32 for
// every size.
int mf_kv_format_resolve(const char **name, const char *requested, const char *device_name,
                         uint64_t n_params);

typedef struct mf_kv_span {
    int32_t pos, cell, len;  // positions [pos, pos+len) lie in cells [cell, cell+len)
} mf_kv_span;

typedef struct mf_kv_group {
    size_t size;
    const char *kind;  // "sliding-512/f32/kv1x256"
    uint32_t n_layers;
    uint32_t n_cells;          // of the arena
    uint32_t n_used;           // cells that are not free
    uint64_t bytes_per_token;  // of all layers of the group
    uint32_t n_shared;         // cells that several sequences read
    uint32_t n_reserved;       // cells that mf_kv_reserve holds for rows to come; part of n_used
    uint32_t n_free_runs, largest_run;  // maximal runs of free cells
    uint64_t n_stale;  // rows of all sequences that only laziness keeps: older than their window
    uint64_t compactions;  // made by a forward, because a sequence lay in too many spans
    uint64_t generation;   // changes whenever rows move to other cells
} mf_kv_group;

// Rows of cells [src, src + n) of a group go to [dst, dst + n), as memmove does.
typedef struct mf_kv_move {
    int32_t src, dst, n, group;
} mf_kv_move;

int mf_kv_len(uint32_t *rows, mf_engine *engine, int32_t seq);
int mf_kv_next_pos(uint32_t *pos, mf_engine *engine, int32_t seq);
// Drops the last n rows in all groups, or in none (MF_KV_GONE: a window has dropped rows that the
// shorter sequence needs).
int mf_kv_trim(mf_engine *engine, int32_t seq, uint32_t n);
// The largest n such that every trim of at most n rows is accepted now.
int mf_kv_max_trim(uint32_t *n, mf_engine *engine, int32_t seq);
// Drops all rows of a sequence, and what is reserved for it; who shares its rows keeps them.
int mf_kv_free(mf_engine *engine, int32_t seq);
// Drops the rows at positions [p0, p1) of one sequence and moves its later positions down by
// p1 - p0: their K is rotated to its new position. Rows that other sequences read stay as they are
// for those; the moved ones are copied first (MF_KV_FULL without cells for them). MF_KV_GONE as for
// trim; MF_KV_GAPS; MF_UNSUPPORTED if rows would move and the model or the device cannot rotate
// them. Up to next_pos it is a trim. Rows after the cut have seen the removed tokens.
int mf_kv_rm(mf_engine *engine, int32_t seq, int32_t p0, int32_t p1);
// Moves the rows at positions >= p0 of one sequence by delta, with the same rules. Rows keep their
// order: MF_KV_COLLIDES at or below the row before, MF_KV_RANGE outside [0, 2^24). A gap that opens
// holds no row and is no error.
int mf_kv_shift(mf_engine *engine, int32_t seq, int32_t p0, int32_t delta);
// The empty sequence dst (else MF_KV_NOT_EMPTY) becomes the first n rows of src, read in place: no
// row is copied and no cell taken. MF_KV_GONE: a window of src has dropped rows that n rows need.
int mf_kv_share(mf_engine *engine, int32_t dst, int32_t src, uint32_t n);
// Afterwards the next n rows of a sequence cannot be refused for want of cells, whatever the others
// do: it holds exactly n free cells beyond its rows (0 gives them back). Moves no row.
int mf_kv_reserve(mf_engine *engine, int32_t seq, uint32_t n);
// The same in one run of cells; compacts if there is none. *moves (freed with mf_kv_moves_free) are
// the moves made: who remembers a cell applies them in this order. A move may go through cell
// n_cells of its group, a spare row.
int mf_kv_reserve_with_defrag(mf_kv_move **moves, size_t *n_moves, mf_engine *engine, int32_t seq,
                              uint32_t n);
// Compacts until each full group has a run of `need` free cells (a sliding one: of n_batch at
// most), and every sequence fits into a read; 0 closes all holes. No content changes.
int mf_kv_defrag(mf_kv_move **moves, size_t *n_moves, mf_engine *engine, uint32_t need);
void mf_kv_moves_free(mf_kv_move *moves);
// The order in which moves, each made as memmove does, give what all of them at once would, in
// *ordered [*n_ordered], freed with mf_kv_moves_free; a move may be cut into several. Groups are
// kept apart and come in rising order. MF_KV_OVERLAP: two moves read or write one row;
// MF_KV_CYCLE: no order is right.
int mf_kv_order_moves(mf_kv_move **ordered, size_t *n_ordered, const mf_kv_move *moves, size_t n);
int mf_kv_get_group(mf_kv_group *out, mf_engine *engine, uint32_t group);
// Group of a layer.
int mf_kv_layer_group(uint32_t *group, mf_engine *engine, uint32_t layer);
// Spans of a sequence in a group, in position order. *n is their number; with spans == NULL only
// that, otherwise `capacity` must be at least *n.
int mf_kv_spans(size_t *n, mf_kv_span *spans, size_t capacity, mf_engine *engine, int32_t seq,
                uint32_t group);
// Walks every invariant; MF_INTERNAL names the broken one.
int mf_kv_check(mf_engine *engine);

// ---- sessions --------------------------------------------------------------------------------

typedef struct mf_kv_save_options {
    size_t size;
    const int32_t *seqs;  // [n_seqs], each once; NULL: all that have rows
    size_t n_seqs;
    const void *host_state;  // [host_bytes] what the caller wants to find again beside the rows; at
                             // most 2^30
    size_t host_bytes;
    uint64_t *progress;  // optional, [2]: bytes done so far, and in all; read them atomically
} mf_kv_save_options;

typedef struct mf_kv_load_options {
    size_t size;
    const int32_t *seqs;  // [n_seqs] where the file's sequences go, in their order; NULL: where
                          // they were
    size_t n_seqs;
    uint64_t *progress;  // optional, [2], as above: of the verification, which comes first
} mf_kv_load_options;

// Writes sequences with their rows, positions and sharing to a file (docs/session-format.md). The
// file is replaced as a whole: whenever the process is stopped, the old or the new one is there.
int mf_kv_save(mf_engine *engine, const char *path, const mf_kv_save_options *options);
// Verifies the whole file, then replaces the sequences it names; they go on bit for bit. Another
// model, format, n_ctx or device, and any damaged byte, is refused (MF_FORMAT names what differs),
// with nothing changed; so is a file whose rows do not fit (MF_KV_FULL). *host_state [*host_bytes]
// is freed with mf_kv_host_free. The file is mapped meanwhile: do not truncate it.
int mf_kv_load(void **host_state, size_t *host_bytes, mf_engine *engine, const char *path,
               const mf_kv_load_options *options);
void mf_kv_host_free(void *host_state);

// ---- session files without an engine ---------------------------------------------------------

typedef struct mf_session_options {
    size_t size;
    uint32_t n_threads;  // for the checksums; 0: one per available core
    uint64_t *progress;  // optional, [2], as above
} mf_session_options;

typedef struct mf_session_info {
    size_t size;
    uint64_t file_bytes;
    uint32_t version, flags;  // of the file's header
    const char *device;       // "cpu"
    const char *kv_format;    // "f32"
    uint32_t n_layer, n_ctx, n_embd, n_head_kv, head_dim;
    uint32_t row_bytes;  // of the K, or the V, of one row in one layer
    uint32_t n_groups, n_seqs, n_sections;
    uint64_t fingerprint[2];  // of the model
    const void *host_state;   // [host_bytes]
    size_t host_bytes;
} mf_session_info;

// A part of the file with its checksum, XXH64.
typedef struct mf_session_section {
    size_t size;
    const char *name;  // "KINDS", "SEQS", "ROWS", "K", "V", "HOST"
    uint32_t index;    // the group of ROWS, the layer of K and V, else 0
    uint64_t offset;   // in the file
    uint64_t checksum;
    const void *data;  // [bytes]
    size_t bytes;
} mf_session_section;

// Layers that share their rows' numbers. K and V of each of them are [n_rows][row_bytes].
typedef struct mf_session_group {
    size_t size;
    const char *kind;  // "sliding-512/f32/kv1x256"
    uint32_t n_layers;
    uint32_t window;  // 0: none
    uint32_t n_rows;  // numbers 0..n_rows-1; a row that several sequences read is there once
} mf_session_group;

typedef struct mf_session_seq {
    size_t size;
    int32_t seq;        // its number in the engine that saved it
    uint32_t len;       // rows, also those that have left their window
    uint32_t next_pos;  // one above the last row's
    uint32_t clean;     // leading rows that equal a plain prefill of their tokens
} mf_session_seq;

// Verifies everything that can be verified without the model: all bytes, and that some engine could
// have saved them. The file is mapped while it is open: do not truncate it.
int mf_session_open(mf_session **out, const char *path, const mf_session_options *options);
void mf_session_free(mf_session *session);
int mf_session_get_info(mf_session_info *out, const mf_session *session);
// Sections in the file's order.
int mf_session_get_section(mf_session_section *out, const mf_session *session, uint32_t index);
int mf_session_get_group(mf_session_group *out, const mf_session *session, uint32_t group);
// Group of a layer.
int mf_session_layer_group(uint32_t *group, const mf_session *session, uint32_t layer);
// Sequences in the file's order.
int mf_session_get_seq(mf_session_seq *out, const mf_session *session, uint32_t index);
// Spans of a sequence in a group, in position order, as mf_kv_spans says; `cell` is the row's
// number.
int mf_session_spans(size_t *n, mf_kv_span *spans, size_t capacity, const mf_session *session,
                     uint32_t index, uint32_t group);

// ---- sampling --------------------------------------------------------------------------------

typedef struct mf_sampling {
    size_t size;
    float temperature;     // 0: greedy
    int32_t top_k;         // 0: off
    float top_p;           // 0 or 1: off
    float min_p;           // 0: off
    float repeat_penalty;  // 0 or 1: off
    uint64_t seed;
    uint64_t choice;  // tells apart several answers to one prompt
} mf_sampling;

// Picks a token. The random number is a pure function of (seed, choice, position), so the same
// logits at the same position give the same token in any process. `recent` [n_recent]: tokens that
// repeat_penalty acts on. NaN logits are never picked; if nothing else is left: MF_ARG.
int mf_sample(int32_t *token, const float *logits, size_t n_vocab, const mf_sampling *sampling,
              const int32_t *recent, size_t n_recent, uint64_t position);

#ifdef __cplusplus
}
#endif
#endif
