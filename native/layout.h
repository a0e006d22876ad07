// Sizes and places of the arena, taken from kvseal/kv/geometry.py and never computed twice.
//
// Owns `KVLayout` (plain numbers) and `Row` (one row of a step as the kernels see it).
#pragma once
#include <cstdint>

#include "seal.h"

namespace kvseal {

enum KVKind : int32_t { KV_FP32 = 0, KV_FP16, KV_INT8, KV_INT4 };

struct KVLayout {
    int32_t layers, kv_heads, head_dim, page_tokens;
    KVKind kind;
    int64_t run_bytes;          // one K (or V) run of one layer, padded
    int64_t element_run_bytes;  // its elements; the scales of quantised kinds follow
    int64_t section_bytes, page_bytes;
    uint64_t format;
    int64_t pages;
    uint8_t* memory;

    uint8_t* section(int64_t page, int layer) const { return memory + page * page_bytes + layer * section_bytes; }
    Seal* seal(int64_t page, int layer) const { return reinterpret_cast<Seal*>(section(page, layer)); }
    uint8_t* run(int64_t page, int layer, bool values) const { return section(page, layer) + sizeof(Seal) + (values ? run_bytes : 0); }
};

// One row: `count` new tokens at positions start, start + 1, ...
struct Row {
    const uint64_t* stamps;  // page, nonce, page, nonce, ...
    int64_t table_pages;
    uint64_t scope[2];
    int32_t first_token;  // index in the step's T tokens
    int32_t count;
    int32_t start;

    uint64_t page(int64_t ordinal) const { return stamps[2 * ordinal]; }
    uint64_t nonce(int64_t ordinal) const { return stamps[2 * ordinal + 1]; }
    Expected expected(const KVLayout& kv, int64_t ordinal, int layer) const {
        return {nonce(ordinal), {scope[0], scope[1]}, kv.format, static_cast<uint32_t>(ordinal), static_cast<uint16_t>(layer)};
    }
    bool has(const KVLayout& kv, int64_t ordinal) const {
        return ordinal < table_pages && page(ordinal) < static_cast<uint64_t>(kv.pages);
    }
};

// A break packed so that the smallest is the one with the lowest ordinal; UNBROKEN when all is well.
constexpr uint64_t UNBROKEN = ~0ULL;
static inline uint64_t break_key(int64_t ordinal, SealCheck check) { return static_cast<uint64_t>(ordinal) << 8 | check; }
static inline int64_t break_ordinal(uint64_t key) { return static_cast<int64_t>(key >> 8); }
static inline SealCheck break_check(uint64_t key) { return static_cast<SealCheck>(key & 255); }

constexpr int PARTITION_TOKENS = 128;  // attention is computed in partitions of positions, always these, and combined in order

}  // namespace kvseal
