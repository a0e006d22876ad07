// Compiled once per instruction set, with KVSEAL_ISA naming the namespace (see CMakeLists.txt).
//
// Owns the table of that set. Includes no standard template: an inline function compiled here with newer instructions must never be the
// copy that the linker keeps for machines without them.
#include "kernels.h"

#include "kernels/attend.h"
#include "kernels/linear.h"
#include "kernels/pointwise.h"

#define KVSEAL_STRING(x) #x
#define KVSEAL_NAME(x) KVSEAL_STRING(x)

namespace kvseal {
namespace KVSEAL_ISA {

const Kernels& table() {
    static const Kernels kernels = {KVSEAL_NAME(KVSEAL_ISA), linear, quantise,         rms_norm,      rope,           silu_multiply,
                                    store_kv,                attend, attend_partition, attend_shared, attend_combine, exponential};
    return kernels;
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
