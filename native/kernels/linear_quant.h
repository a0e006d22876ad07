// y = W x for weights in 8-bit or 4-bit groups of 32 and inputs in 8-bit groups of 32.
//
// A lane is an output row. Group after group: acc = fma(minimum, sum of the group's inputs as rounded, acc); the products are summed exactly
// in integers and acc = fma(weight scale * input scale, sum, acc). Then the outliers, group after group: acc = fma(weight scale * quant of its
// column, outlier, acc). Every output element therefore has one order, whatever the number of tokens or the tile that computes it (L13).
// 4 bits: a 16-bit lane takes 16 products of at most 15 * 127 (30,480 < 32,768) before it must widen. 8 bits, several tokens: the quant
// plus 128 is two such halves, 16 * high + low, and 128 times the sum of the inputs comes off in the end; exact all the same.
#pragma once
#include "../kernels.h"
#include "simd.h"

namespace kvseal {
namespace KVSEAL_ISA {

constexpr int Q4_BLOCK = ROW_BLOCK * GROUP / 2;  // bytes of 8 rows x 32 columns
constexpr int Q8_BLOCK = ROW_BLOCK * GROUP;

// Integer dot products of one group: R row blocks (each `stride` bytes apart) by T tokens. sums[r][t] = 8 rows.
#if defined(KVSEAL_AVX2)
static inline __m256i broadcast4(const int8_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}
static inline __m256i bytes32(const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }

// Ends an expression: without it GCC gathers all products of a group before the first sum and spills most of them.
template <class V>
static inline V settled(V v) {
    asm("" : "+v"(v));
    return v;
}
#else
template <class V>
static inline V settled(V v) {
    return v;
}
#endif
#if defined(KVSEAL_NEON)
static inline int32_t word_at(const int8_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return word;
}
static inline f8 joined(int32x4_t low, int32x4_t high) {
    i8x both;
    __builtin_memcpy(&both, &low, 16);
    __builtin_memcpy(reinterpret_cast<char*>(&both) + 16, &high, 16);
    return to_float8(both);
}
#endif

#if defined(KVSEAL_VNNI)
static inline __m256i dot4(__m256i sum, __m256i u, __m256i s) {
#if defined(__AVX512VNNI__)
    return _mm256_dpbusd_epi32(sum, u, s);
#else
    return _mm256_dpbusd_avx_epi32(sum, u, s);
#endif
}

// 4 products of unsigned and signed bytes and their sum, in 32 bits, in one instruction: nothing can overflow.
template <int R, int T, class Take>
static inline void dot_q4(const uint8_t* w, int64_t stride, const int8_t* x, Take&& take) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i total[R][T];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        for (int r = 0; r < R; ++r) {
            const __m256i raw = bytes32(w + r * stride + i * 32);
            const __m256i low = _mm256_and_si256(raw, mask), high = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                total[r][t] = dot4(i == 0 ? _mm256_setzero_si256() : total[r][t], low, broadcast4(x + t * GROUP + i * 4));
                total[r][t] = settled(dot4(total[r][t], high, broadcast4(x + t * GROUP + 16 + i * 4)));
            }
        }
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) take(r, t, _mm256_cvtepi32_ps(total[r][t]));
}

template <int R, int T, class Take>
static inline void dot_q8(const uint8_t* w, int64_t stride, const int8_t* x, const int32_t* x_sums, Take&& take) {
    const __m256i sign = _mm256_set1_epi8(-128);
    __m256i total[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) total[r][t] = _mm256_set1_epi32(-128 * x_sums[t]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        for (int r = 0; r < R; ++r) {
            const __m256i raised = _mm256_xor_si256(bytes32(w + r * stride + i * 32), sign);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) total[r][t] = settled(dot4(total[r][t], raised, broadcast4(x + t * GROUP + i * 4)));
        }
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) take(r, t, _mm256_cvtepi32_ps(total[r][t]));
}
#elif defined(KVSEAL_AVX2)
template <int R, int T, class Take>
static inline void dot_q4(const uint8_t* w, int64_t stride, const int8_t* x, Take&& take) {
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total[R][T];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        for (int r = 0; r < R; ++r) {
            const __m256i raw = bytes32(w + r * stride + i * 32);
            const __m256i low = _mm256_and_si256(raw, mask);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const __m256i a = _mm256_maddubs_epi16(low, broadcast4(x + t * GROUP + i * 4));
                total[r][t] = settled(i == 0 ? a : _mm256_add_epi16(total[r][t], a));
            }
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const __m256i b = _mm256_maddubs_epi16(high, broadcast4(x + t * GROUP + 16 + i * 4));
                total[r][t] = settled(_mm256_add_epi16(total[r][t], b));
            }
        }
    }
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) take(r, t, _mm256_cvtepi32_ps(_mm256_madd_epi16(total[r][t], ones)));
}

template <int R, int T, class Take>
static inline void dot_q8(const uint8_t* w, int64_t stride, const int8_t* x, const int32_t*, Take&& take) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total[R][T];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        for (int r = 0; r < R; ++r) {
            const __m256i q = bytes32(w + r * stride + i * 32);
            const __m256i size = _mm256_abs_epi8(q);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const __m256i signed_x = _mm256_sign_epi8(broadcast4(x + t * GROUP + i * 4), q);
                const __m256i wide = _mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_x), ones);
                total[r][t] = settled(i == 0 ? wide : _mm256_add_epi32(total[r][t], wide));
            }
        }
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) take(r, t, _mm256_cvtepi32_ps(total[r][t]));
}
#elif defined(KVSEAL_NEON)
// Four rows a register; each lane of `x` is four inputs, taken in turn.
template <int R, int T, class Take>
static inline void dot_q4(const uint8_t* w, int64_t stride, const int8_t* x, Take&& take) {
    const uint8x16_t mask = vdupq_n_u8(15);
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            int32x4_t total[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
            for (int i = 0; i < 4; ++i) {
                const int8x16_t low = vreinterpretq_s8_s32(vdupq_n_s32(word_at(x + t * GROUP + i * 4)));
                const int8x16_t high = vreinterpretq_s8_s32(vdupq_n_s32(word_at(x + t * GROUP + 16 + i * 4)));
                for (int half = 0; half < 2; ++half) {
                    const uint8x16_t raw = vld1q_u8(w + r * stride + i * 32 + half * 16);
                    total[half] = vdotq_s32(total[half], vreinterpretq_s8_u8(vandq_u8(raw, mask)), low);
                    total[half] = vdotq_s32(total[half], vreinterpretq_s8_u8(vshrq_n_u8(raw, 4)), high);
                }
            }
            take(r, t, joined(total[0], total[1]));
        }
}

template <int R, int T, class Take>
static inline void dot_q8(const uint8_t* w, int64_t stride, const int8_t* x, const int32_t*, Take&& take) {
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            int32x4_t total[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
            for (int i = 0; i < 8; ++i) {
                const int8x16_t input = vreinterpretq_s8_s32(vdupq_n_s32(word_at(x + t * GROUP + i * 4)));
                for (int half = 0; half < 2; ++half)
                    total[half] = vdotq_s32(total[half], vreinterpretq_s8_u8(vld1q_u8(w + r * stride + i * 32 + half * 16)), input);
            }
            take(r, t, joined(total[0], total[1]));
        }
}
#else
template <int R, int T, class Take>
static inline void dot_q4(const uint8_t* w, int64_t stride, const int8_t* x, Take&& take) {
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            i8x total = {};
            for (int i = 0; i < 4; ++i)
                for (int lane = 0; lane < ROW_BLOCK; ++lane)
                    for (int b = 0; b < 4; ++b) {
                        const int pair = w[r * stride + i * 32 + lane * 4 + b];
                        total[lane] += (pair & 15) * x[t * GROUP + i * 4 + b] + (pair >> 4) * x[t * GROUP + 16 + i * 4 + b];
                    }
            take(r, t, to_float8(total));
        }
}

template <int R, int T, class Take>
static inline void dot_q8(const uint8_t* w, int64_t stride, const int8_t* x, const int32_t*, Take&& take) {
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            i8x total = {};
            for (int i = 0; i < 8; ++i)
                for (int lane = 0; lane < ROW_BLOCK; ++lane)
                    for (int b = 0; b < 4; ++b)
                        total[lane] += static_cast<int8_t>(w[r * stride + i * 32 + lane * 4 + b]) * x[t * GROUP + i * 4 + b];
            take(r, t, to_float8(total));
        }
}
#endif

// The quants of one column of a group, 8 rows.
static inline f8 column_q4(const uint8_t* w, int column) {
    return to_float8(unsigned_field8(w + (column & 15) / 4 * 32, 8 * (column & 3) + (column >= 16 ? 4 : 0), 15));
}
static inline f8 column_q8(const uint8_t* w, int column) { return to_float8(signed_byte8(w + column / 4 * 32, column & 3)); }

// How far ahead of use the first pass over weights asks memory for them: the hardware's own prefetchers stop at page ends and at the
// seams between a layer's streams. Measured: 40 % more bandwidth for a single token.
constexpr int AHEAD_BYTES = 4096;

// What the dense part left out: acc += (weight scale * quant) * outlier, column after column of the list; the product in brackets is exact.
template <bool FOUR_BITS, int R, int T>
static inline void add_outliers(const Linear& w, const OutlierColumn* listed, int count, int lane, const uint8_t* weights,
                                const uint16_t* scales, f8 (&acc)[T][R]) {
    constexpr int BYTES = FOUR_BITS ? Q4_BLOCK : Q8_BLOCK;
    for (const OutlierColumn* o = listed; o != listed + count; ++o) {
        if (T < TOKEN_BLOCK && (o->tokens >> lane & ((1 << T) - 1)) == 0) continue;
        for (int r = 0; r < R; ++r) {
            const int64_t group = static_cast<int64_t>(r) * w.groups + o->group;
            const f8 quants = FOUR_BITS ? column_q4(weights + group * BYTES, o->column) : column_q8(weights + group * BYTES, o->column);
            const f8 weight = load_half8(scales + group * ROW_BLOCK) * quants;
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) acc[t][r] = settled(fma8(weight, splat(o->values[lane + t]), acc[t][r]));
        }
    }
}

// R row blocks from `block`, T tokens from `token`, all in one token block: out[t][r] = 8 rows of y. `cold`: the weights come from memory,
// not from a cache. Not inlined: in the middle of its callers the compiler runs out of registers. The loops over tokens are unrolled by
// name: left to itself, the compiler keeps the sums in memory and waits for each.
template <PackFormat FORMAT, int R, int T>
static __attribute__((noinline)) void quant_tile(const Linear& w, const Inputs& in, int token, int block, bool cold, f8 (&out)[T][R]) {
    constexpr bool FOUR_BITS = FORMAT == PACK_Q4 || FORMAT == PACK_Q4M;
    constexpr int BYTES = FOUR_BITS ? Q4_BLOCK : Q8_BLOCK, SCALES_AHEAD = AHEAD_BYTES / BYTES * ROW_BLOCK;
    const int groups = w.groups, token_block = token / TOKEN_BLOCK, lane = token % TOKEN_BLOCK;
    const int64_t weight_stride = static_cast<int64_t>(groups) * BYTES;
    const int64_t scale_stride = static_cast<int64_t>(groups) * ROW_BLOCK;
    const int64_t first = static_cast<int64_t>(token_block) * groups * TOKEN_BLOCK;
    const uint8_t* weights = w.weights + block * weight_stride;
    const uint16_t* scales = w.scales + block * scale_stride;
    const uint16_t* minimums = FORMAT == PACK_Q8 ? nullptr : FORMAT == PACK_Q4 ? scales : w.minimums + block * scale_stride;
    const int8_t* x = in.quants + (first + lane) * GROUP;
    f8 acc[T][R];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = splat(0.0f);
    for (int g = 0; g < groups; ++g) {
        if (cold) {
            for (int r = 0; r < R; ++r) {
                for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(weights + r * weight_stride + g * BYTES + line + AHEAD_BYTES);
                __builtin_prefetch(scales + r * scale_stride + g * ROW_BLOCK + SCALES_AHEAD);
                if (FORMAT == PACK_Q4M || FORMAT == PACK_Q8M) __builtin_prefetch(minimums + r * scale_stride + g * ROW_BLOCK + SCALES_AHEAD);
            }
        }
        const int64_t at = first + g * TOKEN_BLOCK + lane;
        f8 group_scales[R], group_minimums[R];
        for (int r = 0; r < R; ++r) {
            group_scales[r] = load_half8(scales + r * scale_stride + g * ROW_BLOCK);
            if (FORMAT != PACK_Q8) group_minimums[r] = load_half8(minimums + r * scale_stride + g * ROW_BLOCK) * splat(FORMAT == PACK_Q4 ? -8.0f : 1.0f);
        }
        const auto take = [&](int r, int t, f8 dot) {
            if (FORMAT != PACK_Q8) acc[t][r] = fma8(group_minimums[r], splat(in.scaled_sums[at + t]), acc[t][r]);
            acc[t][r] = settled(fma8(group_scales[r] * splat(in.scales[at + t]), dot, acc[t][r]));
        };
        if constexpr (FOUR_BITS)
            dot_q4<R, T>(weights + g * BYTES, weight_stride, x + g * TOKEN_BLOCK * GROUP, take);
        else
            dot_q8<R, T>(weights + g * BYTES, weight_stride, x + g * TOKEN_BLOCK * GROUP, in.quant_sums + at, take);
    }
    add_outliers<FOUR_BITS, R, T>(w, in.outliers + first, in.outlier_counts[token_block], lane, weights, scales, acc);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) out[t][r] = acc[t][r];
}

// A group's largest input stands apart when it is more than this many times the root mean square of the token's whole row: it is then left
// out of the rounding, so that the other 31 keep their precision, and multiplied as the float that it is. Measured against the row because
// only large groups' errors count in the sums. Each costs about a twelfth of its group's work in a tile of 8 tokens. On SmolLM2-135M, KL
// divergence from float32 on text and the share of groups that have one: 0.0005 and 30 % at 3.0, 0.0006 and 18 % at 4.0, 0.0008 and 8 % at
// 6.0, 0.0012 and 4 % at 9.0.
constexpr float OUTLIER = 4.0f;

static inline f8 largest4(const f8 (&v)[4]) { return max8(max8(abs8(v[0]), abs8(v[1])), max8(abs8(v[2]), abs8(v[3]))); }

static inline float sum_of_squares(const float* x, int n) {
    f8 sums[2] = {splat(0.0f), splat(0.0f)};
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 2; ++j) sums[j] = fma8(load8(x + i + 8 * j), load8(x + i + 8 * j), sums[j]);
    float total = sum8(sums[0] + sums[1]);
    for (; i < n; ++i) total += x[i] * x[i];
    return total;
}

static void quantise(const float* x, int n, const Groups& to) {
    const float limit = OUTLIER * OUTLIER * sum_of_squares(x, n);
    for (int g = 0, begin = 0; begin < n; ++g, begin += GROUP) {
        float padded[GROUP];
        const float* source = x + begin;
        if (begin + GROUP > n) {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, source, static_cast<size_t>(n - begin) * sizeof(float));
            source = padded;
        }
        f8 v[4];
        for (int i = 0; i < 4; ++i) v[i] = load8(source + 8 * i);
        float top = maximum8(largest4(v)), outlier = 0.0f;
        int column = 0;
        if (top * top * static_cast<float>(n) > limit) {
            unsigned where = 0;
            for (int i = 0; i < 4; ++i) where |= equal8(abs8(v[i]), splat(top)) << (8 * i);
            column = __builtin_ctz(where | 1U << (GROUP - 1));
            outlier = source[column];
            for (int i = 0; i < 4; ++i) v[i] = without8(v[i], column - 8 * i);
            top = maximum8(largest4(v));
        }
        const int at = g * TOKEN_BLOCK;
        const int32_t sum = round_to_int8_32(to.quants + at * GROUP, v, splat(top > 0.0f ? 127.0f / top : 0.0f));
        to.scales[at] = top * (1.0f / 127.0f);
        to.quant_sums[at] = sum;
        to.scaled_sums[at] = to.scales[at] * static_cast<float>(sum) + outlier;
        to.outliers[at] = outlier;
        to.outlier_columns[at] = static_cast<uint8_t>(column);
    }
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
