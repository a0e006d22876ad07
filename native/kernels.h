// The table of kernels of one instruction set.
//
// Owns the signatures between the step (decoder.cpp), the bindings and the kernels. Each instruction set compiles kernels.cpp once, with
// its own flags and in its own namespace, and offers one table; which one runs is chosen at run time.
// L13: every kernel computes an output element from its own row alone, in an order that depends on nothing but the element's own sizes.
#pragma once
#include <cstdint>

#include "layout.h"

namespace kvseal {

// How a linear layer's weights are packed. Rows are interleaved by 8: lane = output row.
enum PackFormat : int32_t {
    PACK_FP32 = 0,  // [row block][column][8] float
    PACK_BF16,      // [row block][column][8] upper half of a float
    PACK_Q8,        // groups of 32: w = scale * q, q signed
    PACK_Q8M,       // w = scale * q + minimum
    PACK_Q4,        // w = scale * (q - 8), q 0..15
    PACK_Q4M,       // w = scale * q + minimum
};
constexpr int ROW_BLOCK = 8;
constexpr int GROUP = 32;

struct Linear {
    PackFormat format = PACK_FP32;
    int32_t rows = 0, columns = 0;
    int32_t row_blocks = 0, groups = 0;
    const uint8_t* weights = nullptr;  // elements, row block after row block
    const uint16_t* scales = nullptr;  // fp16 [row block][group][8]
    const uint16_t* minimums = nullptr;

    bool quantised() const { return format >= PACK_Q8; }
    int64_t element_bytes() const {
        const int64_t padded = quantised() ? static_cast<int64_t>(groups) * GROUP : columns;
        const int64_t bits = format == PACK_FP32 ? 32 : format == PACK_BF16 ? 16 : format == PACK_Q8 || format == PACK_Q8M ? 8 : 4;
        return row_blocks * ROW_BLOCK * padded * bits / 8;
    }
};

// Inputs of a linear layer, T tokens: floats, and for quantised weights 8-bit groups of 32. One outlier in a group would cost the other 31
// their precision, so it stands apart as a float; 0 where a group has none. Tokens are interleaved by 8, so that a tile reads in one stream.
constexpr int TOKEN_BLOCK = 8;

// A column in which inputs of a token block stand apart. Each block lists its own, group after group: a tile walks the list and unpacks the
// column's weights once for all 8 tokens, since outliers of one layer like the same columns.
struct OutlierColumn {
    float values[TOKEN_BLOCK];  // 0 for a token whose input there is no outlier
    uint16_t group;
    uint8_t column, tokens;  // within the group; bit t: token t of the block has one here
};
struct Inputs {
    const float* values;             // [T][value_stride]
    const int8_t* quants;            // [token block][group][8][32]
    const float* scales;             // [token block][group][8], as all that follow
    const int32_t* quant_sums;
    const float* scaled_sums;        // the sum of the group as rounded, outlier included
    const OutlierColumn* outliers;   // [token block][groups * 8], of which
    const int32_t* outlier_counts;   // [token block] count
    int64_t value_stride;
};

// Where the groups of one token go: from group to group, quants move by 8 * 32, the others by 8.
struct Groups {
    int8_t* quants;
    float* scales;
    int32_t* quant_sums;
    float* scaled_sums;
    float* outliers;
    uint8_t* outlier_columns;  // within the group
};

// out[t][row] = y + bias, or += multiplier * (y + bias).
struct Outputs {
    float* out;  // element (token, row)
    int64_t stride;
    const float* bias;  // of row 0
    float multiplier;
    bool add;
    int32_t token = 0, row = 0;
};

// One unit of attention: `tokens` consecutive queries of one row against `heads` KV heads, whose vectors lie side by side in a page: a page
// is then read in one go. Numbers of queries are in the order [head][token][query head of the group].
struct AttendWork {
    const KVLayout* kv;
    const Row* row;
    int32_t layer, kv_head, group;  // group = query heads per KV head
    int32_t first_position, tokens;
    int32_t window;
    float scale;
    const float* q;  // query of the first token, first head of the group; heads contiguous
    int64_t q_stride;
    float* scratch;  // attend_scratch_floats
    const int32_t* places = nullptr;  // of queries that do not follow each other: token t's lies at q + places[t] * q_stride
    const float* before = nullptr;    // of one token: partials [partition][group] of the first partitions, computed elsewhere,
    int32_t before_partitions = 0;    // so many (of several heads: one after the other)
    int32_t heads = 1;                // from kv_head on

    int queries_per_head() const { return tokens * group; }
    int queries() const { return heads * tokens * group; }
    int token_of(int query) const { return query / group % tokens; }
};
constexpr int ATTEND_DIRECT = 8;    // up to so many queries of a head, a widened copy of a page does not pay
constexpr int ATTEND_QUERIES = 48;  // queries of one unit, at most (a unit of one token and one KV head may have more)

struct Kernels {
    const char* name;
    void (*linear)(const Linear&, const Inputs&, int token_begin, int token_end, int block_begin, int block_end, const Outputs&);
    // 32-groups of x[n]; the last group is padded with zeros.
    void (*quantise)(const float* x, int n, const Groups& to);
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
    // Rotates `heads` vectors in place; cos and sin have rotary_dims / 2 entries.
    void (*rope)(float* x, int heads, int head_dim, int half, const float* cosines, const float* sines);
    void (*silu_multiply)(const float* gate, const float* up, int n, float* out);
    // Writes one token's K and V, all heads, into slot `slot` of a page's layer.
    void (*store_kv)(const KVLayout&, int64_t page, int layer, int slot, const float* k, const float* v);
    // Checks every page that the unit reads, then computes; out[token][head of group][dim]. Returns UNBROKEN or the lowest break.
    uint64_t (*attend)(const AttendWork&, float* out, int64_t out_stride);
    // The same for one partition only: partial[query] = maximum, sum, head_dim accumulators.
    uint64_t (*attend_partition)(const AttendWork&, int partition, float* partial);
    // For queries of several rows that share the partition's pages and see all of it: token t's partials go to out[t], [group].
    uint64_t (*attend_shared)(const AttendWork&, int partition, float* const* out);
    // Combines partials [partitions][group] of one token in order; writes out[head of group][dim].
    void (*attend_combine)(const float* partials, int partitions, int group, KVKind kind, int head_dim, float* out);
    void (*exponential)(const float* x, int n, float* out);
};

// Where a unit keeps its numbers, in floats from a 64-byte boundary on: one table for those who reserve the memory and those who use it.
struct AttendScratch {
    static constexpr int SCORE_STRIDE = PARTITION_TOKENS + 16;  // a power of two would put all queries' scores into the same few cache sets
    static constexpr int HEADER = 8;                            // in front of a partial's accumulators: maximum, sum, padding
    static constexpr int BLOCK_FLOATS = 4096;                   // of a widened block, unless one page is more: half of a first-level cache

    AttendScratch(const KVLayout& kv, int group) {
        const int64_t most = group > ATTEND_QUERIES ? group : ATTEND_QUERIES, dims = kv.head_dim, page = kv.page_tokens * dims;
        block_pages = page >= BLOCK_FLOATS ? 1 : static_cast<int>(BLOCK_FLOATS / page);
        queries = take(most * dims);
        query_sums = take(most);
        scores = take(most * SCORE_STRIDE);
        block = take(block_pages * page);
        partial = take(most * (dims + HEADER));
        total = take(most * (dims + HEADER));
        scales = take(4 * PARTITION_TOKENS * (most / group));
    }
    int64_t queries, query_sums, scores, block, partial, total, scales, floats = 0;
    int block_pages;

  private:
    int64_t take(int64_t count) {
        const int64_t at = floats;
        floats += (count + 15) / 16 * 16;
        return at;
    }
};
int64_t attend_scratch_floats(const KVLayout& kv, int group);  // with room for the boundary
int attend_block_tokens(int group);
int attend_side_by_side(int kv_heads, int group);  // KV heads of a unit of one token

// The sets that are compiled in and that this CPU runs, the fastest first, "portable" last. Returns their number.
constexpr int MOST_KERNEL_SETS = 4;
int available_kernels(const Kernels* (&best_first)[MOST_KERNEL_SETS]);

}  // namespace kvseal
