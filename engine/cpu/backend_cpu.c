// The CPU device: runs a planned graph on a thread pool. Owns the compute buffer and the pool of
// one engine, and its KV regions through kv_region.h.
//
// A step of row-wise nodes is cut into ranges of rows, and a thread runs all nodes of the step on
// its range; a matrix product is cut into ranges of output rows; attention as attn.h says. No cut
// divides a sum, so none changes a bit.
#include "backend_cpu.h"

#include <string.h>

#include "../alloc.h"
#include "../error.h"
#include "../mathd.h"
#include "attn.h"
#include "cpu_limits.h"
#include "cpu_weight.h"
#include "kernels.h"
#include "kv_region.h"

enum {
    TASKS_PER_THREAD = 8,  // of a large step: what a thread that falls behind leaves to the others
    INLINE_ELEMENTS = 1 << 14  // a row-wise step below this is not worth waking a thread for
};

struct backend {
    backend_config c;  // points at copies, which are this object's
    const cpu_kernels *k;
    pool *threads;
    uint32_t *layer_group, *layer_window, *layer_rope;
    double *freq;  // [ROPE_KINDS][n_rot/2]
    kv_regions kv;
    uint8_t *buffer;
    size_t buffer_bytes;
    attn_seq *attn_seqs;     // [n_batch]
    mf_kv_span *attn_spans;  // [n_batch] of windows that come without spans: at most one per query
    uint8_t *scratch;        // of the step that runs: of attention, or of each thread's products
    size_t scratch_bytes, attn_scratch_bytes;
};

// One step of one pass.
typedef struct pass {
    backend *b;
    const graph *g;
    const batch *in;
    float *logits;
    const graph_step *step;
    uint32_t n_rows, rows_per_task;
    const graph_node *node;  // of a matrix product
    uint32_t panels_per_task, n_panels;
} pass;

static const cpu_weight *cpu(const weight *w) { return (const cpu_weight *)w; }

static float *row_of(const pass *s, int32_t v, uint32_t row) {
    const graph_value *value = &s->g->values[v];
    float *base =
        value->format == VALUE_LOGITS ? s->logits : (float *)(s->b->buffer + value->offset);
    return base + (size_t)row * value->width;
}

// The int8 form of a value, laid out for the rows of this pass.
static act_q8 q8_of(const pass *s, int32_t v) {
    const graph_value *value = &s->g->values[v];
    const uint32_t rows = value->rows == ROWS_TOKENS ? s->in->n_tokens : s->in->n_outputs;
    const q8_layout l = graph_q8_layout(value->width, rows);
    uint8_t *base = s->b->buffer + value->offset;
    return (act_q8){.n_tokens = rows,
                    .q = (int8_t *)(base + l.q),
                    .d = (float *)(base + l.d),
                    .neg_sum = (int32_t *)(base + l.neg_sum),
                    .neg_half = (int32_t *)(base + l.neg_half)};
}

static void rope_table(const pass *s, const graph_node *n, uint32_t row) {
    const backend *b = s->b;
    const uint32_t half = b->c.n_rot / 2;
    const double *freq = b->c.rope[n->kind].freq;
    const double magnitude = b->c.rope[n->kind].magnitude;
    float *out = row_of(s, n->out[0], row);
    for (uint32_t i = 0; i < half; i++) {
        double sine, cosine;
        math_sincos(&sine, &cosine, s->in->positions[row] * freq[i]);
        out[i] = (float)(cosine * magnitude);
        out[half + i] = (float)(sine * magnitude);
    }
}

static void kv_store(const pass *s, const graph_node *n, uint32_t row) {
    const backend *b = s->b;
    const int32_t cell = s->in->groups[b->c.layer_group[n->layer]].cells[row];
    kv_regions_store(&b->kv, (uint32_t)n->layer, (uint32_t)cell, row_of(s, n->in[0], row),
                     row_of(s, n->in[1], row));
}

static void norm(const pass *s, const graph_node *n, uint32_t row) {
    const uint32_t part = s->g->values[n->in[0]].width / n->parts;
    const float *x = row_of(s, n->in[0], row);
    float *y = row_of(s, n->out[0], row);
    for (uint32_t i = 0; i < n->parts; i++)
        s->b->k->rms_norm(y + i * part, x + i * part, cpu(n->w[0])->vec, part, n->f);
}

static void rope(const pass *s, const graph_node *n, uint32_t row) {
    const backend *b = s->b;
    const float *table = row_of(s, n->in[1], row);
    b->k->rope(row_of(s, n->in[0], row), table, table + b->c.n_rot / 2, n->parts, b->c.head_dim,
               b->c.n_rot, b->c.rope_interleaved);
}

static void run_row(const pass *s, const graph_node *n, uint32_t row) {
    const cpu_kernels *k = s->b->k;
    float *y = n->out[0] == GRAPH_NONE ? NULL : row_of(s, n->out[0], row);
    const float *x = n->in[0] == GRAPH_NONE ? NULL : row_of(s, n->in[0], row);
    const uint32_t width = n->out[0] == GRAPH_NONE ? 0 : s->g->values[n->out[0]].width;
    switch (n->op) {
        case OP_EMBED:
            panels_row(y, &cpu(n->w[0])->p, (uint32_t)s->in->tokens[row]);
            if (n->f != 1.0f) k->scale(y, y, n->f, width);
            break;
        case OP_ROPE_TABLE:
            rope_table(s, n, row);
            break;
        case OP_NORM:
            norm(s, n, row);
            break;
        case OP_BIAS:
            k->add(y, y, cpu(n->w[0])->vec, width);
            break;
        case OP_ROPE:
            rope(s, n, row);
            break;
        case OP_KV_STORE:
            kv_store(s, n, row);
            break;
        case OP_GLU:
            k->glu(y, x, row_of(s, n->in[1], row), width, (glu_kind)n->kind);
            break;
        case OP_ADD:
            k->add(y, y, row_of(s, n->in[1], row), width);
            break;
        case OP_TAKE_ROWS:
            memcpy(y, row_of(s, n->in[0], s->in->outputs[row]), width * sizeof(float));
            break;
        case OP_SOFTCAP:
            k->softcap(y, y, n->f, width);
            break;
        case OP_QUANTIZE:
        case OP_MATMUL:
        case OP_ATTN:
        case OP_COUNT:
            break;
    }
}

static void row_task(void *arg, uint32_t task, uint32_t thread) {
    (void)thread;
    const pass *s = arg;
    const uint32_t r0 = task * s->rows_per_task, r1 = u32_min(r0 + s->rows_per_task, s->n_rows);
    for (uint32_t i = s->step->first; i < s->step->last; i++) {
        const graph_node *n = &s->g->nodes[i];
        if (n->op == OP_QUANTIZE) {
            act_q8 q = q8_of(s, n->out[0]);
            const uint32_t width = s->g->values[n->in[0]].width;
            s->b->k->quantize(&q, row_of(s, n->in[0], 0), width, width, r0, r1);
        } else {
            for (uint32_t row = r0; row < r1; row++) run_row(s, n, row);
        }
    }
}

static void run_rows(pass *s) {
    size_t elements = 0;
    for (uint32_t i = s->step->first; i < s->step->last; i++) {
        const graph_node *n = &s->g->nodes[i];
        const int32_t v = n->out[0] == GRAPH_NONE ? n->in[0] : n->out[0];
        elements += (size_t)s->n_rows * s->g->values[v].width;
    }
    const uint32_t tasks =
        elements < INLINE_ELEMENTS ? 1 : pool_threads(s->b->threads) * TASKS_PER_THREAD;
    s->rows_per_task = u32_max(1, (s->n_rows + tasks - 1) / tasks);
    pool_run(s->b->threads, row_task, s, (s->n_rows + s->rows_per_task - 1) / s->rows_per_task);
}

// Panels of all matrices of the node in one row, so that q, k and v make one parallel step.
static void matmul_task(void *arg, uint32_t task, uint32_t thread) {
    const pass *s = arg;
    const graph_node *n = s->node;
    matmul_input x = {.f = row_of(s, n->in[0], 0),
                      .f_stride = s->g->values[n->in[0]].width,
                      .scratch = s->b->scratch + thread * s->b->k->matmul_scratch};
    if (n->in[1] != GRAPH_NONE) x.q = q8_of(s, n->in[1]);
    const uint32_t from = task * s->panels_per_task,
                   to = u32_min(from + s->panels_per_task, s->n_panels);
    uint32_t base = 0;
    for (uint32_t i = 0; i < n->n_mats; i++) {
        const panels *p = &cpu(n->w[i])->p;
        const uint32_t p0 = from > base ? from - base : 0;
        const uint32_t p1 = to > base ? u32_min(to - base, p->n_panels) : 0;
        if (p0 < p1)
            s->b->k->matmul[p->type](row_of(s, n->out[i], 0), p->n_rows, p, p0, p1, &x, 0,
                                     s->n_rows);
        base += p->n_panels;
    }
}

static void run_matmul(pass *s) {
    s->n_panels = 0;
    for (uint32_t i = 0; i < s->node->n_mats; i++) s->n_panels += cpu(s->node->w[i])->p.n_panels;
    const uint32_t threads = pool_threads(s->b->threads);
    const uint32_t tasks = threads == 1 ? 1 : threads * TASKS_PER_THREAD;
    s->panels_per_task = (s->n_panels + tasks - 1) / tasks;
    // Whole groups, unless too few tasks are left for threads to end together.
    if (s->n_panels / MATMUL_PANELS >= 4 * threads)
        s->panels_per_task =
            (s->panels_per_task + MATMUL_PANELS - 1) / MATMUL_PANELS * MATMUL_PANELS;
    pool_run(s->b->threads, matmul_task, s,
             (s->n_panels + s->panels_per_task - 1) / s->panels_per_task);
}

// The cells of a run in order: position p is in cell p.
static uint32_t causal_spans(mf_kv_span *out, const batch_run *r, uint32_t window) {
    const uint32_t lo = r->pos0 >= window ? r->pos0 - window + 1 : 0;
    *out = (mf_kv_span){(int32_t)lo, (int32_t)lo, (int32_t)(r->pos0 + r->n_tokens - lo)};
    return 1;
}

// The union of the ranges of a run's queries. Neighbours see the same rows but for the ends, so
// that most become one span; a query whose range does not continue the one before, in positions and
// in cells alike, begins a new one.
static uint32_t range_spans(mf_kv_span *out, const batch_run *r, const kv_range *ranges) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        const kv_range range = ranges[r->first_token + i];
        const int32_t q = (int32_t)(r->pos0 + i), len = (int32_t)(range.hi - range.lo);
        const int32_t pos = q + 1 - len, cell = (int32_t)range.lo;
        mf_kv_span *last = n ? &out[n - 1] : NULL;
        if (last && cell - pos == last->cell - last->pos && pos <= last->pos + last->len)
            last->len = q + 1 - last->pos;
        else
            out[n++] = (mf_kv_span){pos, cell, len};
    }
    return n;
}

// Where the rows of each run lie, whatever the mode: one walk over positions serves all three, so
// they give the same bits.
static void fill_attn_seqs(const backend *b, const batch *in, const kv_window *w, uint32_t window) {
    mf_kv_span *more = b->attn_spans;
    for (uint32_t i = 0; i < in->n_runs; i++) {
        const batch_run *r = &in->runs[i];
        attn_seq *seq = &b->attn_seqs[i];
        *seq = (attn_seq){
            .first_token = r->first_token, .n_tokens = r->n_tokens, .pos0 = r->pos0, .spans = more};
        if (w->mode == KV_WINDOW_RUNS) {
            seq->spans = w->spans[i];
            seq->n_spans = w->n_spans[i];
            continue;
        }
        seq->n_spans = w->mode == KV_WINDOW_CAUSAL ? causal_spans(more, r, window)
                                                   : range_spans(more, r, w->ranges);
        more += seq->n_spans;
    }
}

static int run_attn(pass *s) {
    backend *b = s->b;
    const graph_node *n = s->node;
    const uint32_t group = b->c.layer_group[n->layer], window = b->c.layer_window[n->layer];
    const kv_window *given = &s->in->groups[group].window;
    if (given->mode != n->kind)
        return fail(MF_INTERNAL, "group %u: the graph reads in window mode %u, the batch has %d",
                    group, n->kind, (int)given->mode);
    fill_attn_seqs(b, s->in, given, window);
    const uint32_t width = b->c.n_head * b->c.head_dim;
    const attn_batch job = {
        .seqs = b->attn_seqs,
        .n_seqs = s->in->n_runs,
        .q = row_of(s, n->in[0], 0),
        .q_stride = width,
        .out = row_of(s, n->out[0], 0),
        .out_stride = width,
        .format = b->c.kv_format,
        .widened = b->c.kv_widened,
        .k_region = b->kv.k[n->layer],
        .v_region = b->kv.v[n->layer],
        .n_head = b->c.n_head,
        .n_head_kv = b->c.n_head_kv,
        .head_dim = b->c.head_dim,
        .window = window,
        .scale = b->c.attn_scale,
        .softcap = b->c.attn_softcap,
        .scratch = b->scratch,
        .scratch_bytes = b->attn_scratch_bytes,
    };
    attn_run(b->k, b->threads, &job);
    return MF_OK;
}

static int cpu_compute(backend *b, const graph *g, const batch *in, float *logits,
                       const atomic_int *run) {
    pass s = {.b = b, .g = g, .in = in, .logits = logits};
    for (uint32_t i = 0; i < g->n_steps; i++) {
        if (atomic_load_explicit(run, memory_order_relaxed) == RUN_CANCELLED)
            return fail(MF_CANCELLED, "the forward was cancelled; its batch left no rows");
        s.step = &g->steps[i];
        s.node = &g->nodes[s.step->first];
        s.n_rows = s.step->rows == ROWS_TOKENS ? in->n_tokens : in->n_outputs;
        switch (s.node->op) {
            case OP_MATMUL:
                run_matmul(&s);
                break;
            case OP_ATTN:
                TRY(run_attn(&s));
                break;
            default:
                run_rows(&s);
        }
    }
    return MF_OK;
}

static int cpu_reserve(backend *b, size_t bytes) {
    if (bytes <= b->buffer_bytes) return MF_OK;
    uint8_t *more = mem_pages(bytes);
    if (!more) return MF_NOMEM;
    mem_pages_free(b->buffer, b->buffer_bytes);
    b->buffer = more;
    b->buffer_bytes = bytes;
    return MF_OK;
}

static void cpu_backend_free(backend *b) {
    if (!b) return;
    kv_regions_free(&b->kv);
    pool_free(b->threads);
    mem_pages_free(b->buffer, b->buffer_bytes);
    mem_pages_free(b->scratch, b->scratch_bytes);
    mem_free(b->attn_seqs);
    mem_free(b->attn_spans);
    mem_free(b->layer_group);
    mem_free(b->layer_window);
    mem_free(b->layer_rope);
    mem_free(b->freq);
    mem_free(b);
}

// Copies what the configuration points at: an engine outlives its caller's arrays.
static int copy_config(backend *b, const backend_config *c) {
    const uint32_t half = c->n_rot / 2;
    b->c = *c;
    b->layer_group = mem_alloc(c->n_layer, sizeof *b->layer_group);
    b->layer_window = mem_alloc(c->n_layer, sizeof *b->layer_window);
    b->layer_rope = mem_alloc(c->n_layer, sizeof *b->layer_rope);
    b->freq = mem_alloc((size_t)half * ROPE_KINDS, sizeof *b->freq);
    if (!b->layer_group || !b->layer_window || !b->layer_rope || !b->freq) return MF_NOMEM;
    memcpy(b->layer_group, c->layer_group, c->n_layer * sizeof *b->layer_group);
    memcpy(b->layer_window, c->layer_window, c->n_layer * sizeof *b->layer_window);
    memcpy(b->layer_rope, c->layer_rope, c->n_layer * sizeof *b->layer_rope);
    b->c.layer_group = b->layer_group;
    b->c.layer_window = b->layer_window;
    b->c.layer_rope = b->layer_rope;
    for (uint32_t k = 0; k < ROPE_KINDS; k++) {
        memcpy(b->freq + k * half, c->rope[k].freq, half * sizeof *b->freq);
        b->c.rope[k].freq = b->freq + k * half;
    }
    return MF_OK;
}

static int alloc_scratch(backend *b, const backend_config *c) {
    const attn_limits limits = {.n_ctx = c->n_ctx,
                                .n_batch = c->n_batch,
                                .n_head = c->n_head,
                                .n_head_kv = c->n_head_kv,
                                .head_dim = c->head_dim,
                                .n_threads = pool_threads(b->threads),
                                .format = c->kv_format,
                                .widened = c->kv_widened};
    const size_t products = limits.n_threads * b->k->matmul_scratch;
    b->attn_scratch_bytes = attn_scratch_bytes(&limits);
    b->scratch_bytes = products > b->attn_scratch_bytes ? products : b->attn_scratch_bytes;
    b->scratch = mem_pages(b->scratch_bytes);
    b->attn_seqs = mem_alloc(c->n_batch, sizeof *b->attn_seqs);
    b->attn_spans = mem_alloc(c->n_batch, sizeof *b->attn_spans);
    return b->scratch && b->attn_seqs && b->attn_spans ? MF_OK : MF_NOMEM;
}

static int cpu_backend_new(backend **out, const backend_config *c) {
    backend *b = mem_alloc(1, sizeof *b);
    if (!b) return MF_NOMEM;
    int status;
    TRY_GOTO(failed, kernels_choose(&b->k, c->isa));
    TRY_GOTO(failed, copy_config(b, c));
    TRY_GOTO(failed, pool_new(&b->threads, c->n_threads ? c->n_threads : pool_default_threads()));
    TRY_GOTO(failed, kv_regions_new(&b->kv, &b->c, b->k, pool_threads(b->threads)));
    b->c.group_cells = NULL;  // this and isa stay the caller's, and have been read
    b->c.isa = NULL;
    TRY_GOTO(failed, alloc_scratch(b, c));
    *out = b;
    return MF_OK;
failed:
    cpu_backend_free(b);
    return status;
}

static void cpu_stats(const backend *b, backend_stats *out) {
    *out = (backend_stats){.isa = b->k->name,
                           .n_threads = pool_threads(b->threads),
                           .kv_bytes = b->kv.bytes,
                           .compute_bytes = b->buffer_bytes + b->scratch_bytes};
}

static void cpu_copy_cells(backend *b, const mf_kv_move *moves, uint32_t n) {
    kv_regions_copy(&b->kv, b->threads, moves, n);
}

static void cpu_rope_cells(backend *b, const kv_cell_run *runs, uint32_t n, int32_t delta) {
    kv_regions_rope(&b->kv, b->threads, runs, n, delta);
}

const kv_regions *cpu_regions(const backend *b) { return &b->kv; }

static pool *cpu_threads(const backend *b) { return b->threads; }

static void cpu_get_rows(const backend *b, uint32_t layer, bool value, uint32_t cell, uint32_t n,
                         void *rows) {
    const kv_regions *r = &b->kv;
    memcpy(rows, kv_region_row(r, (value ? r->v : r->k)[layer], cell), n * r->row_bytes);
}

static void cpu_put_rows(backend *b, uint32_t layer, bool value, uint32_t cell, uint32_t n,
                         const void *rows) {
    const kv_regions *r = &b->kv;
    memcpy(kv_region_row(r, (value ? r->v : r->k)[layer], cell), rows, n * r->row_bytes);
}

const device device_cpu = {
    .name = "cpu",
    .id = 0,
    .head_dim_step = 16,
    .head_dim_max = HEAD_DIM_MAX,
    .kv_formats = 1 << KV_FORMAT_F32 | 1 << KV_FORMAT_F16 | 1 << KV_FORMAT_Q8_0,
    .rope_formats = 1 << KV_FORMAT_F32 | 1 << KV_FORMAT_F16 | 1 << KV_FORMAT_Q8_0,
    .window_modes = KV_WINDOW_ALL,
    .isas = kernels_names,
    .limits = cpu_limits,
    .weights_new = cpu_weights_new,
    .weights_free = cpu_weights_free,
    .matrix_load = cpu_matrix_load,
    .vector_load = cpu_vector_load,
    .backend_new = cpu_backend_new,
    .backend_free = cpu_backend_free,
    .reserve = cpu_reserve,
    .compute = cpu_compute,
    .copy_cells = cpu_copy_cells,
    .rope_cells = cpu_rope_cells,
    .get_rows = cpu_get_rows,
    .put_rows = cpu_put_rows,
    .threads = cpu_threads,
    .get_stats = cpu_stats,
};
