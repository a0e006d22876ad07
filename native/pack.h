// Weights from their stored form into the packings of the linear kernels.
//
// Owns the block layouts of the stored types (ggml-common.h of the ggml project, safetensors' plain types) and the interleaving by 8 rows.
// 4- and 8-bit forms keep the stored numbers exactly where the groups agree: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Q4_K and Q5_K keep their quants;
// their scale and minimum of each 32-group are rounded to fp16 (relative error <= 2^-11). Everything else that asks for groups is
// requantised: 8 bits by scale = largest magnitude / 127, 4 bits by scale and minimum over 15 steps.
#pragma once
#include <cstdint>
#include <string>

#include "kernels.h"

namespace kvseal {

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

// Packs rows (row_order may be null) into `memory` of packed_bytes, 64-byte aligned.
Linear pack(SourceType type, const uint8_t* raw, int64_t rows, int64_t columns, const int32_t* row_order, PackFormat format, uint8_t* memory);

}  // namespace kvseal
