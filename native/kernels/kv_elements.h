// K and V vectors to and from the arena's number formats.
//
// Owns the element layout inside a run: [kv_head][slot][dim], then for int8 and int4 the float32 scales [kv_head][slot].
// int8: scale = largest magnitude / 127. int4: the vector is rotated first; scale = the element of largest magnitude / -8, so that 16 levels
// are used, stored as q + 8, even dims in the low nibble.
// Never decides whether a slot may be touched: callers have checked the seal.
#pragma once
#include "../kernels.h"
#include "simd.h"

namespace kvseal {
namespace KVSEAL_ISA {

static inline float abs1(float x) { return x < 0.0f ? -x : x; }
static inline float largest_magnitude(const float* x, int n) {
    f8 top = splat(0.0f);
    for (int i = 0; i < n; i += 8) top = max8(top, abs8(load8(x + i)));
    return maximum8(top);
}

// Keys have a few dimensions that are large in every token: four bits between them and 0 leave nothing for the others. A Hadamard
// transform spreads them over all dimensions of a vector (over blocks of the largest power of two that divides n). It is its own inverse but
// for the block's size, and keeps inner products but for the same: so queries are rotated as keys are, and results as values.
static inline float rotation_inverse(int n) { return 1.0f / static_cast<float>(n & -n); }  // a power of two: exact
static inline void rotate(float* x, int n) {
    const int block = n & -n;
    for (int half = 1; half < block; half *= 2)
        for (int begin = 0; begin < n; begin += 2 * half)
            for (int i = begin; i < begin + half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
}

static inline void store_int4(uint8_t* out, float* scale, const float* x, int n) {
    float turned[512];
    __builtin_memcpy(turned, x, static_cast<size_t>(n) * sizeof(float));
    rotate(turned, n);
    const float top = largest_magnitude(turned, n);
    float peak = top;
    for (int i = n; i-- > 0;)
        if (abs1(turned[i]) == top) peak = turned[i];
    *scale = peak * -0.125f;
    const f8 inverse = splat(top > 0.0f ? -8.0f / peak : 0.0f), most = splat(7.0f);
    for (int i = 0; i < n; i += 8) {
        int8_t q[8];
        round_to_int8(q, min8(load8(turned + i) * inverse, most));
        for (int j = 0; j < 4; ++j) out[i / 2 + j] = static_cast<uint8_t>((q[2 * j] + 8) | (q[2 * j + 1] + 8) << 4);
    }
}

// `index` = head * page_tokens + slot.
static inline void store_vector(const KVLayout& kv, uint8_t* run, int64_t index, const float* x) {
    const int n = kv.head_dim;
    switch (kv.kind) {
        case KV_FP32: __builtin_memcpy(run + index * n * 4, x, static_cast<size_t>(n) * 4); return;
        case KV_FP16: {
            uint16_t* out = reinterpret_cast<uint16_t*>(run) + index * n;
            for (int i = 0; i < n; i += 8) store_half8(out + i, load8(x + i));
            return;
        }
        case KV_INT4: return store_int4(run + index * n / 2, reinterpret_cast<float*>(run + kv.element_run_bytes) + index, x, n);
        case KV_INT8: break;
    }
    const float top = largest_magnitude(x, n);
    reinterpret_cast<float*>(run + kv.element_run_bytes)[index] = top / 127.0f;
    const f8 inverse = splat(top > 0.0f ? 127.0f / top : 0.0f);
    int8_t* out = reinterpret_cast<int8_t*>(run) + index * n;
    for (int i = 0; i < n; i += 8) round_to_int8(out + i, load8(x + i) * inverse);
}

static void store_kv(const KVLayout& kv, int64_t page, int layer, int slot, const float* k, const float* v) {
    uint8_t* keys = kv.run(page, layer, false);
    uint8_t* values = kv.run(page, layer, true);
    for (int head = 0; head < kv.kv_heads; ++head) {
        const int64_t index = static_cast<int64_t>(head) * kv.page_tokens + slot;
        store_vector(kv, keys, index, k + static_cast<int64_t>(head) * kv.head_dim);
        store_vector(kv, values, index, v + static_cast<int64_t>(head) * kv.head_dim);
    }
}

constexpr bool has_scales(KVKind kind) { return kind == KV_INT8 || kind == KV_INT4; }

template <KVKind KIND>
static inline int64_t bytes_of(int64_t elements) {
    return KIND == KV_FP32 ? elements * 4 : KIND == KV_FP16 ? elements * 2 : KIND == KV_INT8 ? elements : elements / 2;
}

// Elements i .. i + 7 as floats, without scale. For int4: q, 0 .. 15.
template <KVKind KIND>
static inline f8 load_elements(const uint8_t* from, int64_t i) {
    if constexpr (KIND == KV_FP32) return load8(reinterpret_cast<const float*>(from) + i);
    if constexpr (KIND == KV_FP16) return load_half8(reinterpret_cast<const uint16_t*>(from) + i);
    if constexpr (KIND == KV_INT8) return load_int8_8(reinterpret_cast<const int8_t*>(from) + i);
    return load_nibbles8(from + i / 2);
}

// Asks memory for `bytes` from `at` on, ahead of use.
static inline void expect(const uint8_t* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

// Vectors [begin, end) of one head as floats, at their own places in buffer[slot][dim]. On the way the same vectors of `ahead` are asked
// for, line by line: a burst of requests would fill the core's miss buffers and wait for itself.
template <KVKind KIND>
static inline void widen(const uint8_t* from, const uint8_t* ahead, int dims, int begin, int end, float* buffer) {
    const int64_t bytes = bytes_of<KIND>(dims);
    for (int slot = begin; slot < end; ++slot) {
        expect(ahead + slot * bytes, bytes);
        const uint8_t* vector = from + slot * bytes;
        float* out = buffer + static_cast<int64_t>(slot) * dims;
        for (int d = 0; d < dims; d += 8) store8(out + d, load_elements<KIND>(vector, d));
    }
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
