// K and V vectors to and from the arena's number formats.
//
// Owns the element layout inside a run: [kv_head][slot][dim], then for int8 and int4 the float32 scales [kv_head][slot].
// int8: scale = largest magnitude / 127. int4: scale = largest magnitude / 7, stored as q + 8, even dims in the low nibble.
// Never decides whether a slot may be touched: callers have checked the seal.
#pragma once
#include "../kernels.h"
#include "simd.h"

namespace kvseal {
namespace KVSEAL_ISA {

static inline float largest_magnitude(const float* x, int n) {
    f8 top = splat(0.0f);
    for (int i = 0; i < n; i += 8) top = max8(top, abs8(load8(x + i)));
    return maximum8(top);
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
        case KV_INT8:
        case KV_INT4: break;
    }
    const float levels = kv.kind == KV_INT8 ? 127.0f : 7.0f;
    const float top = largest_magnitude(x, n);
    const float scale = top / levels;
    const f8 inverse = splat(top > 0.0f ? levels / top : 0.0f);
    reinterpret_cast<float*>(run + kv.element_run_bytes)[index] = scale;
    if (kv.kind == KV_INT8) {
        int8_t* out = reinterpret_cast<int8_t*>(run) + index * n;
        for (int i = 0; i < n; i += 8) round_to_int8(out + i, load8(x + i) * inverse);
        return;
    }
    uint8_t* out = run + index * n / 2;
    for (int i = 0; i < n; i += 8) {
        int8_t q[8];
        round_to_int8(q, load8(x + i) * inverse);
        for (int j = 0; j < 4; ++j) out[i / 2 + j] = static_cast<uint8_t>((q[2 * j] + 8) | (q[2 * j + 1] + 8) << 4);
    }
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
