// Eight lanes, the same words on every machine.
//
// Owns the vector types and the few operations that need an instruction by name; + - * and comparisons are the compiler's own vector
// extensions (GCC, Clang). Contraction is off for the whole library: a multiply and an add become one operation only where `fma` says so,
// so that two shapes of one kernel cannot differ (L13).
#pragma once
#include <cstdint>
#include <cstring>
#if defined(KVSEAL_AVX2)
#include <immintrin.h>
#elif defined(KVSEAL_NEON)
#include <arm_neon.h>
#endif

namespace kvseal {
namespace KVSEAL_ISA {

#if defined(KVSEAL_AVX2)
using f8 = __m256;
typedef int32_t i8x __attribute__((vector_size(32)));

static inline f8 load8(const float* p) { return _mm256_loadu_ps(p); }
static inline void store8(float* p, f8 v) { _mm256_storeu_ps(p, v); }
static inline f8 splat(float v) { return _mm256_set1_ps(v); }
static inline f8 fma8(f8 a, f8 b, f8 c) { return _mm256_fmadd_ps(a, b, c); }
static inline f8 max8(f8 a, f8 b) { return _mm256_max_ps(a, b); }
static inline f8 min8(f8 a, f8 b) { return _mm256_min_ps(a, b); }
static inline f8 load_half8(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
static inline void store_half8(uint16_t* p, f8 v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline f8 load_bf16_8(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline f8 load_int8_8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline f8 load_nibbles8(const uint8_t* p) {  // 4 bytes, the low nibble first
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    const __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15)));
}
static inline void round_to_int8(int8_t* p, f8 v) {
    const __m256i n = _mm256_cvtps_epi32(v);  // nearest, ties to even
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(half, half));
}
static inline f8 abs8(f8 v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
static inline float maximum8(f8 v) {
    __m128 top = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    return _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
}
// 32 values times `by`, rounded to nearest (ties to even), |product| <= 127. Returns the sum of what it wrote.
static inline int32_t round_to_int8_32(int8_t* p, const f8 (&v)[4], f8 by) {
    const __m256i a = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0] * by), _mm256_cvtps_epi32(v[1] * by));
    const __m256i b = _mm256_packs_epi32(_mm256_cvtps_epi32(v[2] * by), _mm256_cvtps_epi32(v[3] * by));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs works within halves
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
    const __m256i wide = _mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
}
static inline f8 to_float8(i8x v) { return _mm256_cvtepi32_ps((__m256i)v); }
// Of 8 words: the bits from `shift` on, as `mask` says.
static inline i8x unsigned_field8(const uint8_t* p, int shift, int mask) {
    const __m256i words = _mm256_srl_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm_cvtsi32_si128(shift));
    return (i8x)_mm256_and_si256(words, _mm256_set1_epi32(mask));
}
// Of 8 words: byte `index` with its sign.
static inline i8x signed_byte8(const uint8_t* p, int index) {
    const __m256i words = _mm256_sll_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm_cvtsi32_si128(24 - 8 * index));
    return (i8x)_mm256_srai_epi32(words, 24);
}
static inline unsigned equal8(f8 a, f8 b) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
// Bit i: p[i] is not 0.
static inline unsigned nonzero8(const float* p) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(load8(p), _mm256_setzero_ps(), _CMP_NEQ_UQ)); }
static inline f8 sum_pairs(f8 a, f8 b) {  // what hadd gives, in fewer operations
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
}
// Each vector's lanes summed as ((0+1)+(2+3)) + ((4+5)+(6+7)).
static inline void sum4(f8 a, f8 b, f8 c, f8 d, float* out) {
    const f8 t = sum_pairs(sum_pairs(a, b), sum_pairs(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
#else
typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8x __attribute__((vector_size(32)));

static inline f8 load8(const float* p) {
    f8 v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
static inline void store8(float* p, f8 v) { __builtin_memcpy(p, &v, sizeof v); }
static inline f8 splat(float v) { return f8{v, v, v, v, v, v, v, v}; }
static inline f8 fma8(f8 a, f8 b, f8 c) {
#if defined(__FP_FAST_FMAF)
    f8 r;
    for (int i = 0; i < 8; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}
static inline f8 pick(i8x mask, f8 a, f8 b) { return (f8)(((i8x)a & mask) | ((i8x)b & ~mask)); }
static inline f8 max8(f8 a, f8 b) { return pick((i8x)(a > b), a, b); }
static inline f8 min8(f8 a, f8 b) { return pick((i8x)(a < b), a, b); }

static inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 31;
    const uint32_t mantissa = h & 1023;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7F800000U | mantissa << 13;
    } else if (exponent != 0) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
        __builtin_memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}
static inline uint16_t float_to_half(float value) {  // nearest, ties to even
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return sign | 0x7E00;
    if (bits >= 0x477FF000) return sign | 0x7C00;
    if (bits < 0x38800000) {  // subnormal: let the adder round at 2^-24
        float small;
        __builtin_memcpy(&small, &bits, 4);
        small += 0.5f;
        __builtin_memcpy(&bits, &small, 4);
        return sign | static_cast<uint16_t>(bits - 0x3F000000);
    }
    bits += 0xC8000FFF + ((bits >> 13) & 1);
    return sign | static_cast<uint16_t>(bits >> 13);
}
static inline f8 load_half8(const uint16_t* p) {
    f8 v;
    for (int i = 0; i < 8; ++i) v[i] = half_to_float(p[i]);
    return v;
}
static inline void store_half8(uint16_t* p, f8 v) {
    for (int i = 0; i < 8; ++i) p[i] = float_to_half(v[i]);
}
static inline f8 load_bf16_8(const uint16_t* p) {
    f8 v;
    for (int i = 0; i < 8; ++i) {
        const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
        float value;
        __builtin_memcpy(&value, &bits, 4);
        v[i] = value;
    }
    return v;
}
static inline f8 load_int8_8(const int8_t* p) {
    f8 v;
    for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(p[i]);
    return v;
}
static inline f8 load_nibbles8(const uint8_t* p) {  // 4 bytes, the low nibble first
    f8 v;
    for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(p[i / 2] >> (i % 2 * 4) & 15);
    return v;
}
static inline void round_to_int8(int8_t* p, f8 v) {  // nearest, ties to even, by the adder; |v| <= 127
    const f8 magic = splat(12582912.0f);
    const f8 n = (v + magic) - magic;
    for (int i = 0; i < 8; ++i) p[i] = static_cast<int8_t>(n[i]);
}
static inline f8 abs8(f8 v) { return (f8)((i8x)v & 0x7FFFFFFF); }
static inline float maximum8(f8 v) {
    float top = v[0];
    for (int i = 1; i < 8; ++i) top = v[i] > top ? v[i] : top;
    return top;
}
static inline int32_t round_to_int8_32(int8_t* p, const f8 (&v)[4], f8 by) {
    int32_t sum = 0;
    for (int i = 0; i < 4; ++i) round_to_int8(p + 8 * i, v[i] * by);
    for (int i = 0; i < 32; ++i) sum += p[i];
    return sum;
}
static inline f8 to_float8(i8x v) {
    f8 out;
    for (int i = 0; i < 8; ++i) out[i] = static_cast<float>(v[i]);
    return out;
}
static inline i8x unsigned_field8(const uint8_t* p, int shift, int mask) {
    i8x out;
    for (int i = 0; i < 8; ++i) {
        uint32_t word;
        __builtin_memcpy(&word, p + 4 * i, 4);
        out[i] = static_cast<int32_t>(word >> shift) & mask;
    }
    return out;
}
static inline i8x signed_byte8(const uint8_t* p, int index) {
    i8x out;
    for (int i = 0; i < 8; ++i) out[i] = static_cast<int8_t>(p[4 * i + index]);
    return out;
}
static inline unsigned equal8(f8 a, f8 b) {
    unsigned bits = 0;
    for (int i = 0; i < 8; ++i) bits |= (a[i] == b[i] ? 1U : 0U) << i;
    return bits;
}
static inline unsigned nonzero8(const float* p) {
    unsigned bits = 0;
    for (int i = 0; i < 8; ++i) bits |= (p[i] != 0.0f ? 1U : 0U) << i;
    return bits;
}
static inline float sum_lanes(f8 v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }
static inline void sum4(f8 a, f8 b, f8 c, f8 d, float* out) {
    out[0] = sum_lanes(a);
    out[1] = sum_lanes(b);
    out[2] = sum_lanes(c);
    out[3] = sum_lanes(d);
}
#endif

static inline float sum8(f8 v) {
#if defined(KVSEAL_AVX2)
    const f8 t = _mm256_hadd_ps(_mm256_hadd_ps(v, v), v);  // sum4's order
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
#else
    return sum_lanes(v);
#endif
}
// v with 0 in lane `lane`; any other number changes nothing.
static inline f8 without8(f8 v, int lane) {
    const i8x lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    return (f8)((i8x)v & (i8x)(lanes != lane));
}
// e^x, lane by lane: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of degree 6 in r (coefficients of Cephes' expf, S. Moshier).
// Within 2 units in the last place over [-87.3, 88.3]; 0 below, clamped above. The same bits wherever it is used.
static inline f8 exp8(f8 x) {
    const f8 low = splat(-87.3f);
    const i8x alive = (i8x)(x >= low);
    x = min8(max8(x, low), splat(88.3f));
    const f8 magic = splat(12582912.0f);  // 1.5 * 2^23: the adder rounds to an integer and leaves it in the low bits
    const f8 shifted = fma8(x, splat(1.44269504088896341f), magic);
    const f8 n = shifted - magic;
    f8 r = fma8(n, splat(-0.693359375f), x);
    r = fma8(n, splat(2.12194440e-4f), r);
    f8 y = splat(1.9875691500e-4f);
    y = fma8(y, r, splat(1.3981999507e-3f));
    y = fma8(y, r, splat(8.3334519073e-3f));
    y = fma8(y, r, splat(4.1665795894e-2f));
    y = fma8(y, r, splat(1.6666665459e-1f));
    y = fma8(y, r, splat(5.0000001201e-1f));
    y = fma8(y, r * r, r) + splat(1.0f);
    const i8x power = (((i8x)shifted - (i8x)magic) + 127) << 23;
    return (f8)((i8x)(y * (f8)power) & alive);
}

static inline float exp1(float x) {
    float out[8];
    store8(out, exp8(splat(x)));
    return out[0];
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
