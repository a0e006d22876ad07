// Linear layers: tiles of row blocks by tokens over every weight format, and what happens to the result.
//
// Owns the tiling and the float kernels. A tile's shape changes speed, never bits (L13): float formats accumulate column after column,
// one fused multiply-add each.
#pragma once
#include "linear_quant.h"

namespace kvseal {
namespace KVSEAL_ISA {

template <PackFormat FORMAT, int R, int T>
static inline void float_tile(const Linear& w, const Inputs& in, int token, int block, bool cold, f8 (&acc)[T][R]) {
    constexpr int ELEMENT = FORMAT == PACK_FP32 ? 4 : 2;
    const int64_t stride = static_cast<int64_t>(w.columns) * ROW_BLOCK;
    const float* x = in.values + token * in.value_stride;
    const float* full = reinterpret_cast<const float*>(w.weights) + block * stride;
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w.weights) + block * stride;
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) acc[t][r] = splat(0.0f);
    for (int c = 0; c < w.columns; ++c)
        for (int r = 0; r < R; ++r) {
            if (cold && (FORMAT == PACK_FP32 || c % 2 == 0))
                __builtin_prefetch(w.weights + (block + r) * stride * ELEMENT + c * ROW_BLOCK * ELEMENT + AHEAD_BYTES);
            const f8 row = FORMAT == PACK_FP32 ? load8(full + r * stride + c * ROW_BLOCK) : load_bf16_8(half + r * stride + c * ROW_BLOCK);
            for (int t = 0; t < T; ++t) acc[t][r] = fma8(row, splat(x[t * in.value_stride + c]), acc[t][r]);
        }
}

static inline void put(const Outputs& to, int token, int row, int rows, f8 y) {
    float* out = to.out + (token - to.token) * to.stride + (row - to.row);
    if (row + ROW_BLOCK <= rows) {
        if (to.bias != nullptr) y = y + load8(to.bias + row);
        store8(out, to.add ? fma8(y, splat(to.multiplier), load8(out)) : y);
        return;
    }
    float lane[ROW_BLOCK], old[ROW_BLOCK] = {};
    const int left = rows - row;
    for (int i = 0; i < ROW_BLOCK; ++i) lane[i] = to.bias != nullptr && i < left ? to.bias[row + i] : 0.0f;
    if (to.bias != nullptr) y = y + load8(lane);
    for (int i = 0; to.add && i < left; ++i) old[i] = out[i];
    store8(lane, to.add ? fma8(y, splat(to.multiplier), load8(old)) : y);
    for (int i = 0; i < left; ++i) out[i] = lane[i];
}

template <PackFormat FORMAT, int R, int T>
static inline void tile(const Linear& w, const Inputs& in, int token, int block, bool cold, const Outputs& to) {
    f8 acc[T][R];
    if constexpr (FORMAT >= PACK_Q8)
        quant_tile<FORMAT, R, T>(w, in, token, block, cold, acc);
    else
        float_tile<FORMAT, R, T>(w, in, token, block, cold, acc);
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) put(to, token + t, (block + r) * ROW_BLOCK, w.rows, acc[t][r]);
}

// All row blocks for T tokens, R at a time.
template <PackFormat FORMAT, int R, int T>
static inline void strip(const Linear& w, const Inputs& in, int token, int begin, int end, bool cold, const Outputs& to) {
    int block = begin;
    for (; block + R <= end; block += R) tile<FORMAT, R, T>(w, in, token, block, cold, to);
    if constexpr (R > 1)
        for (; block < end; ++block) tile<FORMAT, 1, T>(w, in, token, block, cold, to);
}

// Row blocks that stay in the first-level cache while all tokens pass by.
constexpr int CACHED_BLOCKS = 4;

// Tiles: as many tokens as the registers hold share the unpacking of a row block. One row block at a time, so that memory is read in one
// stream: for a single token two of them cost a third of the bandwidth (measured). token_begin is the first of a token block.
template <PackFormat FORMAT>
static void linear_of(const Linear& w, const Inputs& in, int token_begin, int token_end, int begin, int end, const Outputs& to) {
    int t = token_begin;
    const auto cold = [&] { return t == token_begin; };
    if constexpr (FORMAT >= PACK_Q8) {
#if defined(__AVX512VL__)
        constexpr int ROWS = 2;  // twice the registers
#else
        constexpr int ROWS = 1;
#endif
        for (; t + 8 <= token_end; t += 8) strip<FORMAT, ROWS, 8>(w, in, t, begin, end, cold(), to);
        if (t + 4 <= token_end) strip<FORMAT, 1, 4>(w, in, t, begin, end, cold(), to), t += 4;
        if (t + 2 <= token_end) strip<FORMAT, 1, 2>(w, in, t, begin, end, cold(), to), t += 2;
        if (t < token_end) strip<FORMAT, 1, 1>(w, in, t, begin, end, cold(), to);
    } else {
        for (; t + 4 <= token_end; t += 4) strip<FORMAT, 2, 4>(w, in, t, begin, end, cold(), to);
        if (t + 2 <= token_end) strip<FORMAT, 2, 2>(w, in, t, begin, end, cold(), to), t += 2;
        if (t < token_end) strip<FORMAT, 2, 1>(w, in, t, begin, end, cold(), to);
    }
}

template <PackFormat FORMAT>
static void linear_blocks(const Linear& w, const Inputs& in, int token_begin, int token_end, int begin, int end, const Outputs& to) {
    for (int block = begin; block < end; block += CACHED_BLOCKS)
        linear_of<FORMAT>(w, in, token_begin, token_end, block, block + CACHED_BLOCKS < end ? block + CACHED_BLOCKS : end, to);
}

static void linear(const Linear& w, const Inputs& in, int token_begin, int token_end, int begin, int end, const Outputs& to) {
    switch (w.format) {
        case PACK_FP32: return linear_blocks<PACK_FP32>(w, in, token_begin, token_end, begin, end, to);
        case PACK_BF16: return linear_blocks<PACK_BF16>(w, in, token_begin, token_end, begin, end, to);
        case PACK_Q8: return linear_blocks<PACK_Q8>(w, in, token_begin, token_end, begin, end, to);
        case PACK_Q8M: return linear_blocks<PACK_Q8M>(w, in, token_begin, token_end, begin, end, to);
        case PACK_Q4: return linear_blocks<PACK_Q4>(w, in, token_begin, token_end, begin, end, to);
        case PACK_Q4M: return linear_blocks<PACK_Q4M>(w, in, token_begin, token_end, begin, end, to);
    }
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
