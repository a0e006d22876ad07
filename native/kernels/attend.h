// Attention over sealed pages: the only code that reads K and V.
//
// Owns the seal check of every read (L3, L4, L5, L6, L10) and the order of the sums (L13). Never reads a slot at or past `filled`, nor a
// page before all pages of its partition have matched. A partition is PARTITION_TOKENS positions, always the same ones; for one query:
//   score[s] = sum over dims of (q * scale * log2 e) * k   eight lanes, dims in steps of eight, then a tree of the lanes
//   m = max score; p[s] = 2^(score - m); sum = lanes of p in steps of eight, then a tree; acc[d] = fma(p[s], v[s][d], acc[d]), s in order
// and partitions are combined one after the other. For int8 and int4 the sums run over the stored integers: score[s] is the sum times the
// scale of k[s] (plus its minimum times the sum of q), the weight of v[s] is p[s] times its scale, and minimums of V are summed apart.
// Few queries take K and V from the page as they lie, many from a widened copy of it: the same operations in the same order.
#pragma once
#include "attend_tiles.h"

namespace kvseal {
namespace KVSEAL_ISA {

// Positions of a partition that a query sees, relative to the partition's start.
struct Span {
    int begin, end;
};
static inline Span visible(const AttendWork& w, int token, int partition) {
    const int position = w.first_position + token, base = partition * PARTITION_TOKENS;
    const int first = w.window > 0 ? most(0, position - w.window + 1) : 0;
    return {most(0, first - base), least(PARTITION_TOKENS, position + 1 - base)};
}

// Every page that holds [begin, end) of the partition, before any is read.
static uint64_t check_pages(const AttendWork& w, int base, int begin, int end) {
    const KVLayout& kv = *w.kv;
    for (int ordinal = (base + begin) / kv.page_tokens; ordinal * kv.page_tokens < base + end; ++ordinal) {
        if (!w.row->has(kv, ordinal)) return break_key(ordinal, TABLE);
        const int needed = least(kv.page_tokens, base + end - ordinal * kv.page_tokens);
        const SealCheck check =
            check_read(kv.seal(static_cast<int64_t>(w.row->page(ordinal)), w.layer), w.row->expected(kv, ordinal, w.layer), needed);
        if (__builtin_expect(check != CLEAN, 0)) return break_key(ordinal, check);
    }
    return UNBROKEN;
}

// --- scratch --------------------------------------------------------------------------------------------------------------------------

struct Scratch {
    float *queries, *query_sums, *scores, *block, *partial, *total;
    float *key_scales, *key_minimums, *value_scales, *value_minimums;  // of the partition's slots
    int block_pages;

    // As a unit of that one head sees it.
    Scratch of_head(const AttendWork& w, int head) const {
        const int64_t first = static_cast<int64_t>(head) * w.queries_per_head(), slots = static_cast<int64_t>(head) * 4 * PARTITION_TOKENS;
        Scratch own = *this;
        own.queries += first * w.kv->head_dim;
        own.query_sums += first;
        own.scores += first * SCORE_STRIDE;
        own.partial += first * (w.kv->head_dim + HEADER);
        own.key_scales += slots, own.key_minimums += slots, own.value_scales += slots, own.value_minimums += slots;
        return own;
    }
};
static inline Scratch divide_scratch(const AttendWork& w) {
    const AttendScratch at(*w.kv, w.group);
    float* base = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(w.scratch) + 63) / 64 * 64);
    float* scales = base + at.scales;
    return {base + at.queries, base + at.query_sums, base + at.scores, base + at.block, base + at.partial, base + at.total,
            scales, scales + PARTITION_TOKENS, scales + 2 * PARTITION_TOKENS, scales + 3 * PARTITION_TOKENS, at.block_pages};
}

static void scale_queries(const AttendWork& w, const Scratch& scratch) {
    const int dims = w.kv->head_dim;
    const bool turned = w.kv->kind == KV_INT4;
    const f8 scale = splat(w.scale * 1.44269504088896341f * (turned ? rotation_inverse(dims) : 1.0f));
    for (int i = 0; i < w.queries(); ++i) {
        const int token = w.token_of(i), head = i / w.queries_per_head() * w.group + i % w.group;
        const float* q = w.q + (w.places != nullptr ? w.places[token] : token) * w.q_stride + static_cast<int64_t>(head) * dims;
        float* out = scratch.queries + static_cast<int64_t>(i) * dims;
        for (int d = 0; d < dims; d += 8) store8(out + d, load8(q + d) * scale);
        if (!turned) continue;
        rotate(out, dims);
        f8 sums = splat(0.0f);
        for (int d = 0; d < dims; d += 8) sums = sums + load8(out + d);
        scratch.query_sums[i] = sum8(sums);
    }
}

// --- a block --------------------------------------------------------------------------------------------------------------------------

// What the tiles of a block of slots share. `begin`, `end`: slots that any query sees; `whole`: all queries see all of them.
struct Block {
    const uint8_t* vectors;
    int64_t ahead;  // from a vector to the one to ask memory for meanwhile; 0: none
    int start;  // slot 0, relative to the partition
    int begin, end;
    bool whole;
};

template <KVKind KIND>
static inline void score_block(const AttendWork& w, const Scratch& scratch, int partition, const Block& block) {
    const int queries = w.queries_per_head(), dims = w.kv->head_dim;
    for (int q = 0, n; q < queries; q += n) {
        n = tile_of(queries - q);
        int begin = block.begin, end = block.end;
        if (!block.whole) {
            begin = most(begin, visible(w, q / w.group, partition).begin - block.start);
            end = least(end, visible(w, (q + n - 1) / w.group, partition).end - block.start);
            if (begin >= end) continue;
        }
        const float* query = scratch.queries + static_cast<int64_t>(q) * dims;
        float* scores = scratch.scores + static_cast<int64_t>(q) * SCORE_STRIDE + block.start;
        switch (n) {
            case 1: score_tile<KIND, 1>(query, block.vectors, q == 0 ? block.ahead : 0, dims, begin, end, scores); break;
            case 2: score_tile<KIND, 2>(query, block.vectors, q == 0 ? block.ahead : 0, dims, begin, end, scores); break;
            case 3: score_tile<KIND, 3>(query, block.vectors, q == 0 ? block.ahead : 0, dims, begin, end, scores); break;
            default: score_tile<KIND, 4>(query, block.vectors, q == 0 ? block.ahead : 0, dims, begin, end, scores); break;
        }
    }
}

// One query over its own slots of the page, within [begin, end).
template <KVKind KIND>
static inline void weigh_one(const AttendWork& w, const Scratch& scratch, int partition, const Block& block, int q, int begin, int end,
                             float* acc) {
    const Span span = visible(w, q / w.group, partition);
    begin = most(begin, span.begin - block.start);
    end = least(end, span.end - block.start);
    const float* weights = scratch.scores + static_cast<int64_t>(q) * SCORE_STRIDE + block.start;
    if (begin < end) weigh_all<KIND, 1>(weights, block.vectors, 0, w.kv->head_dim, begin, end, acc);
}

template <KVKind KIND>
static inline void weigh_block(const AttendWork& w, const Scratch& scratch, int partition, const Block& block) {
    const int queries = w.queries_per_head(), dims = w.kv->head_dim;
    const int64_t stride = dims + HEADER;
    for (int q = 0, n; q < queries; q += n) {
        n = tile_of(queries - q);
        // The slots that all queries of the tile see, and before and after them each query's own: per query, slots in order.
        int begin = block.begin, end = block.end;
        float* acc = scratch.partial + q * stride + HEADER;
        if (!block.whole) {
            begin = least(end, most(begin, visible(w, (q + n - 1) / w.group, partition).begin - block.start));
            end = most(begin, least(end, visible(w, q / w.group, partition).end - block.start));
            for (int j = 0; j < n; ++j) weigh_one<KIND>(w, scratch, partition, block, q + j, block.begin, begin, acc + j * stride);
        }
        const float* weights = scratch.scores + static_cast<int64_t>(q) * SCORE_STRIDE + block.start;
        if (begin < end) {
            switch (n) {
                case 1: weigh_all<KIND, 1>(weights, block.vectors, q == 0 ? block.ahead : 0, dims, begin, end, acc); break;
                case 2: weigh_all<KIND, 2>(weights, block.vectors, q == 0 ? block.ahead : 0, dims, begin, end, acc); break;
                case 3: weigh_all<KIND, 3>(weights, block.vectors, q == 0 ? block.ahead : 0, dims, begin, end, acc); break;
                default: weigh_all<KIND, 4>(weights, block.vectors, q == 0 ? block.ahead : 0, dims, begin, end, acc); break;
            }
        }
        for (int j = 0; !block.whole && j < n; ++j) weigh_one<KIND>(w, scratch, partition, block, q + j, end, block.end, acc + j * stride);
    }
}

// --- a partition ----------------------------------------------------------------------------------------------------------------------

// The first head's vectors (K or V) of a page of the table; those of the next heads follow.
template <KVKind KIND>
static inline const uint8_t* vectors_of(const AttendWork& w, int ordinal, bool values) {
    const int64_t head = bytes_of<KIND>(static_cast<int64_t>(w.kv->page_tokens) * w.kv->head_dim) * w.kv_head;
    return w.kv->run(static_cast<int64_t>(w.row->page(ordinal)), w.layer, values) + head;
}

// While a page is read, the one two steps later is on its way, vector by vector: K of all pages of the partition, then V.
constexpr int PAGES_AHEAD = 2;
template <KVKind KIND>
static inline const uint8_t* vectors_ahead(const AttendWork& w, int ordinal, int first, int last, bool values) {
    const int ahead = ordinal + PAGES_AHEAD, next = first + ahead - last - 1;
    if (ahead <= last) return vectors_of<KIND>(w, ahead, values);
    return vectors_of<KIND>(w, least(next, last), true);
}

// Calls body(block, head) for all of [begin, end), K or V, in blocks of slots: pages as they lie, head after head, or, for many queries of
// one head, copies of a few, widened.
template <KVKind KIND, bool DIRECT, class Body>
static inline void each_block(const AttendWork& w, const Scratch& scratch, int partition, int begin, int end, bool values,
                              Body&& body) {
    const KVLayout& kv = *w.kv;
    const int base = partition * PARTITION_TOKENS, dims = kv.head_dim;
    const int first = (base + begin) / kv.page_tokens, last = (base + end - 1) / kv.page_tokens;
    const int pages = DIRECT ? 1 : scratch.block_pages;
    const Span first_sees = visible(w, 0, partition), last_sees = visible(w, w.tokens - 1, partition);
    for (int ordinal = first; ordinal <= last; ordinal += pages) {
        Block block;
        block.start = ordinal * kv.page_tokens - base;
        block.begin = most(0, begin - block.start);
        block.end = least(pages * kv.page_tokens, end - block.start);
        block.whole = first_sees.end - block.start >= block.end && last_sees.begin - block.start <= block.begin;
        if (DIRECT) {
            block.vectors = vectors_of<KIND>(w, ordinal, values);
            block.ahead = vectors_ahead<KIND>(w, ordinal, first, last, values) - block.vectors;
            for (int head = 0; head < w.heads; ++head) {
                body(block, head);
                block.vectors += bytes_of<KIND>(static_cast<int64_t>(kv.page_tokens) * dims);
            }
        } else {
            block.vectors = reinterpret_cast<const uint8_t*>(scratch.block);
            block.ahead = 0;
            for (int i = 0; i < pages && ordinal + i <= last; ++i) {
                const int at = i * kv.page_tokens;
                widen<KIND>(vectors_of<KIND>(w, ordinal + i, values), vectors_ahead<KIND>(w, ordinal + i, first, last, values), dims,
                            most(0, block.begin - at), least(kv.page_tokens, block.end - at),
                            scratch.block + static_cast<int64_t>(at) * dims);
            }
            body(block, 0);
        }
    }
}

// scale and minimum of every slot of the partition that the unit may read.
template <KVKind KIND>
static void gather_scales(const AttendWork& w, int head, int partition, int begin, int end, bool values, float* scales, float* minimums) {
    const KVLayout& kv = *w.kv;
    const int base = partition * PARTITION_TOKENS;
    for (int slot = begin; slot < end; ++slot) {
        const int position = base + slot, ordinal = position / kv.page_tokens;
        const uint8_t* run = kv.run(static_cast<int64_t>(w.row->page(ordinal)), w.layer, values) + kv.element_run_bytes;
        scales[slot] = reinterpret_cast<const float*>(run)[(w.kv_head + head) * kv.page_tokens + position % kv.page_tokens];
        if (KIND == KV_INT4) minimums[slot] = -8.0f * scales[slot];
    }
}

// Scores to weights, in place; returns maximum and sum. Nothing outside the span takes part.
template <KVKind KIND>
static inline void soften(const Scratch& scratch, int query, Span span, int dims, float* partial) {
    float* scores = scratch.scores + static_cast<int64_t>(query) * SCORE_STRIDE;
    const int begin = span.begin & ~7, end = (span.end + 7) & ~7;
    if constexpr (has_scales(KIND)) {
        for (int s = begin; s < end; s += 8) {
            f8 score = load8(scores + s) * load8(scratch.key_scales + s);
            if (KIND == KV_INT4) score = fma8(splat(scratch.query_sums[query]), load8(scratch.key_minimums + s), score);
            store8(scores + s, score);
        }
    }
    for (int s = begin; s < span.begin; ++s) scores[s] = -__builtin_inff();
    for (int s = span.end; s < end; ++s) scores[s] = -__builtin_inff();
    f8 tops = load8(scores + begin);
    for (int s = begin + 8; s < end; s += 8) tops = max8(tops, load8(scores + s));
    const float top = maximum8(tops);
    f8 sums = splat(0.0f);
    for (int s = begin; s < end; s += 8) {
        const f8 p = exp2_8(load8(scores + s) - splat(top));
        store8(scores + s, p);
        sums = sums + p;
    }
    partial[0] = top;
    partial[1] = sum8(sums);
    if constexpr (has_scales(KIND)) {
        float minimum = 0.0f;
        if (KIND == KV_INT4)
            for (int s = span.begin; s < span.end; ++s) minimum += scores[s] * scratch.value_minimums[s];
        for (int s = begin; s < end; s += 8) store8(scores + s, load8(scores + s) * load8(scratch.value_scales + s));
        if (KIND == KV_INT4)
            for (int d = 0; d < dims; d += 8) store8(partial + HEADER + d, splat(minimum));
    }
}

template <KVKind KIND, bool DIRECT>
static void compute_blocks(const AttendWork& w, const Scratch& scratch, int partition, int begin, int end) {
    constexpr KVKind READ = DIRECT ? KIND : KV_FP32;
    const int dims = w.kv->head_dim;
    const int ahead = least(end, begin + PAGES_AHEAD * w.kv->page_tokens);
    for (int slot = begin; slot < ahead; slot += w.kv->page_tokens) {
        const int ordinal = (partition * PARTITION_TOKENS + slot) / w.kv->page_tokens;
        expect(vectors_of<KIND>(w, ordinal, false), w.heads * bytes_of<KIND>(static_cast<int64_t>(w.kv->page_tokens) * dims));
    }
    for (int head = 0; has_scales(KIND) && head < w.heads; ++head) {
        const Scratch own = scratch.of_head(w, head);
        gather_scales<KIND>(w, head, partition, begin, end, false, own.key_scales, own.key_minimums);
        gather_scales<KIND>(w, head, partition, begin, end, true, own.value_scales, own.value_minimums);
    }
    each_block<KIND, DIRECT>(w, scratch, partition, begin, end, false, [&](const Block& block, int head) {
        score_block<READ>(w, scratch.of_head(w, head), partition, block);
    });
    for (int head = 0; head < w.heads; ++head) {
        const Scratch own = scratch.of_head(w, head);
        for (int q = 0; q < w.queries_per_head(); ++q) {
            const Span span = visible(w, q / w.group, partition);
            if (span.begin < span.end) soften<KIND>(own, q, span, dims, own.partial + static_cast<int64_t>(q) * (dims + HEADER));
        }
    }
    each_block<KIND, DIRECT>(w, scratch, partition, begin, end, true, [&](const Block& block, int head) {
        weigh_block<READ>(w, scratch.of_head(w, head), partition, block);
    });
}

template <KVKind KIND>
static void compute_pages(const AttendWork& w, const Scratch& scratch, int partition, int begin, int end) {
    if (KIND == KV_FP32 || w.queries_per_head() <= ATTEND_DIRECT) compute_blocks<KIND, true>(w, scratch, partition, begin, end);
    else compute_blocks<KIND, false>(w, scratch, partition, begin, end);
}

// One partition for all queries of the unit: scratch.partial[query] = maximum, sum, ..., acc. A query that sees nothing of it has sum 0.
static uint64_t compute_partition(const AttendWork& w, const Scratch& scratch, int partition) {
    const int queries = w.queries(), dims = w.kv->head_dim, base = partition * PARTITION_TOKENS;
    const int begin = visible(w, 0, partition).begin, end = visible(w, w.tokens - 1, partition).end;
    for (int64_t i = 0; i < queries * static_cast<int64_t>(dims + HEADER); i += 8) store8(scratch.partial + i, splat(0.0f));
    if (begin >= end) return UNBROKEN;
    const uint64_t broken = check_pages(w, base, begin, end);
    if (__builtin_expect(broken != UNBROKEN, 0)) return broken;
    switch (w.kv->kind) {
        case KV_FP32: compute_pages<KV_FP32>(w, scratch, partition, begin, end); break;
        case KV_FP16: compute_pages<KV_FP16>(w, scratch, partition, begin, end); break;
        case KV_INT8: compute_pages<KV_INT8>(w, scratch, partition, begin, end); break;
        case KV_INT4: compute_pages<KV_INT4>(w, scratch, partition, begin, end); break;
    }
    return UNBROKEN;
}

// total <- total and next, next's positions being the later ones.
static inline void combine(float* total, const float* next, int dims) {
    if (next[1] == 0.0f) return;
    if (total[1] == 0.0f) {
        __builtin_memcpy(total, next, static_cast<size_t>(dims + HEADER) * 4);
        return;
    }
    const bool higher = next[0] > total[0];
    const float factor = exp2_1(higher ? total[0] - next[0] : next[0] - total[0]);
    const float* fading = higher ? total : next;
    const float* lasting = higher ? next : total;
    const float top = lasting[0], sum = lasting[1] + fading[1] * factor;
    for (int d = HEADER; d < dims + HEADER; d += 8) store8(total + d, fma8(load8(fading + d), splat(factor), load8(lasting + d)));
    total[0] = top;
    total[1] = sum;
}

static inline void finish(const float* total, KVKind kind, int dims, float* out) {
    const f8 sum = splat(total[1]);
    for (int d = 0; d < dims; d += 8) store8(out + d, load8(total + HEADER + d) / sum);
    if (kind != KV_INT4) return;
    rotate(out, dims);
    for (int d = 0; d < dims; d += 8) store8(out + d, load8(out + d) * splat(rotation_inverse(dims)));
}

static uint64_t attend(const AttendWork& w, float* out, int64_t out_stride) {
    const Scratch scratch = divide_scratch(w);
    const int queries = w.queries(), dims = w.kv->head_dim;
    const int64_t stride = dims + HEADER;
    const int oldest = w.window > 0 ? most(0, w.first_position - w.window + 1) : 0;
    const int last = (w.first_position + w.tokens - 1) / PARTITION_TOKENS;
    uint64_t broken = UNBROKEN;
    scale_queries(w, scratch);
    for (int64_t i = 0; i < queries * stride; i += 8) store8(scratch.total + i, splat(0.0f));
    for (int i = 0, before = w.before_partitions * w.group; i < w.heads * before; ++i)
        combine(scratch.total + (i / before * w.group + i % w.group) * stride, w.before + i * stride, dims);
    for (int partition = most(oldest / PARTITION_TOKENS, w.before_partitions); partition <= last && broken == UNBROKEN; ++partition) {
        broken = compute_partition(w, scratch, partition);
        for (int q = 0; broken == UNBROKEN && q < queries; ++q) combine(scratch.total + q * stride, scratch.partial + q * stride, dims);
    }
    for (int q = 0; q < queries; ++q) {
        const int64_t head = q / w.queries_per_head() * w.group + q % w.group;
        float* to = out + w.token_of(q) * out_stride + head * dims;
        if (broken == UNBROKEN)
            finish(scratch.total + q * stride, w.kv->kind, dims, to);
        else
            for (int d = 0; d < dims; ++d) to[d] = 0.0f;
    }
    return broken;
}

static uint64_t attend_partition(const AttendWork& w, int partition, float* partial) {
    Scratch scratch = divide_scratch(w);
    scratch.partial = partial;
    scale_queries(w, scratch);
    return compute_partition(w, scratch, partition);
}

static uint64_t attend_shared(const AttendWork& w, int partition, float* const* out) {
    const Scratch scratch = divide_scratch(w);
    const int64_t floats = static_cast<int64_t>(w.group) * (w.kv->head_dim + HEADER);
    scale_queries(w, scratch);
    const uint64_t broken = compute_partition(w, scratch, partition);
    for (int t = 0; t < w.tokens; ++t) __builtin_memcpy(out[t], scratch.partial + t * floats, static_cast<size_t>(floats) * sizeof(float));
    return broken;
}

static void attend_combine(const float* partials, int partitions, int group, KVKind kind, int head_dim, float* out) {
    const int64_t stride = head_dim + HEADER;
    for (int h = 0; h < group; ++h) {
        float total[HEADER + 512];
        __builtin_memcpy(total, partials + h * stride, static_cast<size_t>(stride) * 4);
        for (int p = 1; p < partitions; ++p) combine(total, partials + (static_cast<int64_t>(p) * group + h) * stride, head_dim);
        finish(total, kind, head_dim, out + static_cast<int64_t>(h) * head_dim);
    }
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
