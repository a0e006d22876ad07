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

// Asks memory for all slots of one head, ahead of use: a head's vectors of one page are contiguous, those of the next lie a page further.
static inline void expect_slots(const KVLayout& kv, const uint8_t* run, int head) {
    const int64_t bytes = kv.element_run_bytes / kv.kv_heads;
    const uint8_t* first = run + head * bytes;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(first + at);
}

// Slots [begin, end) of one head as floats at their own places in buffer[slot][dim]; fp32 is read where it lies. On the way the same
// slots of `next` are asked for, line by line: a burst of requests would fill the core's miss buffers and wait for itself.
static inline const float* load_slots(const KVLayout& kv, const uint8_t* run, const uint8_t* next, int head, int begin, int end, float* buffer) {
    const int n = kv.head_dim;
    const int64_t first = static_cast<int64_t>(head) * kv.page_tokens;
    if (kv.kind == KV_FP32) return reinterpret_cast<const float*>(run) + first * n;
    if (kv.kind == KV_FP16) {
        const uint16_t* in = reinterpret_cast<const uint16_t*>(run) + first * n;
        const uint16_t* ahead = reinterpret_cast<const uint16_t*>(next) + first * n;
        for (int64_t i = static_cast<int64_t>(begin) * n; i < static_cast<int64_t>(end) * n; i += 8) {
            if ((i & 31) == 0) __builtin_prefetch(ahead + i);
            store8(buffer + i, load_half8(in + i));
        }
        return buffer;
    }
    const float* scales = reinterpret_cast<const float*>(run + kv.element_run_bytes) + first;
    for (int slot = begin; slot < end; ++slot) {
        const f8 scale = splat(scales[slot]);
        __builtin_prefetch(next + (first + slot) * n * (kv.kind == KV_INT8 ? 2 : 1) / 2);
        float* out = buffer + static_cast<int64_t>(slot) * n;
        if (kv.kind == KV_INT8) {
            const int8_t* in = reinterpret_cast<const int8_t*>(run) + (first + slot) * n;
            for (int i = 0; i < n; i += 8) store8(out + i, load_int8_8(in + i) * scale);
        } else {
            const uint8_t* in = run + (first + slot) * n / 2;
            for (int i = 0; i < n; i += 8) {
                int8_t q[8];
                for (int j = 0; j < 4; ++j) {
                    q[2 * j] = static_cast<int8_t>((in[i / 2 + j] & 15) - 8);
                    q[2 * j + 1] = static_cast<int8_t>((in[i / 2 + j] >> 4) - 8);
                }
                store8(out + i, load_int8_8(q) * scale);
            }
        }
    }
    return buffer;
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
