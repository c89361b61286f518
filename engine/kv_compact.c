// Owns compaction: rows go to other cells, verbatim, and nobody's contents change. Refuses what
// cannot be made room for; memory for all groups is had before the first row is let go.
//
// Slide: the rows keep the order of their cells and the holes close. Every move goes down and no
// span is cut, but A B A B stays A B A B.
//
// Regroup: rows that several sequences read are a common prefix of theirs, so the rows form a
// forest. Each tree is laid out with the child first in which most sequences end. A sequence that
// leaves its run goes on where at most half of the sequences are that passed there: it does so at
// most floor(log2 n_seq) times. With the limit on gaps between positions every read then fits.
//
// Invariant: a group is consistent before and after each compaction, and the moves are in
// kv->moves.
#include <stdlib.h>

#include "alloc.h"
#include "error.h"
#include "kv_store.h"

// Makes every count of readers anew, from the sequences.
static void count_readers(kv_cache *kv, uint32_t g) {
    kv_cells *const cells = &kv->groups[g].cells;
    kv_cells_reset(cells);
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        const kv_part *const part = &kv->seqs[s].parts[g];
        const mf_kv_span *const spans = kv_part_spans(part);
        for (uint32_t i = 0; i < part->n_spans; i++)
            kv_cells_read(cells, (uint32_t)spans[i].cell, (uint32_t)spans[i].len, 1);
        for (uint32_t i = part->held_first; i < part->n_held; i++)
            kv_cells_read(cells, part->held[i].cell, part->held[i].len, 1);
    }
}

// Room for `more` moves behind those of this call.
static int reserve_moves(kv_cache *kv, uint64_t more) {
    const uint64_t n = kv->moves.n + more;
    if (n > UINT32_MAX) return fail(MF_LIMIT, "%llu moves in one call", (unsigned long long)n);
    return kv_moves_reserve(&kv->moves, (uint32_t)n);
}

// ---- slide ----------------------------------------------------------------------------------

// Most moves of a slide. A run of used cells starts where somebody's span or reservation starts;
// rows that are let go first add none.
static uint64_t slide_bound(const kv_cache *kv, uint32_t g) {
    uint64_t n = 0;
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        const kv_part *const part = &kv->seqs[s].parts[g];
        n += part->n_spans + (part->n_held - part->held_first);
    }
    const uint64_t n_runs = ((uint64_t)kv->groups[g].cells.n_cells + 1) / 2;
    return n < n_runs ? n : n_runs;
}

// A move for each used run that has a free cell below, bottom up.
static void slide_moves(kv_cache *kv, uint32_t g) {
    const kv_cells *const cells = &kv->groups[g].cells;
    kv_moves *const moves = &kv->moves;
    const uint32_t first = moves->n;
    uint32_t to = 0;
    for (uint32_t cell = 0, n, readers; cell < cells->n_cells; cell += n) {
        n = kv_cells_extent(&readers, cells, cell);
        if (!readers) continue;
        mf_kv_move *const last = moves->n > first ? &moves->at[moves->n - 1] : NULL;
        if (last && (uint32_t)(last->src + last->n) == cell) {
            last->n += (int32_t)n;
        } else if (to != cell) {
            moves->at[moves->n++] =
                (mf_kv_move){(int32_t)cell, (int32_t)to, (int32_t)n, (int32_t)g};
        }
        to += n;
    }
}

// Where a cell is after moves of a slide.
static uint32_t slid(const mf_kv_move *moves, uint32_t n, uint32_t cell) {
    uint32_t lo = 0, hi = n;  // the moves from below or at the cell
    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if ((uint32_t)moves[mid].src <= cell) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo ? cell - (uint32_t)(moves[lo - 1].src - moves[lo - 1].dst) : cell;
}

static void slide_part(kv_part *part, const mf_kv_move *moves, uint32_t n_moves) {
    const uint32_t n = part->n_spans, n_held = part->n_held;
    part->n_spans = 0;
    for (uint32_t i = 0; i < n; i++) {
        const mf_kv_span span = part->memory[part->first + i];
        kv_part_push(part, (uint32_t)span.pos, slid(moves, n_moves, (uint32_t)span.cell),
                     (uint32_t)span.len);
    }
    part->n_held = part->held_first;
    for (uint32_t i = part->held_first; i < n_held; i++) {
        const kv_hold hold = {slid(moves, n_moves, part->held[i].cell), part->held[i].len};
        kv_hold *const last =
            part->n_held > part->held_first ? &part->held[part->n_held - 1] : NULL;
        if (last && last->cell + last->len == hold.cell) {
            last->len += hold.len;
        } else {
            part->held[part->n_held++] = hold;
        }
    }
}

// kv->moves has room for slide_bound more.
static void slide(kv_cache *kv, uint32_t g) {
    const uint32_t first = kv->moves.n;
    slide_moves(kv, g);
    const uint32_t n = kv->moves.n - first;
    if (!n) return;
    for (uint32_t s = 0; s < kv->n_seq; s++)
        slide_part(&kv->seqs[s].parts[g], kv->moves.at + first, n);
    count_readers(kv, g);
    kv->groups[g].generation++;
}

// ---- regroup --------------------------------------------------------------------------------

#define NONE UINT32_MAX  // no piece

// Cells that every sequence reads as a whole or not at all: a vertex of the forest, which has its
// parent's rows right before its own.
typedef struct piece {
    uint32_t cell;  // to where the next piece starts
    uint32_t to;    // its first cell in the new layout
    uint32_t parent, child, sibling;
    uint32_t ends;  // sequences that end in its subtree
    bool used;
} piece;

struct kv_plan {
    uint32_t capacity;  // spans and runs of reserved cells, of all sequences together
    piece *pieces;      // [2 * capacity, or n_cells + 1 if that is less]; by cell
    uint32_t *list;     // [2 * capacity]: the ends of all spans, then pieces, parents first
    uint32_t n, roots;
    mf_kv_span spans[KV_MAP_MAX_SPANS];
    kv_order order;
};

void kv_regroup_release(kv_group *group) {
    kv_plan *const plan = group->plan;
    if (!plan) return;
    mem_free(plan->pieces);
    mem_free(plan->list);
    kv_order_free(&plan->order);
    mem_free(plan);
    group->plan = NULL;
}

static int plan_new(kv_group *group, uint32_t capacity) {
    const size_t n_ends = 2 * (size_t)capacity, n_cells = group->cells.n_cells;
    const size_t n_pieces = n_ends < n_cells + 1 ? n_ends : n_cells + 1;
    kv_regroup_release(group);
    group->plan = mem_alloc(1, sizeof *group->plan);
    if (!group->plan) return MF_NOMEM;
    kv_plan *const plan = group->plan;
    int status = MF_NOMEM;
    plan->pieces = mem_grow(NULL, n_pieces, sizeof *plan->pieces);
    if (!plan->pieces) goto fail;
    plan->list = mem_grow(NULL, n_ends, sizeof *plan->list);
    if (!plan->list) goto fail;
    TRY_GOTO(fail, kv_order_new(&plan->order, n_pieces, n_cells));
    plan->capacity = capacity;
    return MF_OK;
fail:
    kv_regroup_release(group);
    return status;
}

int kv_regroup_reserve(kv_cache *kv, uint32_t g) {
    kv_group *const group = &kv->groups[g];
    uint64_t n_spans = 0, n_moves = 0;
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        kv_part *const part = &kv->seqs[s].parts[g];
        if (part->capacity && part->n_spans < KV_MAP_MAX_SPANS)
            TRY(kv_part_reserve(part, KV_MAP_MAX_SPANS - part->n_spans));
        // What an append has yet to push lies within the capacity.
        n_spans += (uint64_t)part->capacity + part->held_capacity;
    }
    if (n_spans > UINT32_MAX / 4)
        return fail(MF_LIMIT, "%llu spans in one group", (unsigned long long)n_spans);
    // A row is moved once, or in a circle of n rows n + 1 are; other groups may follow in this
    // call.
    for (uint32_t i = 0; i < kv->n_groups; i++)
        n_moves += kv->groups[i].cells.n_cells + (uint64_t)kv->groups[i].cells.n_cells / 2;
    TRY(reserve_moves(kv, n_moves));
    if (group->plan && group->plan->capacity >= n_spans) return MF_OK;
    return plan_new(group, (uint32_t)n_spans);
}

static int compare_cells(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

// Cuts the arena where some span or reservation starts or ends.
static void cut_pieces(const kv_cache *kv, uint32_t g, kv_plan *plan) {
    uint32_t n = 0;
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        const kv_part *const part = &kv->seqs[s].parts[g];
        const mf_kv_span *const spans = kv_part_spans(part);
        for (uint32_t i = 0; i < part->n_spans; i++) {
            plan->list[n++] = (uint32_t)spans[i].cell;
            plan->list[n++] = (uint32_t)(spans[i].cell + spans[i].len);
        }
        for (uint32_t i = part->held_first; i < part->n_held; i++) {
            plan->list[n++] = part->held[i].cell;
            plan->list[n++] = part->held[i].cell + part->held[i].len;
        }
    }
    if (n) qsort(plan->list, n, sizeof *plan->list, compare_cells);
    plan->n = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (i && plan->list[i] == plan->list[i - 1]) continue;
        plan->pieces[plan->n++] =
            (piece){.cell = plan->list[i], .parent = NONE, .child = NONE, .sibling = NONE};
    }
}

// The piece that starts at a cell.
static uint32_t piece_at(const kv_plan *plan, uint32_t cell) {
    uint32_t lo = 0, hi = plan->n;
    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (plan->pieces[mid].cell < cell) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

// Cells [cell, cell + len) follow piece `before` in some sequence. Returns their last piece. A
// piece that is first in one sequence may follow another in a second one: the first has lost those
// rows.
static uint32_t follow(kv_plan *plan, uint32_t before, uint32_t cell, uint32_t len) {
    for (uint32_t i = piece_at(plan, cell); plan->pieces[i].cell < cell + len; i++) {
        plan->pieces[i].used = true;
        if (before != NONE) plan->pieces[i].parent = before;
        before = i;
    }
    return before;
}

// Parents, and how many sequences end right there.
static void grow_forest(const kv_cache *kv, uint32_t g, kv_plan *plan) {
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        const kv_part *const part = &kv->seqs[s].parts[g];
        const mf_kv_span *const spans = kv_part_spans(part);
        uint32_t last = NONE;
        for (uint32_t i = 0; i < part->n_spans; i++)
            last = follow(plan, last, (uint32_t)spans[i].cell, (uint32_t)spans[i].len);
        for (uint32_t i = part->held_first; i < part->n_held; i++)
            last = follow(plan, last, part->held[i].cell, part->held[i].len);
        if (last != NONE) plan->pieces[last].ends++;
    }
}

// Puts a piece in front of its siblings, or behind the first.
static void add_child(kv_plan *plan, uint32_t i, bool in_front) {
    piece *const p = &plan->pieces[i];
    uint32_t *const first = p->parent == NONE ? &plan->roots : &plan->pieces[p->parent].child;
    uint32_t *const link = in_front || *first == NONE ? first : &plan->pieces[*first].sibling;
    p->sibling = *link;
    *link = i;
}

// Child and sibling links, the heaviest child first; the roots in the order of their cells.
static void weigh_forest(kv_plan *plan) {
    piece *const pieces = plan->pieces;
    uint32_t n = 0;
    plan->roots = NONE;
    for (uint32_t i = plan->n; i-- > 0;) {
        if (pieces[i].used) add_child(plan, i, true);
    }
    for (uint32_t i = plan->roots; i != NONE; i = pieces[i].sibling) plan->list[n++] = i;
    for (uint32_t k = 0; k < n; k++) {
        for (uint32_t i = pieces[plan->list[k]].child; i != NONE; i = pieces[i].sibling)
            plan->list[n++] = i;
    }
    for (uint32_t k = 0; k < n; k++) pieces[plan->list[k]].child = NONE;
    // Children before their parents, so a weight is whole when it is compared.
    while (n-- > 0) {
        const uint32_t i = plan->list[n], parent = pieces[i].parent;
        if (parent == NONE) continue;
        const uint32_t first = pieces[parent].child;
        add_child(plan, i, first == NONE || pieces[i].ends >= pieces[first].ends);
        pieces[parent].ends += pieces[i].ends;
    }
}

// New cells in preorder, and the moves, a run for each stretch that stays together. Returns their
// number.
static uint32_t lay_out(kv_plan *plan, uint32_t g) {
    piece *const pieces = plan->pieces;
    mf_kv_move *const runs = plan->order.by_src;
    uint32_t to = 0, n_runs = 0;
    for (uint32_t i = plan->roots; i != NONE;) {
        const uint32_t cell = pieces[i].cell, n = pieces[i + 1].cell - cell;
        pieces[i].to = to;
        if (n_runs && (uint32_t)(runs[n_runs - 1].src + runs[n_runs - 1].n) == cell) {
            runs[n_runs - 1].n += (int32_t)n;
        } else {
            runs[n_runs++] = (mf_kv_move){(int32_t)cell, (int32_t)to, (int32_t)n, (int32_t)g};
        }
        to += n;
        uint32_t next = pieces[i].child;
        while (next == NONE && i != NONE) {
            next = pieces[i].sibling;
            i = pieces[i].parent;
        }
        i = next;
    }
    return n_runs;
}

static void regroup_part(kv_part *part, kv_plan *plan) {
    kv_part fresh = {.memory = plan->spans, .capacity = KV_MAP_MAX_SPANS};
    const mf_kv_span *const spans = kv_part_spans(part);
    for (uint32_t s = 0; s < part->n_spans; s++) {
        const uint32_t cell = (uint32_t)spans[s].cell, end = cell + (uint32_t)spans[s].len;
        for (uint32_t i = piece_at(plan, cell); plan->pieces[i].cell < end; i++) {
            const piece *const p = &plan->pieces[i];
            kv_part_push(&fresh, (uint32_t)spans[s].pos + (p->cell - cell), p->to,
                         p[1].cell - p->cell);
        }
    }
    for (uint32_t s = 0; s < fresh.n_spans; s++) part->memory[s] = fresh.memory[s];
    part->first = 0;
    part->n_spans = fresh.n_spans;
    if (!part->n_reserved) return;
    // Nobody else reads a reservation, so no piece of it has two children: it is one run now.
    const uint32_t held = plan->pieces[piece_at(plan, part->held[part->held_first].cell)].to;
    part->held[0] = (kv_hold){held, part->n_reserved};
    part->held_first = 0;
    part->n_held = 1;
}

void kv_regroup(kv_cache *kv, uint32_t g) {
    kv_group *const group = &kv->groups[g];
    kv_plan *const plan = group->plan;
    const uint32_t n_moves = kv->moves.n;
    cut_pieces(kv, g, plan);
    grow_forest(kv, g, plan);
    weigh_forest(plan);
    const uint32_t n_runs = lay_out(plan, g);
    kv_order_run(&kv->moves, &plan->order, n_runs, (int32_t)group->cells.n_cells);
    if (kv->moves.n > n_moves) {
        for (uint32_t s = 0; s < kv->n_seq; s++) regroup_part(&kv->seqs[s].parts[g], plan);
        count_readers(kv, g);
        group->generation++;
    }
    kv_regroup_release(group);
}

// ---- calls ----------------------------------------------------------------------------------

// Does some sequence's next read take too many runs?
static bool is_tangled(const kv_cache *kv, uint32_t g) {
    for (uint32_t s = 0; s < kv->n_seq; s++) {
        const mf_kv_span *spans;
        if (kv_read_spans(&spans, kv, g, s, 0) > KV_MAP_MAX_SPANS) return true;
    }
    return false;
}

int kv_cache_defrag(kv_work *work, kv_cache *kv, uint32_t need) {
    uint32_t n[KV_MAX_GROUPS];
    bool tangled[KV_MAX_GROUPS];  // stale rows are in nobody's next read: it stays so
    uint64_t n_moves = 0;
    kv_work_begin(work, kv);
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        n[g] = kv->groups[g].spec.kind == KV_FULL ? need : u32_min(need, kv->n_batch);
        TRY(kv_check_room(kv, g, n[g]));
    }
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        tangled[g] = is_tangled(kv, g);
        if (tangled[g]) TRY(kv_regroup_reserve(kv, g));
        n_moves += tangled[g] ? kv->groups[g].cells.n_cells * (uint64_t)3 / 2 : slide_bound(kv, g);
    }
    TRY(reserve_moves(kv, n_moves));
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        kv_make_room(kv, g, n[g]);
        if (tangled[g]) {
            kv_regroup(kv, g);
        } else if (!need || kv_cells_largest(&kv->groups[g].cells) < n[g]) {
            slide(kv, g);
        }
    }
    kv_work_end(work, kv);
    return MF_OK;
}

int kv_cache_reserve_with_defrag(kv_work *work, kv_cache *kv, int32_t seq, uint32_t n) {
    uint64_t n_moves = 0;
    kv_work_begin(work, kv);
    kv_seq *const found = kv_find_seq(kv, seq);
    if (!found) return MF_ARG;
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        if (kv->groups[g].spec.kind != KV_FULL) continue;
        const uint32_t own = found->parts[g].n_reserved;
        TRY(kv_check_room(kv, g, n > own ? n - own : 0));
    }
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        if (kv->groups[g].spec.kind != KV_FULL) continue;
        TRY(kv_hold_reserve(kv, g, (uint32_t)seq, n));
        n_moves += slide_bound(kv, g);
    }
    TRY(reserve_moves(kv, n_moves));
    for (uint32_t g = 0; g < kv->n_groups; g++) {
        if (kv->groups[g].spec.kind != KV_FULL) continue;
        kv_hold_release(kv, g, (uint32_t)seq, 0);
        kv_hold_take(kv, g, (uint32_t)seq, n);
        if (found->parts[g].n_held - found->parts[g].held_first <= 1) continue;
        kv_hold_release(kv, g, (uint32_t)seq, 0);  // no run is large enough, or none was found
        slide(kv, g);
        kv_hold_take(kv, g, (uint32_t)seq, n);
    }
    kv_work_end(work, kv);
    return MF_OK;
}

mf_kv_move *kv_cache_take_moves(kv_cache *kv) {
    mf_kv_move *const moves = kv->moves.at;
    if (!kv->moves.n) return NULL;  // at most the room that an earlier call had
    kv->moves = (kv_moves){0};
    return moves;
}
