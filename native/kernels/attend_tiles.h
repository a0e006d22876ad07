// The register tiles of attention: scores of a few queries against slots, and slots weighed into a few accumulators.
//
// Owns the order of their sums (L13): a tile's shape changes speed, never bits. Never decides whether a slot may be read: callers have
// checked the seals and give slots inside `filled`.
#pragma once
#include "kv_elements.h"

namespace kvseal {
namespace KVSEAL_ISA {

constexpr int HEADER = AttendScratch::HEADER, SCORE_STRIDE = AttendScratch::SCORE_STRIDE;

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }

// 2^x for x <= 0, lane by lane: x = n + r, |r| <= 1/2, a polynomial of degree 5 in r (minimax, 2^0 = 1 exactly; relative error 1e-7).
// 0 below -126.5, and for what is not a number. The same bits wherever it is used.
static inline f8 exp2_8(f8 x) {
    x = max8(x, splat(-127.0f));
    const f8 magic = splat(12583039.0f);  // 1.5 * 2^23 + 127: the adder rounds to an integer and leaves n + 127 in the low bits
    const f8 shifted = x + magic;
    const f8 r = x - (shifted - magic);
    f8 y = splat(1.3264727065e-3f);
    y = fma8(y, r, splat(9.6715126489e-3f));
    y = fma8(y, r, splat(5.5507337437e-2f));
    y = fma8(y, r, splat(2.4022242085e-1f));
    y = fma8(y, r, splat(6.9314697760e-1f));
    y = fma8(y, r, splat(1.0f));
    return y * (f8)((i8x)shifted << 23);
}
static inline float exp2_1(float x) {
    float out[8];
    store8(out, exp2_8(splat(x)));
    return out[0];
}

// Queries of the next tile: threes, as they fill the registers best; two or four where that leaves no single one.
static inline int tile_of(int queries) { return queries == 2 || queries == 4 ? queries : least(queries, 3); }

// scores[query][slot] for slots [begin, end) of one page, Q queries. Groups of four slots; those outside repeat a slot inside.
template <KVKind KIND, int Q>
static inline void score_tile(const float* q, const uint8_t* keys, int64_t ahead, int dims, int begin, int end, float* scores) {
    const int64_t bytes = bytes_of<KIND>(dims);
    for (int s = begin & ~3; s < end; s += 4) {
        const uint8_t* k[4];
        for (int i = 0; i < 4; ++i) k[i] = keys + least(most(s + i, begin), end - 1) * bytes;
        if (ahead != 0) expect(keys + s * bytes + ahead, 4 * bytes);
        f8 acc[Q][4];
        for (int j = 0; j < Q; ++j)
            for (int i = 0; i < 4; ++i) acc[j][i] = splat(0.0f);
        for (int d = 0; d < dims; d += 8) {
            f8 query[Q];
            for (int j = 0; j < Q; ++j) query[j] = load8(q + static_cast<int64_t>(j) * dims + d);
            for (int i = 0; i < 4; ++i) {
                const f8 key = load_elements<KIND>(k[i], d);
                for (int j = 0; j < Q; ++j) acc[j][i] = fma8(query[j], key, acc[j][i]);
            }
        }
        for (int j = 0; j < Q; ++j) sum4(acc[j][0], acc[j][1], acc[j][2], acc[j][3], scores + j * SCORE_STRIDE + s);
    }
}

// acc[query][dim] += weight[query][slot] * v[slot][dim] over slots [begin, end), Q queries by D vectors of dims from d on.
template <KVKind KIND, int Q, int D>
static inline void weigh_tile(const float* weights, const uint8_t* values, int64_t ahead, int dims, int d, int begin, int end, float* acc) {
    const int64_t stride = dims + HEADER, bytes = bytes_of<KIND>(dims);
    f8 sum[Q][D];
    for (int j = 0; j < Q; ++j)
        for (int i = 0; i < D; ++i) sum[j][i] = load8(acc + j * stride + d + 8 * i);
    const uint8_t* vector = values + begin * bytes + bytes_of<KIND>(d);
    for (int s = begin; s < end; ++s, vector += bytes) {
        if (ahead != 0) expect(vector + ahead, bytes_of<KIND>(8 * D));
        f8 weight[Q];
        for (int j = 0; j < Q; ++j) weight[j] = splat(weights[j * SCORE_STRIDE + s]);
        for (int i = 0; i < D; ++i) {
            const f8 value = load_elements<KIND>(vector, 8 * i);
            for (int j = 0; j < Q; ++j) sum[j][i] = fma8(weight[j], value, sum[j][i]);
        }
    }
    for (int j = 0; j < Q; ++j)
        for (int i = 0; i < D; ++i) store8(acc + j * stride + d + 8 * i, sum[j][i]);
}

template <KVKind KIND, int Q>
static inline void weigh_all(const float* weights, const uint8_t* values, int64_t ahead, int dims, int begin, int end, float* acc) {
    constexpr int D = Q == 1 ? 8 : Q == 4 ? 2 : 4;
    int d = 0;
    for (; d + 8 * D <= dims; d += 8 * D) weigh_tile<KIND, Q, D>(weights, values, ahead, dims, d, begin, end, acc);
    for (; d + 16 <= dims; d += 16) weigh_tile<KIND, Q, 2>(weights, values, ahead, dims, d, begin, end, acc);
    for (; d < dims; d += 8) weigh_tile<KIND, Q, 1>(weights, values, ahead, dims, d, begin, end, acc);
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
