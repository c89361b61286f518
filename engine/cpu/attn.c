// Owns the division of attention into tasks and the scratch it needs; see attn.h. Refuses nothing:
// arguments were checked above. Invariant: what a row's state is folded from, and in which order,
// does not depend on the division.
#include "attn.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum {
    BLOCK_ROWS = 256,  // query rows that share one pass over the tiles
    MIN_ROWS = 64,     // below, transposing K costs more than a better balance brings
    SPLIT_ROWS = 32,   // a unit of at most so many rows may be split by tiles
    SPLIT_UNITS = 4,   // ... in batches of fewer units than this times the threads
    PART_TILES = 4,    // tiles worth a task of their own
    KEEP_MIN = 512,    // row states kept for merging at a time, at least and at most
    KEEP_MAX = 8192,
    KEEP_TILES = 8  // ... of each unit, else splitting is not worth its barriers
};

typedef struct unit {
    const attn_seq *seq;
    uint32_t head, i0, i1;
    uint32_t tile0, tile1;  // that its queries see
} unit;

// A unit that is split: its state, and this round's share of tiles.
typedef struct split {
    unit u;
    uint32_t n_rows, next, end;  // this round: tiles [next, end)
    uint32_t n_parts,
        direct;  // part 0 folds tiles [next, direct) into the state, the others keep theirs
    uint32_t first_task;
    size_t state_row, keep_row;
} split;

typedef struct run {
    const cpu_kernels *k;
    const attn_batch *b;
    uint32_t group, block, n_units, n_threads;
    bool packed;        // rows are read packed
    uint32_t n_tokens;  // of all sequences, from the first token of the first
    act_q8 queries;     // [n_tokens][n_head * head_dim] if packed, one token after the other
    uint8_t *threads;   // per thread: kernel scratch, the state of a block, floats of a tile
    size_t thread_bytes;
    uint32_t *first_unit;  // [n_seqs + 1]
    split *splits;         // [n_splits]
    float *states, *kept;  // of splits; keep_rows row states
    size_t keep_rows;
    uint32_t n_splits, n_tasks;
    uint32_t *merge_first;  // [n_splits + 1]: first merge task
} run;

static size_t align64(size_t n) { return (n + 63) & ~(size_t)63; }

static uint32_t max_rows(uint32_t group) {
    return group > BLOCK_ROWS ? group : BLOCK_ROWS / group * group;
}

// Row states in one array: acc of all, lanes of all, max of all.
static size_t state_floats(size_t n_rows, uint32_t head_dim) {
    return n_rows * (head_dim + ATTN_LANES + 1);
}

static attn_state state_at(float *mem, size_t n_rows, size_t row, uint32_t head_dim) {
    float *lanes = mem + n_rows * head_dim, *max = lanes + n_rows * ATTN_LANES;
    return (attn_state){mem + row * head_dim, lanes + row * ATTN_LANES, max + row};
}

static void state_clear(const attn_state *s, size_t n_rows, uint32_t head_dim) {
    memset(s->acc, 0, n_rows * head_dim * sizeof *s->acc);
    memset(s->lanes, 0, n_rows * ATTN_LANES * sizeof *s->lanes);
    for (size_t r = 0; r < n_rows; r++) s->max[r] = -INFINITY;
}

static size_t max_splits(uint32_t n_threads) { return (size_t)SPLIT_UNITS * n_threads; }

static size_t block_state_bytes(uint32_t group, uint32_t head_dim) {
    return align64(state_floats(max_rows(group), head_dim) * sizeof(float));
}

static size_t thread_bytes(uint32_t group, uint32_t head_dim, bool widened) {
    const size_t tile = widened ? (size_t)2 * ATTN_TILE * head_dim * sizeof(float) : 0;
    return align64(ATTN_SCRATCH_BYTES) + block_state_bytes(group, head_dim) + align64(tile);
}

// Quantised queries of n_tokens tokens.
static size_t queries_bytes(uint32_t n_tokens, uint32_t n_head, uint32_t head_dim) {
    const size_t blocks = (size_t)n_tokens * n_head * head_dim / ACT_BLOCK;
    return align64(blocks * ACT_BLOCK) + 2 * align64(blocks * 4) + align64(blocks * 8);
}

// All but the kept states, which get the rest.
static size_t fixed_bytes(const attn_limits *l) {
    const size_t splits = max_splits(l->n_threads);
    const uint32_t group = l->n_head / l->n_head_kv;
    const bool packed = l->format == KV_FORMAT_Q8_0 && !l->widened;
    return l->n_threads * thread_bytes(group, l->head_dim, l->widened) +
           align64(state_floats(splits * SPLIT_ROWS, l->head_dim) * sizeof(float)) +
           align64(splits * sizeof(split)) + align64((splits + 1) * sizeof(uint32_t)) +
           align64(((size_t)l->n_batch + 1) * sizeof(uint32_t)) +
           (packed ? queries_bytes(l->n_batch, l->n_head, l->head_dim) : 0);
}

size_t attn_scratch_bytes(const attn_limits *l) {
    const uint32_t group = l->n_head / l->n_head_kv;
    const uint64_t decode = ((uint64_t)l->n_ctx / ATTN_TILE + 1) * group * 2 * l->n_threads;
    const size_t rows = decode > KEEP_MAX   ? KEEP_MAX
                        : decode < KEEP_MIN ? KEEP_MIN
                                            : (size_t)decode;
    return fixed_bytes(l) + align64(state_floats(rows, l->head_dim) * sizeof(float));
}

static void *take(uint8_t **at, size_t bytes) {
    void *p = *at;
    *at += align64(bytes);
    return p;
}

// ---- where rows lie --------------------------------------------------------------------------

static uint32_t unit_lo(const attn_batch *b, const unit *u) {
    const uint32_t hi = u->seq->pos0 + u->i0 + 1;
    return hi > b->window ? hi - b->window : 0;
}

static uint32_t unit_hi(const unit *u) { return u->seq->pos0 + u->i1; }

static attn_packed packed_queries(const run *r, const unit *u, size_t head) {
    if (!r->packed) return (attn_packed){0};
    const size_t stride = (size_t)r->b->n_head * r->b->head_dim;
    const size_t at = (u->seq->first_token - r->b->seqs->first_token) * stride + head;
    return (attn_packed){r->queries.q + at, r->queries.d + at / ACT_BLOCK,
                         r->queries.neg_sum + at / ACT_BLOCK, stride};
}

static attn_job unit_job(const run *r, const unit *u) {
    const attn_batch *b = r->b;
    const size_t head = (size_t)u->head * r->group * b->head_dim;
    return (attn_job){.q = b->q + u->seq->first_token * b->q_stride + head,
                      .q_stride = b->q_stride,
                      .packed = packed_queries(r, u, head),
                      .out = b->out + u->seq->first_token * b->out_stride + head,
                      .out_stride = b->out_stride,
                      .head_dim = b->head_dim,
                      .group = r->group,
                      .n_queries = u->seq->n_tokens,
                      .pos0 = u->seq->pos0,
                      .window = b->window,
                      .scale = b->scale,
                      .softcap = b->softcap};
}

typedef struct tile_rows {
    const void *k[ATTN_TILE], *v[ATTN_TILE];
} tile_rows;

// The first tile >= `from` with a row in [lo, hi), or UINT32_MAX; moves *span past the spans before
// it.
static uint32_t tile_find(const mf_kv_span **span, const mf_kv_span *end, uint32_t from,
                          uint32_t lo, uint32_t hi) {
    const uint32_t start = u32_max(from * ATTN_TILE, lo);
    while (*span < end && (uint32_t)((*span)->pos + (*span)->len) <= start) ++*span;
    if (*span == end) return UINT32_MAX;
    const uint32_t p = u32_max(start, (uint32_t)(*span)->pos);
    return p < hi ? p / ATTN_TILE : UINT32_MAX;
}

// Addresses of a tile's rows in [lo, hi); NULL where there is none. `span`: the first that reaches
// into the tile.
static void tile_gather(tile_rows *out, const run *r, uint32_t head, const mf_kv_span *span,
                        const mf_kv_span *end, uint32_t tile, uint32_t lo, uint32_t hi) {
    const uint32_t base = tile * ATTN_TILE, first = u32_max(base, lo),
                   last = u32_min(base + ATTN_TILE, hi);
    const attn_batch *b = r->b;
    const size_t stride = kv_format_row_bytes(b->format, b->n_head_kv * b->head_dim),
                 offset = head * kv_head_bytes(b->format, b->head_dim);
    memset(out, 0, sizeof *out);
    for (; span < end && (uint32_t)span->pos < last; span++) {
        const uint32_t pos = (uint32_t)span->pos, stop = u32_min(pos + (uint32_t)span->len, last);
        for (uint32_t p = u32_max(pos, first); p < stop; p++) {
            const size_t at = ((size_t)(uint32_t)span->cell + (p - pos)) * stride + offset;
            out->k[p - base] = (const uint8_t *)b->k_region + at;
            out->v[p - base] = (const uint8_t *)b->v_region + at;
        }
    }
}

// Asks for all of the first tile at once: the kernels ask ahead from the second on, and where
// few positions are read, all were pushed out of the caches by the weights since the last token.
static void prefetch_tile(const tile_rows *t, size_t bytes) {
    enum { READ, LEVEL_2 = 2, LINE = 64 };
    for (uint32_t x = 0; x < ATTN_TILE; x++) {
        if (!t->k[x]) continue;
        for (size_t i = 0; i < bytes; i += LINE) {
            __builtin_prefetch((const uint8_t *)t->k[x] + i, READ, LEVEL_2);
            __builtin_prefetch((const uint8_t *)t->v[x] + i, READ, LEVEL_2);
        }
    }
}

// The rows as floats in the thread's scratch, where they then lie.
static void tile_widen(tile_rows *t, const run *r, void *scratch) {
    const uint32_t head_dim = r->b->head_dim;
    uint8_t *mem =
        (uint8_t *)scratch + align64(ATTN_SCRATCH_BYTES) + block_state_bytes(r->group, head_dim);
    float *k = (float *)(void *)mem, *v = k + (size_t)ATTN_TILE * head_dim;
    for (uint32_t x = 0; x < ATTN_TILE; x++, k += head_dim, v += head_dim) {
        if (!t->k[x]) continue;
        r->k->kv_load[r->b->format](k, t->k[x], head_dim);
        r->k->kv_load[r->b->format](v, t->v[x], head_dim);
        t->k[x] = k;
        t->v[x] = v;
    }
}

// Folds the unit's tiles [tile0, tile1) into `state`; or, if `keep`, tile t alone into the row
// states of `kept` that start at keep_row + (t - tile0) * rows.
static void fold_tiles(const run *r, const unit *u, uint32_t tile0, uint32_t tile1,
                       attn_state *state, bool keep, size_t keep_row, void *scratch) {
    const uint32_t head_dim = r->b->head_dim, lo = unit_lo(r->b, u),
                   hi = u32_min(unit_hi(u), tile1 * ATTN_TILE);
    const uint32_t n_rows = (u->i1 - u->i0) * r->group;
    const attn_job job = unit_job(r, u);
    const mf_kv_span *span = u->seq->spans, *end = span + u->seq->n_spans;
    static const tile_rows none;
    tile_rows buffers[2], *now = buffers, *next = buffers + 1;
    if (keep) {
        const attn_state s = state_at(r->kept, r->keep_rows, keep_row, head_dim);
        for (size_t x = 0; x < (size_t)n_rows * (tile1 - tile0); x++) s.max[x] = -INFINITY;
    }
    uint32_t tile = tile_find(&span, end, tile0, lo, hi);
    if (tile != UINT32_MAX) {
        tile_gather(now, r, u->head, span, end, tile, lo, hi);
        prefetch_tile(now, kv_head_bytes(r->b->format, head_dim));
    }
    while (tile != UINT32_MAX) {
        const uint32_t after = tile_find(&span, end, tile + 1, lo, hi);
        if (after != UINT32_MAX)
            tile_gather(next, r, u->head, span, end, after, lo, hi);
        else
            memset(next, 0, sizeof *next);
        attn_state into = keep ? state_at(r->kept, r->keep_rows,
                                          keep_row + (size_t)(tile - tile0) * n_rows, head_dim)
                               : *state;
        if (keep) state_clear(&into, n_rows, head_dim);
        if (r->b->widened) {
            tile_widen(now, r, scratch);
            r->k->attn_tile[KV_FORMAT_F32](&job, u->i0, u->i1, tile, now->k, now->v, none.k, none.v,
                                           &into, scratch);
        } else {
            r->k->attn_tile[r->b->format](&job, u->i0, u->i1, tile, now->k, now->v, next->k,
                                          next->v, &into, scratch);
        }
        tile_rows *swap = now;
        now = next;
        next = swap;
        tile = after;
    }
}

// ---- units as tasks --------------------------------------------------------------------------

static uint32_t blocks_of(const attn_seq *s, uint32_t block) {
    return (s->n_tokens + block - 1) / block;
}

static uint64_t count_units(const attn_batch *b, uint32_t block) {
    uint64_t n = 0;
    for (uint32_t s = 0; s < b->n_seqs; s++) n += blocks_of(b->seqs + s, block);
    return n * b->n_head_kv;
}

// Queries per block: as many as fit, fewer if that would leave threads idle.
static uint32_t choose_block(const attn_batch *b, uint32_t group, uint32_t n_threads) {
    uint32_t block = max_rows(group) / group;
    while (block > 1 && (block + 1) / 2 * group >= MIN_ROWS &&
           count_units(b, block) < 4 * (uint64_t)n_threads)
        block = (block + 1) / 2;
    while (block > 1 && block * group > SPLIT_ROWS && count_units(b, block) < n_threads)
        block = (block + 1) / 2;
    return block;
}

static unit unit_at(const run *r, uint32_t index) {
    uint32_t s = 0, end = r->b->n_seqs;  // the last s with first_unit[s] <= index
    while (end - s > 1) {
        const uint32_t mid = s + (end - s) / 2;
        if (r->first_unit[mid] <= index)
            s = mid;
        else
            end = mid;
    }
    const attn_seq *seq = r->b->seqs + s;
    const uint32_t within = index - r->first_unit[s], block = within / r->b->n_head_kv;
    unit u = {.seq = seq, .head = within % r->b->n_head_kv, .i0 = block * r->block};
    u.i1 = u32_min(u.i0 + r->block, seq->n_tokens);
    u.tile0 = unit_lo(r->b, &u) / ATTN_TILE;
    u.tile1 = (unit_hi(&u) + ATTN_TILE - 1) / ATTN_TILE;
    return u;
}

static void run_unit(const run *r, const unit *u, uint32_t thread) {
    uint8_t *mem = r->threads + thread * r->thread_bytes;
    const uint32_t n_rows = (u->i1 - u->i0) * r->group;
    attn_state state =
        state_at((float *)(void *)(mem + align64(ATTN_SCRATCH_BYTES)), n_rows, 0, r->b->head_dim);
    const attn_job job = unit_job(r, u);
    state_clear(&state, n_rows, r->b->head_dim);
    fold_tiles(r, u, u->tile0, u->tile1, &state, false, 0, mem);
    r->k->attn_finish(&job, u->i0, u->i1, &state);
}

// Later blocks see more keys, so they go first.
static void unit_task(void *arg, uint32_t task, uint32_t thread) {
    const run *r = arg;
    const unit u = unit_at(r, r->n_units - 1 - task);
    run_unit(r, &u, thread);
}

// ---- splits ----------------------------------------------------------------------------------

static attn_state split_state(const run *r, const split *s) {
    return state_at(r->states, max_splits(r->n_threads) * SPLIT_ROWS, s->state_row, r->b->head_dim);
}

// First tile of part `i` of the round.
static uint32_t part_tile(const split *s, uint32_t i) {
    return s->next + (uint32_t)((uint64_t)(s->end - s->next) * i / s->n_parts);
}

static void split_task(void *arg, uint32_t task, uint32_t thread) {
    const run *r = arg;
    uint32_t i = 0;
    while (i + 1 < r->n_splits && r->splits[i + 1].first_task <= task) i++;
    const split *s = r->splits + i;
    const uint32_t part = task - s->first_task;
    void *scratch = r->threads + thread * r->thread_bytes;
    if (s->n_rows > SPLIT_ROWS) {
        run_unit(r, &s->u, thread);
    } else if (part == 0) {
        attn_state state = split_state(r, s);
        fold_tiles(r, &s->u, s->next, s->direct, &state, false, 0, scratch);
    } else {
        const uint32_t from = part_tile(s, part);
        fold_tiles(r, &s->u, from, part_tile(s, part + 1), NULL, true,
                   s->keep_row + (size_t)(from - s->direct) * s->n_rows, scratch);
    }
}

static void merge_row(const run *r, const split *s, uint32_t row) {
    attn_state state = split_state(r, s);
    state.acc += (size_t)row * r->b->head_dim;
    state.lanes += (size_t)row * ATTN_LANES;
    state.max += row;
    for (uint32_t t = s->direct; t < s->end; t++) {
        const size_t at = s->keep_row + (size_t)(t - s->direct) * s->n_rows + row;
        const attn_state part = state_at(r->kept, r->keep_rows, at, r->b->head_dim);
        r->k->attn_merge(1, r->b->head_dim, &part, &state);
    }
}

static void merge_task(void *arg, uint32_t task, uint32_t thread) {
    const run *r = arg;
    uint32_t i = 0;
    (void)thread;
    while (r->merge_first[i + 1] <= task) i++;
    merge_row(r, r->splits + i, task - r->merge_first[i]);
}

// Lists the units and gives states to those that are split; false if splitting is not worth it.
static bool plan_splits(run *r, uint32_t *quota) {
    uint64_t total = 0, longest = 0, rows = 0;
    if (r->n_threads == 1 || r->n_units >= max_splits(r->n_threads)) return false;
    for (uint32_t i = 0; i < r->n_units; i++) {
        split *s = r->splits + i;
        *s = (split){.u = unit_at(r, r->n_units - 1 - i), .state_row = (size_t)i * SPLIT_ROWS};
        s->n_rows = (s->u.i1 - s->u.i0) * r->group;
        s->next = s->u.tile0;
        const uint64_t tiles = s->u.tile1 - s->u.tile0;
        total += tiles * s->n_rows;
        if (s->n_rows > SPLIT_ROWS) continue;
        longest = tiles * s->n_rows > longest ? tiles * s->n_rows : longest;
        rows += s->n_rows;
    }
    // Balanced well enough as it is?
    const uint64_t turns = (r->n_units + r->n_threads - 1) / r->n_threads;
    if (rows == 0 || turns * longest * r->n_threads * 5 <= total * 6) return false;
    *quota = (uint32_t)(r->keep_rows / rows);
    r->n_splits = r->n_units;
    return *quota >= KEEP_TILES;
}

// Shares out the next tiles of every split; false when none are left.
static bool plan_round(run *r, uint32_t quota, bool first) {
    uint64_t work = 0;
    size_t keep_row = 0;
    for (uint32_t i = 0; i < r->n_splits; i++) {
        split *s = r->splits + i;
        const bool whole = s->n_rows > SPLIT_ROWS;
        s->end = whole ? (first ? s->u.tile1 : s->next) : u32_min(s->u.tile1, s->next + quota);
        work += (uint64_t)(s->end - s->next) * s->n_rows;
    }
    r->n_tasks = 0;
    r->merge_first[0] = 0;
    for (uint32_t i = 0; i < r->n_splits; i++) {
        split *s = r->splits + i;
        const uint32_t tiles = s->end - s->next;
        s->first_task = r->n_tasks;
        s->n_parts = tiles ? 1 : 0;
        if (tiles && s->n_rows <= SPLIT_ROWS) {
            const uint64_t share = (uint64_t)tiles * s->n_rows * 2 * r->n_threads / work;
            s->n_parts = u32_max(1, u32_min((uint32_t)share, tiles / PART_TILES));
        }
        s->direct = s->n_parts ? part_tile(s, 1) : s->next;
        if (s->n_rows > SPLIT_ROWS) s->direct = s->end;
        s->keep_row = keep_row;
        keep_row += (size_t)(s->end - s->direct) * s->n_rows;
        r->n_tasks += s->n_parts;
        r->merge_first[i + 1] = r->merge_first[i] + (s->end > s->direct ? s->n_rows : 0);
    }
    assert(keep_row <= r->keep_rows);
    return r->n_tasks > 0;
}

static void run_splits(run *r, pool *p, uint32_t quota) {
    for (uint32_t i = 0; i < r->n_splits; i++) {
        const attn_state state = split_state(r, r->splits + i);
        if (r->splits[i].n_rows <= SPLIT_ROWS)
            state_clear(&state, r->splits[i].n_rows, r->b->head_dim);
    }
    for (bool first = true; plan_round(r, quota, first); first = false) {
        pool_run(p, split_task, r, r->n_tasks);
        if (r->merge_first[r->n_splits]) pool_run(p, merge_task, r, r->merge_first[r->n_splits]);
        for (uint32_t i = 0; i < r->n_splits; i++) r->splits[i].next = r->splits[i].end;
    }
    for (uint32_t i = 0; i < r->n_splits; i++) {
        const split *s = r->splits + i;
        if (s->n_rows > SPLIT_ROWS) continue;
        const attn_job job = unit_job(r, &s->u);
        const attn_state state = split_state(r, s);
        r->k->attn_finish(&job, s->u.i0, s->u.i1, &state);
    }
}

enum { QUERY_TOKENS = 8 };  // worth a task

static void query_task(void *arg, uint32_t task, uint32_t thread) {
    const run *r = arg;
    const attn_batch *b = r->b;
    const uint32_t width = b->n_head * b->head_dim, blocks = width / ACT_BLOCK,
                   last = u32_min((task + 1) * QUERY_TOKENS, r->n_tokens);
    (void)thread;
    for (uint32_t t = task * QUERY_TOKENS; t < last; t++) {
        const size_t at = (size_t)t * blocks;
        act_q8 out = {1, r->queries.q + at * ACT_BLOCK, r->queries.d + at, r->queries.neg_sum + at,
                      r->queries.neg_half + 2 * at};
        r->k->quantize(&out, b->q + (b->seqs->first_token + t) * b->q_stride, width, width, 0, 1);
    }
}

static void quantize_queries(run *r, pool *p, uint8_t **at) {
    const attn_batch *b = r->b;
    const attn_seq *last = b->seqs + b->n_seqs - 1;
    r->n_tokens = last->first_token + last->n_tokens - b->seqs->first_token;
    const size_t blocks = (size_t)r->n_tokens * b->n_head * b->head_dim / ACT_BLOCK;
    r->queries = (act_q8){.n_tokens = 1};
    r->queries.q = take(at, blocks * ACT_BLOCK);
    r->queries.d = take(at, blocks * sizeof *r->queries.d);
    r->queries.neg_sum = take(at, blocks * sizeof *r->queries.neg_sum);
    r->queries.neg_half = take(at, 2 * blocks * sizeof *r->queries.neg_half);
    const uint32_t tasks = (r->n_tokens + QUERY_TOKENS - 1) / QUERY_TOKENS;
    if (tasks > 1)
        pool_run(p, query_task, r, tasks);
    else
        query_task(r, 0, 0);
}

void attn_run(const cpu_kernels *k, pool *p, const attn_batch *b) {
    assert(b->head_dim % 16 == 0 && b->head_dim <= HEAD_DIM_MAX && b->window > 0 &&
           b->n_head % b->n_head_kv == 0);
    assert(b->format != KV_FORMAT_Q8_0 || b->head_dim % KV_BLOCK == 0);
    run r = {.k = k, .b = b, .group = b->n_head / b->n_head_kv, .n_threads = pool_threads(p)};
    r.packed = b->format == KV_FORMAT_Q8_0 && !b->widened;
    const size_t splits = max_splits(r.n_threads);
    uint8_t *at = b->scratch;
    r.thread_bytes = thread_bytes(r.group, b->head_dim, b->widened);
    r.threads = take(&at, r.n_threads * r.thread_bytes);
    r.states = take(&at, state_floats(splits * SPLIT_ROWS, b->head_dim) * sizeof(float));
    r.splits = take(&at, splits * sizeof(split));
    r.merge_first = take(&at, (splits + 1) * sizeof(uint32_t));
    r.first_unit = take(&at, ((size_t)b->n_seqs + 1) * sizeof(uint32_t));
    if (r.packed) quantize_queries(&r, p, &at);
    const size_t fixed = (size_t)(at - (uint8_t *)b->scratch);
    assert(fixed <= b->scratch_bytes);
    r.kept = (float *)(void *)at;
    r.keep_rows = (b->scratch_bytes - fixed) / (state_floats(1, b->head_dim) * sizeof(float));
    r.block = choose_block(b, r.group, r.n_threads);
    for (uint32_t s = 0; s < b->n_seqs; s++) {
        r.first_unit[s] = r.n_units;
        r.n_units += blocks_of(b->seqs + s, r.block) * b->n_head_kv;
    }
    uint32_t quota = 0;
    if (plan_splits(&r, &quota))
        run_splits(&r, p, quota);
    else
        pool_run(p, unit_task, &r, r.n_units);
}
