// Which instruction set this process runs.
//
// Owns the choice and sizes that are the same for all sets.
#include "kernels.h"

namespace kvseal {

namespace portable {
const Kernels& table();
}
#if defined(KVSEAL_HAS_AVX2)
namespace avx2 {
const Kernels& table();
}
#endif

const Kernels& portable_kernels() { return portable::table(); }

const Kernels* avx2_kernels() {
#if defined(KVSEAL_HAS_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return &avx2::table();
#endif
    return nullptr;
}

int attend_block_tokens(int group) { return group >= ATTEND_QUERIES ? 1 : ATTEND_QUERIES / group; }

int64_t attend_scratch_floats(const KVLayout& kv, int group) {
    const int64_t queries = group > ATTEND_QUERIES ? group : ATTEND_QUERIES;
    const int64_t partial = kv.head_dim + 8;
    return queries * kv.head_dim + queries * PARTITION_TOKENS + static_cast<int64_t>(kv.page_tokens) * kv.head_dim + 2 * queries * partial;
}

}  // namespace kvseal
