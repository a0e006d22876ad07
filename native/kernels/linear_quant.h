// y = W x for weights in 8-bit or 4-bit groups of 32 and inputs in 8-bit groups of 32.
//
// A lane is an output row. In each group the products are summed exactly in integers; then acc = fma(weight scale * input scale, sum, acc),
// group after group, the remainder of a group with an outlier right behind it (for a token without one that adds exactly nothing). Minimums come first: acc = sum over groups of minimum * (input scale * sum of the input's quants). Every output
// element therefore has one order, whatever the number of tokens or the tile that computes it (L13).
// 4 bits: a 16-bit lane takes 16 products of at most 15 * 127 (30,480 < 32,768) before it must widen.
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

// Ends an expression: without it GCC gathers all products of a group before the first sum and spills most of them.
static inline __m256i settled(__m256i v) {
    asm("" : "+x"(v));
    return v;
}

template <int R, int T>
static inline void dot_q4(const uint8_t* w, int64_t stride, const int8_t* x, int64_t x_stride, f8 (&sums)[R][T]) {
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total[R][T];
    for (int i = 0; i < 4; ++i) {
        for (int r = 0; r < R; ++r) {
            const __m256i raw = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + r * stride + i * 32));
            const __m256i low = _mm256_and_si256(raw, mask);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
            for (int t = 0; t < T; ++t) {
                const __m256i a = _mm256_maddubs_epi16(low, broadcast4(x + t * x_stride + i * 4));
                total[r][t] = settled(i == 0 ? a : _mm256_add_epi16(total[r][t], a));
            }
            for (int t = 0; t < T; ++t) {
                const __m256i b = _mm256_maddubs_epi16(high, broadcast4(x + t * x_stride + 16 + i * 4));
                total[r][t] = settled(_mm256_add_epi16(total[r][t], b));
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sums[r][t] = _mm256_cvtepi32_ps(_mm256_madd_epi16(total[r][t], ones));
}

template <int R, int T>
static inline void dot_q8(const uint8_t* w, int64_t stride, const int8_t* x, int64_t x_stride, f8 (&sums)[R][T]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total[R][T];
    for (int i = 0; i < 8; ++i) {
        for (int r = 0; r < R; ++r) {
            const __m256i q = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + r * stride + i * 32));
            const __m256i size = _mm256_abs_epi8(q);
            for (int t = 0; t < T; ++t) {
                const __m256i signed_x = _mm256_sign_epi8(broadcast4(x + t * x_stride + i * 4), q);
                const __m256i wide = _mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_x), ones);
                total[r][t] = settled(i == 0 ? wide : _mm256_add_epi32(total[r][t], wide));
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sums[r][t] = _mm256_cvtepi32_ps(total[r][t]);
}
#else
template <int R, int T>
static inline void dot_q4(const uint8_t* w, int64_t stride, const int8_t* x, int64_t x_stride, f8 (&sums)[R][T]) {
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            int32_t total[ROW_BLOCK] = {};
            for (int i = 0; i < 4; ++i)
                for (int lane = 0; lane < ROW_BLOCK; ++lane)
                    for (int b = 0; b < 4; ++b) {
                        const int pair = w[r * stride + i * 32 + lane * 4 + b];
                        total[lane] += (pair & 15) * x[t * x_stride + i * 4 + b] + (pair >> 4) * x[t * x_stride + 16 + i * 4 + b];
                    }
            for (int lane = 0; lane < ROW_BLOCK; ++lane) sums[r][t][lane] = static_cast<float>(total[lane]);
        }
}

template <int R, int T>
static inline void dot_q8(const uint8_t* w, int64_t stride, const int8_t* x, int64_t x_stride, f8 (&sums)[R][T]) {
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            int32_t total[ROW_BLOCK] = {};
            for (int i = 0; i < 8; ++i)
                for (int lane = 0; lane < ROW_BLOCK; ++lane)
                    for (int b = 0; b < 4; ++b)
                        total[lane] += static_cast<int8_t>(w[r * stride + i * 32 + lane * 4 + b]) * x[t * x_stride + i * 4 + b];
            for (int lane = 0; lane < ROW_BLOCK; ++lane) sums[r][t][lane] = static_cast<float>(total[lane]);
        }
}
#endif

// How far ahead of use the first pass over weights asks memory for them: the hardware's own prefetchers stop at page ends and at the
// seams between a layer's streams. Measured: 40 % more bandwidth for a single token.
constexpr int AHEAD_BYTES = 4096;

// R row blocks from `block`, T tokens from `token`: acc[r][t] = 8 rows of y. `cold`: the weights come from memory, not from a cache.
template <PackFormat FORMAT, int R, int T>
static inline void quant_tile(const Linear& w, const Inputs& in, int token, int block, bool cold, f8 (&acc)[R][T]) {
    constexpr bool FOUR_BITS = FORMAT == PACK_Q4 || FORMAT == PACK_Q4M;
    constexpr int BYTES = FOUR_BITS ? Q4_BLOCK : Q8_BLOCK;
    const int groups = w.groups;
    const int64_t weight_stride = static_cast<int64_t>(groups) * BYTES;
    const int64_t scale_stride = static_cast<int64_t>(groups) * ROW_BLOCK;
    const uint8_t* weights = w.weights + block * weight_stride;
    const uint16_t* scales = w.scales + block * scale_stride;
    const int8_t* x = in.quants + token * in.quant_stride;
    const float* x_scales = in.scales + token * in.group_stride;
    const int8_t* remainders = in.remainders + token * in.quant_stride;
    const float* remainder_scales = in.remainder_scales + token * in.group_stride;
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) acc[r][t] = splat(0.0f);
    if (FORMAT != PACK_Q8) {
        const float* sums = in.scaled_sums + token * in.group_stride;
        for (int g = 0; g < groups; ++g)
            for (int r = 0; r < R; ++r) {
                const f8 minimum = FORMAT == PACK_Q4 ? load_half8(scales + r * scale_stride + g * ROW_BLOCK) * splat(-8.0f)
                                                     : load_half8(w.minimums + (block + r) * scale_stride + g * ROW_BLOCK);
                for (int t = 0; t < T; ++t) acc[r][t] = fma8(minimum, splat(sums[t * in.group_stride + g]), acc[r][t]);
            }
    }
    for (int g = 0; g < groups; ++g) {
        if (cold) {
            for (int r = 0; r < R; ++r)
                for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(weights + r * weight_stride + g * BYTES + line + AHEAD_BYTES);
        }
        f8 dots[R][T];
        if (FOUR_BITS)
            dot_q4<R, T>(weights + g * BYTES, weight_stride, x + g * GROUP, in.quant_stride, dots);
        else
            dot_q8<R, T>(weights + g * BYTES, weight_stride, x + g * GROUP, in.quant_stride, dots);
        for (int r = 0; r < R; ++r) {
            const f8 scale = load_half8(scales + r * scale_stride + g * ROW_BLOCK);
            for (int t = 0; t < T; ++t) acc[r][t] = fma8(scale * splat(x_scales[t * in.group_stride + g]), dots[r][t], acc[r][t]);
        }
        bool outlier = false;
        for (int t = 0; t < T; ++t) outlier |= remainder_scales[t * in.group_stride + g] != 0.0f;
        if (!outlier) continue;
        if (FOUR_BITS)
            dot_q4<R, T>(weights + g * BYTES, weight_stride, remainders + g * GROUP, in.quant_stride, dots);
        else
            dot_q8<R, T>(weights + g * BYTES, weight_stride, remainders + g * GROUP, in.quant_stride, dots);
        for (int r = 0; r < R; ++r) {
            const f8 scale = load_half8(scales + r * scale_stride + g * ROW_BLOCK);
            for (int t = 0; t < T; ++t) acc[r][t] = fma8(scale * splat(remainder_scales[t * in.group_stride + g]), dots[r][t], acc[r][t]);
        }
    }
}

// 32 values as scale * q: scale = largest magnitude / 127, q rounded to nearest, ties to even. Returns the scale.
static inline float round_group(const f8 (&v)[4], int8_t* q) {
    const float top = maximum8(max8(max8(abs8(v[0]), abs8(v[1])), max8(abs8(v[2]), abs8(v[3]))));
    const f8 inverse = splat(top > 0.0f ? 127.0f / top : 0.0f);
    for (int i = 0; i < 4; ++i) round_to_int8(q + 8 * i, v[i] * inverse);
    return top / 127.0f;
}

// A group whose largest magnitude is more than this many times its root mean square (at most 5.7, 1 of 32) has an outlier. At 4.5 about a
// tenth of SmolLM2-135M's groups have one, and rounding those twice brings its predictions 3.6 times closer to float32 ones (KL divergence).
constexpr float OUTLIER = 4.5f;

static void quantise(const float* x, int n, const Groups& to) {
    for (int g = 0, begin = 0; begin < n; ++g, begin += GROUP) {
        float padded[GROUP] = {};
        const float* source = x + begin;
        if (begin + GROUP > n) {
            for (int i = 0; i < n - begin; ++i) padded[i] = x[begin + i];
            source = padded;
        }
        f8 v[4];
        for (int i = 0; i < 4; ++i) v[i] = load8(source + 8 * i);
        int8_t* q = to.quants + begin;
        int8_t* remainder = to.remainders + begin;
        const float scale = round_group(v, q), top = scale * 127.0f;
        const float squares = sum8((v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]));
        to.scales[g] = scale;
        to.scaled_sums[g] = scale * static_cast<float>(sum_int8_32(q));
        to.remainder_scales[g] = 0.0f;
        if (top * top * GROUP <= OUTLIER * OUTLIER * squares) {
            std::memset(remainder, 0, GROUP);
            continue;
        }
        for (int i = 0; i < 4; ++i) v[i] = fma8(splat(-scale), load_int8_8(q + 8 * i), v[i]);
        to.remainder_scales[g] = round_group(v, remainder);
        to.scaled_sums[g] += to.remainder_scales[g] * static_cast<float>(sum_int8_32(remainder));
    }
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
