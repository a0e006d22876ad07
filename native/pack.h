// Weights from their stored form into the packings of the linear kernels.
//
// Owns the block layouts of the stored types (ggml-common.h of the ggml project, safetensors' plain types) and the interleaving by 8 rows.
// 4- and 8-bit forms keep the stored numbers exactly where the groups agree: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Q4_K and Q5_K keep their quants;
// their scale and minimum of each 32-group are rounded to fp16 (relative error <= 2^-11). Everything else that asks for groups is
// requantised: 8 bits by scale = largest magnitude / 127, 4 bits by the scale and minimum that keep the squared error small.
#pragma once
#include <cstdint>
#include <string>

#include "kernels.h"

namespace kvseal {

// Raised with every change of what stands where in packed memory, or of the numbers that packing makes: packed weights are kept on disk.
constexpr int PACK_LAYOUT = 3;

enum SourceType : int32_t { SRC_F32, SRC_F16, SRC_BF16, SRC_Q8_0, SRC_Q4_0, SRC_Q4_1, SRC_Q5_0, SRC_Q5_1, SRC_Q4_K, SRC_Q5_K, SRC_Q6_K };

// Throws std::invalid_argument for an unknown name.
SourceType source_type(const std::string& name);
PackFormat pack_format(const std::string& name);
const char* pack_name(PackFormat format);

// Stored bytes of one row; throws std::invalid_argument when the columns are no whole blocks.
int64_t source_row_bytes(SourceType type, int64_t columns);
int64_t packed_bytes(PackFormat format, int64_t rows, int64_t columns);

// One stored row as floats, exactly.
void dequantise_row(SourceType type, const uint8_t* row, int64_t columns, float* out);

// A matrix of this format whose parts lie in `memory` of packed_bytes, 64-byte aligned: elements, then scales, then minimums.
Linear place(PackFormat format, int64_t rows, int64_t columns, const uint8_t* memory);

// Packs stored rows (row_order may be null) into w's memory, which is writable and zero. `importance` (columns, or null): how much an error
// in a column counts where four bits are fitted. False when a value, or a scale or minimum that it gives, is not finite.
bool pack(SourceType type, const uint8_t* raw, const int32_t* row_order, const float* importance, const Linear& w);

}  // namespace kvseal
