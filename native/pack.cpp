#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace kvseal {
namespace {

float half_to_float(uint16_t h) {
    const int exponent = (h >> 10) & 31, mantissa = h & 1023;
    float value;
    if (exponent == 31)
        value = mantissa == 0 ? INFINITY : NAN;
    else
        value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24) : std::ldexp(static_cast<float>(mantissa | 1024), exponent - 25);
    return (h & 0x8000) != 0 ? -value : value;
}

// half_to_float for every pattern: packing reads millions of them.
const float* half_table() {
    static const std::vector<float> table = [] {
        std::vector<float> t(65536);
        for (int i = 0; i < 65536; ++i) t[static_cast<size_t>(i)] = half_to_float(static_cast<uint16_t>(i));
        return t;
    }();
    return table.data();
}

uint16_t float_to_half(float value) {  // nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);
    if (bits >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
    if (bits < 0x38800000) {
        float small;
        std::memcpy(&small, &bits, 4);
        small += 0.5f;
        std::memcpy(&bits, &small, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3F000000));
    }
    bits += 0xC8000FFF + ((bits >> 13) & 1);
    return static_cast<uint16_t>(sign | (bits >> 13));
}

uint16_t load16(const uint8_t* p) {
    uint16_t v;
    std::memcpy(&v, p, 2);
    return v;
}

struct BlockShape {
    int elements, bytes;
};
BlockShape shape_of(SourceType type) {
    switch (type) {
        case SRC_F32: return {1, 4};
        case SRC_F16:
        case SRC_BF16: return {1, 2};
        case SRC_Q8_0: return {32, 34};
        case SRC_Q4_0: return {32, 18};
        case SRC_Q4_1: return {32, 20};
        case SRC_Q5_0: return {32, 22};
        case SRC_Q5_1: return {32, 24};
        case SRC_Q4_K: return {256, 144};
        case SRC_Q5_K: return {256, 176};
        case SRC_Q6_K: return {256, 210};
    }
    throw std::invalid_argument("unknown tensor type");
}

// One stored group of 32 as it stands: w = scale * q + minimum (the two as the stored type computes them).
struct StoredGroup {
    uint8_t q[GROUP];  // 0..15 or 0..31; Q8_0: the signed byte
    float scale, minimum;
    uint16_t scale_half, minimum_half;
};

void k_scale(const uint8_t* packed, int j, int& scale, int& minimum) {
    if (j < 4) {
        scale = packed[j] & 63;
        minimum = packed[j + 4] & 63;
    } else {
        scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
        minimum = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
    }
}

void read_k_group(SourceType type, const uint8_t* row, int64_t g, StoredGroup& out) {
    const bool five = type == SRC_Q5_K;
    const uint8_t* block = row + (g / 8) * (five ? 176 : 144);
    const int j = static_cast<int>(g % 8);
    int scale, minimum;
    k_scale(block + 4, j, scale, minimum);
    out.scale = half_table()[load16(block)] * static_cast<float>(scale);
    out.minimum = -(half_table()[load16(block + 2)] * static_cast<float>(minimum));
    const uint8_t* quants = block + (five ? 48 : 16) + (j / 2) * 32;
    const int shift = (j & 1) * 4;
    for (int i = 0; i < GROUP; ++i) {
        out.q[i] = static_cast<uint8_t>((quants[i] >> shift) & 15);
        if (five) out.q[i] = static_cast<uint8_t>(out.q[i] | (((block[16 + i] >> j) & 1) << 4));
    }
    out.scale_half = float_to_half(out.scale);
    out.minimum_half = float_to_half(out.minimum);
}

void read_group(SourceType type, const uint8_t* row, int64_t g, StoredGroup& out) {
    if (type == SRC_Q4_K || type == SRC_Q5_K) return read_k_group(type, row, g, out);
    const uint8_t* block = row + g * shape_of(type).bytes;
    out.scale_half = load16(block);
    out.scale = half_table()[out.scale_half];
    out.minimum = 0.0f;
    out.minimum_half = 0;
    if (type == SRC_Q8_0) {
        std::memcpy(out.q, block + 2, GROUP);
        return;
    }
    const uint8_t* at = block + 2;
    const bool has_minimum = type == SRC_Q4_1 || type == SRC_Q5_1;
    if (has_minimum) {
        out.minimum_half = load16(at);
        out.minimum = half_table()[out.minimum_half];
        at += 2;
    }
    uint32_t high = 0;
    const bool five = type == SRC_Q5_0 || type == SRC_Q5_1;
    if (five) {
        std::memcpy(&high, at, 4);
        at += 4;
    }
    for (int i = 0; i < 16; ++i) {
        out.q[i] = static_cast<uint8_t>((at[i] & 15) | ((high >> i) & 1) << 4);
        out.q[16 + i] = static_cast<uint8_t>((at[i] >> 4) | ((high >> (16 + i)) & 1) << 4);
    }
}

void dequantise_q6_k(const uint8_t* block, float* out) {
    const float d = half_table()[load16(block + 208)];
    for (int i = 0; i < 256; ++i) {
        const int half = i / 128, quarter = (i % 128) / 32, at = i % 32;
        const uint8_t low = block[half * 64 + (quarter & 1) * 32 + at];
        const int nibble = quarter < 2 ? low & 15 : low >> 4;
        const int high = (block[128 + half * 32 + at] >> (2 * quarter)) & 3;
        const float scale = d * static_cast<float>(static_cast<int8_t>(block[192 + i / 16]));
        out[i] = scale * static_cast<float>((nibble | high << 4) - 32);
    }
}

// Can the stored groups be used as they are?
bool direct(SourceType type, PackFormat format) {
    switch (type) {
        case SRC_Q4_0: return format == PACK_Q4 || format == PACK_Q8;
        case SRC_Q4_1:
        case SRC_Q4_K: return format == PACK_Q4M || format == PACK_Q8M;
        case SRC_Q8_0:
        case SRC_Q5_0: return format == PACK_Q8;
        case SRC_Q5_1:
        case SRC_Q5_K: return format == PACK_Q8M;
        default: return false;
    }
}

float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23: exact for |x| < 2^22, ties to even

float rounded_half(float x) { return half_table()[float_to_half(x)]; }

// How far scale * q + minimum stays from x with the best q of 0..15, squared, weighted and summed; the sums that a better scale and minimum need.
struct Fit {
    float scale, minimum, error, sum_q, sum_qq, sum_xq;

    void of(const float* x, const float* weight, int count) {
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        error = sum_q = sum_qq = sum_xq = 0.0f;
        for (int i = 0; i < count; ++i) {
            float q = nearest((x[i] - minimum) * inverse);
            q = q < 0.0f ? 0.0f : (q > 15.0f ? 15.0f : q);
            const float off = x[i] - (scale * q + minimum);
            error += weight[i] * off * off;
            sum_q += weight[i] * q;
            sum_qq += weight[i] * q * q;
            sum_xq += weight[i] * x[i] * q;
        }
    }
    // Least squares for the q that `of` found; false when they do not determine a line.
    bool better(float sum_x, float n) {
        const float determinant = n * sum_qq - sum_q * sum_q;
        if (!(determinant > 0.0f)) return false;
        const float slope = (n * sum_xq - sum_x * sum_q) / determinant;
        if (!(slope > 0.0f)) return false;
        scale = rounded_half(slope);
        minimum = rounded_half((sum_x - slope * sum_q) / n);
        return true;
    }
};

// The scale and minimum with the smallest squared error that a few starts and rounds of least squares find. A range that leaves the ends
// out is often better than one that reaches from the lowest to the highest: all others come closer.
void fit_four(const float* x, const float* weight, int count, float low, float high, StoredGroup& out) {
    constexpr float REACH[] = {15.0f, 15.8f, 16.6f, 17.6f, 14.4f};
    constexpr int ROUNDS = 3;
    float sum_x = 0.0f, sum = 0.0f;
    for (int i = 0; i < count; ++i) {
        sum_x += weight[i] * x[i];
        sum += weight[i];
    }
    Fit best{};
    best.error = INFINITY;
    for (const float reach : REACH) {
        Fit fit{};
        const float width = (high - low) * (15.0f / reach), middle = 0.5f * (low + high);
        fit.minimum = rounded_half(middle - 0.5f * width);
        fit.scale = rounded_half(width / 15.0f);
        for (int round = 0; round <= ROUNDS; ++round) {
            fit.of(x, weight, count);
            if (fit.error < best.error) best = fit;
            if (round == ROUNDS || !fit.better(sum_x, sum)) break;
        }
    }
    const bool found = best.error < INFINITY;  // else something is not finite, and stays so
    out.scale_half = float_to_half(found ? best.scale : (high - low) / 15.0f);
    out.minimum_half = float_to_half(found ? best.minimum : low);
}

// Floats (32, zero-padded, `count` of them real) into a group of the packing; `weight`: how much each column's error counts.
void requantise(const float* x, const float* weight, int count, PackFormat format, StoredGroup& out) {
    float low = x[0], high = x[0];
    for (int i = 1; i < count; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const bool four = format == PACK_Q4M;
    if (format == PACK_Q8) {
        const float top = std::max(std::fabs(low), std::fabs(high));
        out.scale_half = float_to_half(top / 127.0f);
        out.minimum_half = 0;
    } else if (four) {
        fit_four(x, weight, count, low, high, out);
    } else {
        out.minimum_half = float_to_half(low);
        out.scale_half = float_to_half((high - half_table()[out.minimum_half]) / 127.0f);
    }
    const float scale = half_table()[out.scale_half], minimum = half_table()[out.minimum_half];
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const float least = format == PACK_Q8 ? -127.0f : 0.0f, most = four ? 15.0f : 127.0f;
    for (int i = 0; i < GROUP; ++i) {
        float q = std::nearbyint((x[i] - minimum) * inverse);
        q = q < least ? least : (q > most ? most : q);
        out.q[i] = static_cast<uint8_t>(static_cast<int8_t>(q));
    }
}

void put_group(const StoredGroup& group, bool four, int lane, uint8_t* block) {
    if (four) {
        for (int i = 0; i < 4; ++i)
            for (int b = 0; b < 4; ++b)
                block[i * 32 + lane * 4 + b] = static_cast<uint8_t>(group.q[4 * i + b] | group.q[16 + 4 * i + b] << 4);
    } else {
        for (int i = 0; i < 8; ++i) std::memcpy(block + i * 32 + lane * 4, group.q + 4 * i, 4);
    }
}

struct Packer {
    SourceType type;
    const uint8_t* raw;
    int64_t row_bytes;
    const int32_t* row_order;
    const float* importance;
    Linear w;
    uint32_t seen_exponent = 0;  // The largest of all floats that were read, in place; all ones: one of them is not finite.
    uint16_t seen_half = 0;      // Of scales and minimums.

    bool finite() const { return seen_exponent != 0x7F800000 && seen_half != 0x7C00; }

    void see(const float* values, int64_t count) {
        uint32_t most = 0;
        for (int64_t i = 0; i < count; ++i) {
            uint32_t bits;
            std::memcpy(&bits, values + i, 4);
            most = std::max(most, bits & 0x7F800000);
        }
        seen_exponent = std::max(seen_exponent, most);
    }

    void see(const StoredGroup& group) {
        seen_half = std::max({seen_half, static_cast<uint16_t>(group.scale_half & 0x7C00), static_cast<uint16_t>(group.minimum_half & 0x7C00)});
    }

    const uint8_t* row(int64_t i) const { return raw + (row_order != nullptr ? row_order[i] : i) * row_bytes; }

    void groups() {
        const bool four = w.format == PACK_Q4 || w.format == PACK_Q4M, as_stored = direct(type, w.format);
        const int64_t block_bytes = four ? ROW_BLOCK * GROUP / 2 : ROW_BLOCK * GROUP;
        uint8_t* weights = const_cast<uint8_t*>(w.weights);
        uint16_t* scales = const_cast<uint16_t*>(w.scales);
        uint16_t* minimums = const_cast<uint16_t*>(w.minimums);
        std::vector<float> floats(static_cast<size_t>(w.groups) * GROUP, 0.0f);
        std::vector<float> counts(floats.size(), 1.0f);
        if (importance != nullptr) std::copy(importance, importance + w.columns, counts.begin());
        StoredGroup group{};
        for (int64_t r = 0; r < w.rows; ++r) {
            if (!as_stored) {
                dequantise_row(type, row(r), w.columns, floats.data());
                see(floats.data(), w.columns);
            }
            for (int64_t g = 0; g < w.groups; ++g) {
                if (as_stored)
                    read_group(type, row(r), g, group);
                else
                    requantise(floats.data() + g * GROUP, counts.data() + g * GROUP, static_cast<int>(std::min<int64_t>(GROUP, w.columns - g * GROUP)), w.format, group);
                if (as_stored && w.format == PACK_Q8 && type != SRC_Q8_0)  // These two count from the middle.
                    for (uint8_t& q : group.q) q = static_cast<uint8_t>(q - (type == SRC_Q5_0 ? 16 : 8));
                see(group);
                const int64_t at = (r / ROW_BLOCK) * w.groups + g;
                put_group(group, four, static_cast<int>(r % ROW_BLOCK), weights + at * block_bytes);
                scales[at * ROW_BLOCK + r % ROW_BLOCK] = group.scale_half;
                if (minimums != nullptr) minimums[at * ROW_BLOCK + r % ROW_BLOCK] = group.minimum_half;
            }
        }
    }

    void floats() {
        std::vector<float> row_values(static_cast<size_t>(w.columns));
        float* full = reinterpret_cast<float*>(const_cast<uint8_t*>(w.weights));
        uint16_t* half = reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(w.weights));
        for (int64_t r = 0; r < w.rows; ++r) {
            dequantise_row(type, row(r), w.columns, row_values.data());
            see(row_values.data(), w.columns);
            const int64_t base = (r / ROW_BLOCK) * w.columns * ROW_BLOCK + r % ROW_BLOCK;
            for (int64_t c = 0; c < w.columns; ++c) {
                if (w.format == PACK_FP32) {
                    full[base + c * ROW_BLOCK] = row_values[static_cast<size_t>(c)];
                    continue;
                }
                uint32_t bits;
                std::memcpy(&bits, &row_values[static_cast<size_t>(c)], 4);
                if ((bits & 0x7FFFFFFF) <= 0x7F800000) bits += 0x7FFF + ((bits >> 16) & 1);
                half[base + c * ROW_BLOCK] = static_cast<uint16_t>(bits >> 16);
            }
        }
    }
};

}  // namespace

SourceType source_type(const std::string& name) {
    static const char* const names[] = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"};
    for (int i = 0; i < 11; ++i)
        if (name == names[i]) return static_cast<SourceType>(i);
    throw std::invalid_argument("unknown tensor type " + name);
}

static const char* const PACK_NAMES[] = {"fp32", "bf16", "q8", "q8m", "q4", "q4m"};

PackFormat pack_format(const std::string& name) {
    for (int i = 0; i < 6; ++i)
        if (name == PACK_NAMES[i]) return static_cast<PackFormat>(i);
    throw std::invalid_argument("unknown packing " + name);
}

const char* pack_name(PackFormat format) { return PACK_NAMES[format]; }

int64_t source_row_bytes(SourceType type, int64_t columns) {
    const BlockShape shape = shape_of(type);
    if (columns % shape.elements != 0) throw std::invalid_argument("columns are not whole blocks of " + std::to_string(shape.elements));
    return columns / shape.elements * shape.bytes;
}

int64_t packed_bytes(PackFormat format, int64_t rows, int64_t columns) {
    const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, groups = (columns + GROUP - 1) / GROUP;
    int64_t bytes;
    switch (format) {
        case PACK_FP32: bytes = blocks * ROW_BLOCK * columns * 4; break;
        case PACK_BF16: bytes = blocks * ROW_BLOCK * columns * 2; break;
        default: {
            const bool four = format == PACK_Q4 || format == PACK_Q4M, minimum = format == PACK_Q8M || format == PACK_Q4M;
            bytes = blocks * groups * ROW_BLOCK * ((four ? GROUP / 2 : GROUP) + (minimum ? 4 : 2));
        }
    }
    return (bytes + 63) / 64 * 64;
}

void dequantise_row(SourceType type, const uint8_t* row, int64_t columns, float* out) {
    switch (type) {
        case SRC_F32: std::memcpy(out, row, static_cast<size_t>(columns) * 4); return;
        case SRC_F16:
            for (int64_t i = 0; i < columns; ++i) out[i] = half_table()[load16(row + 2 * i)];
            return;
        case SRC_BF16:
            for (int64_t i = 0; i < columns; ++i) {
                const uint32_t bits = static_cast<uint32_t>(load16(row + 2 * i)) << 16;
                std::memcpy(out + i, &bits, 4);
            }
            return;
        case SRC_Q6_K:
            for (int64_t i = 0; i < columns; i += 256) dequantise_q6_k(row + i / 256 * 210, out + i);
            return;
        default: break;
    }
    const int offset = type == SRC_Q4_0 ? 8 : (type == SRC_Q5_0 ? 16 : 0);
    StoredGroup group{};
    for (int64_t g = 0; g < columns / GROUP; ++g) {
        read_group(type, row, g, group);
        for (int i = 0; i < GROUP; ++i) {
            const int q = type == SRC_Q8_0 ? static_cast<int8_t>(group.q[i]) : static_cast<int>(group.q[i]) - offset;
            out[g * GROUP + i] = group.scale * static_cast<float>(q) + group.minimum;
        }
    }
}

Linear place(PackFormat format, int64_t rows, int64_t columns, const uint8_t* memory) {
    Linear w;
    w.format = format;
    w.rows = static_cast<int32_t>(rows);
    w.columns = static_cast<int32_t>(columns);
    w.row_blocks = static_cast<int32_t>((rows + ROW_BLOCK - 1) / ROW_BLOCK);
    w.groups = static_cast<int32_t>((columns + GROUP - 1) / GROUP);
    w.weights = memory;
    if (w.quantised()) {
        const bool four = format == PACK_Q4 || format == PACK_Q4M;
        const int64_t cells = static_cast<int64_t>(w.row_blocks) * w.groups * ROW_BLOCK;
        w.scales = reinterpret_cast<const uint16_t*>(memory + cells * (four ? GROUP / 2 : GROUP));
        if (format == PACK_Q8M || format == PACK_Q4M) w.minimums = w.scales + cells;
    }
    return w;
}

bool pack(SourceType type, const uint8_t* raw, const int32_t* row_order, const float* importance, const Linear& w) {
    if (w.format == PACK_Q4 && !direct(type, w.format)) throw std::invalid_argument("q4 without minimums holds Q4_0 only; use q4m");
    Packer packer{type, raw, source_row_bytes(type, w.columns), row_order, importance, w};
    if (w.quantised())
        packer.groups();
    else
        packer.floats();
    return packer.finite();
}

}  // namespace kvseal
