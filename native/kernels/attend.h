// Attention over sealed pages: the only code that reads K and V.
//
// Owns the seal check of every read (L3, L4, L5, L6, L10) and the order of the sums (L13). Never reads a slot at or past `filled`, nor a
// page before all pages of its partition have matched. A partition is PARTITION_TOKENS positions, always the same ones; for one query:
//   score[s] = sum over dims of (q * scale) * k   eight lanes, dims in steps of eight, then a tree of the lanes
//   m = max score; p[s] = e^(score - m); sum = lanes of p in steps of eight, then a tree; acc[d] = fma(p[s], v[s][d], acc[d]), s in order
// and partitions are combined one after the other. Decode and prefill run the same code over more or fewer queries.
#pragma once
#include "kv_elements.h"

namespace kvseal {
namespace KVSEAL_ISA {

constexpr int HEADER = 8;  // floats in front of a partial's accumulators: maximum, sum, padding

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }

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

// scores[query][slot] for slots [begin, end) of one page, Q queries. Groups of four slots; those outside repeat a slot inside.
template <int Q>
static inline void score_tile(const float* q, const float* keys, int dims, int begin, int end, float* scores) {
    for (int s = begin & ~3; s < end; s += 4) {
        const float* k[4];
        for (int i = 0; i < 4; ++i) k[i] = keys + static_cast<int64_t>(least(most(s + i, begin), end - 1)) * dims;
        f8 acc[Q][4];
        for (int j = 0; j < Q; ++j)
            for (int i = 0; i < 4; ++i) acc[j][i] = splat(0.0f);
        for (int d = 0; d < dims; d += 8) {
            f8 query[Q];
            for (int j = 0; j < Q; ++j) query[j] = load8(q + static_cast<int64_t>(j) * dims + d);
            for (int i = 0; i < 4; ++i) {
                const f8 key = load8(k[i] + d);
                for (int j = 0; j < Q; ++j) acc[j][i] = fma8(query[j], key, acc[j][i]);
            }
        }
        for (int j = 0; j < Q; ++j) sum4(acc[j][0], acc[j][1], acc[j][2], acc[j][3], scores + j * PARTITION_TOKENS + s);
    }
}

// Scores to weights, in place; returns maximum and sum. Nothing outside the span takes part.
static inline void soften(float* scores, Span span, float* partial) {
    const int begin = span.begin & ~7, end = (span.end + 7) & ~7;
    for (int s = begin; s < span.begin; ++s) scores[s] = -__builtin_inff();
    for (int s = span.end; s < end; ++s) scores[s] = -__builtin_inff();
    f8 tops = load8(scores + begin);
    for (int s = begin + 8; s < end; s += 8) tops = max8(tops, load8(scores + s));
    const float top = maximum8(tops);
    f8 sums = splat(0.0f);
    for (int s = begin; s < end; s += 8) {
        const f8 p = exp8(load8(scores + s) - splat(top));
        store8(scores + s, p);
        sums = sums + p;
    }
    partial[0] = top;
    partial[1] = sum8(sums);
}

// acc[query][dim] += p[query][slot] * v[slot][dim] over slots [begin, end), Q queries by D vectors of dims.
template <int Q, int D>
static inline void weigh_tile(const float* weights, const float* values, int dims, int begin, int end, float* acc, int64_t acc_stride) {
    f8 sum[Q][D];
    for (int j = 0; j < Q; ++j)
        for (int i = 0; i < D; ++i) sum[j][i] = load8(acc + j * acc_stride + 8 * i);
    for (int s = begin; s < end; ++s) {
        f8 p[Q];
        for (int j = 0; j < Q; ++j) p[j] = splat(weights[j * PARTITION_TOKENS + s]);
        for (int i = 0; i < D; ++i) {
            const f8 value = load8(values + static_cast<int64_t>(s) * dims + 8 * i);
            for (int j = 0; j < Q; ++j) sum[j][i] = fma8(p[j], value, sum[j][i]);
        }
    }
    for (int j = 0; j < Q; ++j)
        for (int i = 0; i < D; ++i) store8(acc + j * acc_stride + 8 * i, sum[j][i]);
}

template <int Q>
static inline void weigh(const float* weights, const float* values, int dims, int begin, int end, float* acc, int64_t acc_stride) {
    int d = 0;
    for (; d + 32 <= dims; d += 32) weigh_tile<Q, 4>(weights, values + d, dims, begin, end, acc + d, acc_stride);
    for (; d < dims; d += 8) weigh_tile<Q, 1>(weights, values + d, dims, begin, end, acc + d, acc_stride);
}

struct Scratch {
    float *queries, *scores, *page, *partial, *total;
};
static inline int query_limit(int group) { return most(ATTEND_QUERIES, group); }
static inline Scratch divide_scratch(const AttendWork& w) {
    const int64_t queries = query_limit(w.group), dims = w.kv->head_dim;
    Scratch s;
    s.queries = w.scratch;
    s.scores = s.queries + queries * dims;
    s.page = s.scores + queries * PARTITION_TOKENS;
    s.partial = s.page + w.kv->page_tokens * dims;
    s.total = s.partial + queries * (dims + HEADER);
    return s;
}

static void scale_queries(const AttendWork& w, float* out) {
    const int dims = w.group * w.kv->head_dim;
    for (int t = 0; t < w.tokens; ++t)
        for (int d = 0; d < dims; d += 8) store8(out + static_cast<int64_t>(t) * dims + d, load8(w.q + t * w.q_stride + d) * splat(w.scale));
}

// The run (K or V) of a page of the table.
static inline const uint8_t* run_of(const AttendWork& w, int ordinal, bool values) {
    return w.kv->run(static_cast<int64_t>(w.row->page(ordinal)), w.layer, values);
}

// While a page is read, the one two steps later is on its way: K of all pages of the partition, then V.
constexpr int PAGES_AHEAD = 2;
static inline const uint8_t* run_ahead(const AttendWork& w, int ordinal, int first, int last, bool values) {
    const int ahead = ordinal + PAGES_AHEAD;
    if (ahead <= last) return run_of(w, ahead, values);
    const int next = first + ahead - last - 1;
    return run_of(w, next < last ? next : last, true);
}

static void score_pages(const AttendWork& w, const Scratch& scratch, int base, int begin, int end) {
    const KVLayout& kv = *w.kv;
    const int queries = w.tokens * w.group, dims = kv.head_dim;
    const int first_page = (base + begin) / kv.page_tokens, last_page = (base + end - 1) / kv.page_tokens;
    for (int ordinal = first_page; ordinal <= last_page && ordinal < first_page + PAGES_AHEAD; ++ordinal)
        expect_slots(kv, run_of(w, ordinal, false), w.kv_head);
    for (int ordinal = first_page; ordinal <= last_page; ++ordinal) {
        const uint8_t* ahead = run_ahead(w, ordinal, first_page, last_page, false);
        const int page_start = ordinal * kv.page_tokens - base;
        const int first = most(0, begin - page_start), last = least(kv.page_tokens, end - page_start);
        const float* keys = load_slots(kv, run_of(w, ordinal, false), ahead, w.kv_head, first, last, scratch.page);
        float* scores = scratch.scores + page_start;
        int q = 0;
        for (; q + 3 <= queries; q += 3) score_tile<3>(scratch.queries + q * dims, keys, dims, first, last, scores + q * PARTITION_TOKENS);
        if (queries - q == 2) score_tile<2>(scratch.queries + q * dims, keys, dims, first, last, scores + q * PARTITION_TOKENS);
        if (queries - q == 1) score_tile<1>(scratch.queries + q * dims, keys, dims, first, last, scores + q * PARTITION_TOKENS);
    }
}

static void weigh_pages(const AttendWork& w, const Scratch& scratch, int partition, int begin, int end, float* partial) {
    const KVLayout& kv = *w.kv;
    const int queries = w.tokens * w.group, dims = kv.head_dim, base = partition * PARTITION_TOKENS;
    const int64_t stride = dims + HEADER;
    const int first_page = (base + begin) / kv.page_tokens, last_page = (base + end - 1) / kv.page_tokens;
    for (int ordinal = first_page; ordinal <= last_page; ++ordinal) {
        const uint8_t* ahead = run_ahead(w, ordinal, first_page, last_page, true);
        const int page_start = ordinal * kv.page_tokens - base;
        const int first = most(0, begin - page_start), last = least(kv.page_tokens, end - page_start);
        const float* values = load_slots(kv, run_of(w, ordinal, true), ahead, w.kv_head, first, last, scratch.page);
        const float* weights = scratch.scores + page_start;
        float* acc = partial + HEADER;
        // All queries see the whole range when the first sees its end and the last its beginning.
        const bool all = visible(w, 0, partition).end - page_start >= last && visible(w, w.tokens - 1, partition).begin - page_start <= first;
        int q = 0;
        for (; all && q + 3 <= queries; q += 3)
            weigh<3>(weights + q * PARTITION_TOKENS, values, dims, first, last, acc + q * stride, stride);
        for (; q < queries; ++q) {
            const Span span = visible(w, q / w.group, partition);
            const int from = most(first, span.begin - page_start), to = least(last, span.end - page_start);
            if (from < to) weigh<1>(weights + q * PARTITION_TOKENS, values, dims, from, to, acc + q * stride, stride);
        }
    }
}

// One partition for all queries of the unit: partial[query] = maximum, sum, ..., acc. A query that sees nothing of it has sum 0.
static uint64_t compute_partition(const AttendWork& w, const Scratch& scratch, int partition, float* partial) {
    const int queries = w.tokens * w.group, dims = w.kv->head_dim, base = partition * PARTITION_TOKENS;
    const int64_t stride = dims + HEADER;
    const int begin = visible(w, 0, partition).begin, end = visible(w, w.tokens - 1, partition).end;
    for (int64_t i = 0; i < queries * stride; i += 8) store8(partial + i, splat(0.0f));
    if (begin >= end) return UNBROKEN;
    const uint64_t broken = check_pages(w, base, begin, end);
    if (__builtin_expect(broken != UNBROKEN, 0)) return broken;
    score_pages(w, scratch, base, begin, end);
    for (int q = 0; q < queries; ++q) {
        const Span span = visible(w, q / w.group, partition);
        if (span.begin < span.end) soften(scratch.scores + q * PARTITION_TOKENS, span, partial + q * stride);
    }
    weigh_pages(w, scratch, partition, begin, end, partial);
    return UNBROKEN;
}

// total <- total and next, next's positions being the later ones.
static inline void combine(float* total, const float* next, int dims) {
    if (next[1] == 0.0f) return;
    if (total[1] == 0.0f) {
        __builtin_memcpy(total, next, static_cast<size_t>(dims + HEADER) * 4);
        return;
    }
    const float top = total[0] > next[0] ? total[0] : next[0];
    const float a = exp1(total[0] - top), b = exp1(next[0] - top);
    total[1] = total[1] * a + next[1] * b;
    total[0] = top;
    for (int d = HEADER; d < dims + HEADER; d += 8) store8(total + d, load8(total + d) * splat(a) + load8(next + d) * splat(b));
}

static inline void finish(const float* total, int dims, float* out) {
    const f8 sum = splat(total[1]);
    for (int d = 0; d < dims; d += 8) store8(out + d, load8(total + HEADER + d) / sum);
}

static uint64_t attend(const AttendWork& w, float* out, int64_t out_stride) {
    const Scratch scratch = divide_scratch(w);
    const int queries = w.tokens * w.group, dims = w.kv->head_dim;
    const int64_t stride = dims + HEADER;
    const int oldest = w.window > 0 ? most(0, w.first_position - w.window + 1) : 0;
    const int last = (w.first_position + w.tokens - 1) / PARTITION_TOKENS;
    uint64_t broken = UNBROKEN;
    scale_queries(w, scratch.queries);
    for (int64_t i = 0; i < queries * stride; i += 8) store8(scratch.total + i, splat(0.0f));
    for (int partition = oldest / PARTITION_TOKENS; partition <= last && broken == UNBROKEN; ++partition) {
        broken = compute_partition(w, scratch, partition, scratch.partial);
        for (int q = 0; broken == UNBROKEN && q < queries; ++q) combine(scratch.total + q * stride, scratch.partial + q * stride, dims);
    }
    for (int t = 0; t < w.tokens; ++t)
        for (int h = 0; h < w.group; ++h) {
            float* to = out + t * out_stride + static_cast<int64_t>(h) * dims;
            if (broken == UNBROKEN)
                finish(scratch.total + (t * w.group + h) * stride, dims, to);
            else
                for (int d = 0; d < dims; ++d) to[d] = 0.0f;
        }
    return broken;
}

static uint64_t attend_partition(const AttendWork& w, int partition, float* partial) {
    const Scratch scratch = divide_scratch(w);
    scale_queries(w, scratch.queries);
    return compute_partition(w, scratch, partition, partial);
}

static void attend_combine(const float* partials, int partitions, int group, int head_dim, float* out) {
    const int64_t stride = head_dim + HEADER;
    for (int h = 0; h < group; ++h) {
        float total[HEADER + 512];
        __builtin_memcpy(total, partials + h * stride, static_cast<size_t>(stride) * 4);
        for (int p = 1; p < partitions; ++p) combine(total, partials + (static_cast<int64_t>(p) * group + h) * stride, head_dim);
        finish(total, head_dim, out + static_cast<int64_t>(h) * head_dim);
    }
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
