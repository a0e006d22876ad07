// Which instruction set this process runs.
//
// Owns the choice and sizes that are the same for all sets.
#include "kernels.h"

#if defined(KVSEAL_HAS_NEON)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvseal {

namespace portable {
const Kernels& table();
}
#if defined(KVSEAL_HAS_X86)
namespace avx2 {
const Kernels& table();
}
namespace avxvnni {
const Kernels& table();
}
namespace avx512 {
const Kernels& table();
}
#elif defined(KVSEAL_HAS_NEON)
namespace neon {
const Kernels& table();
}
#endif

int available_kernels(const Kernels* (&best_first)[MOST_KERNEL_SETS]) {
    int found = 0;
#if defined(KVSEAL_HAS_X86)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    if (avx512) best_first[found++] = &avx512::table();
    if (avx2 && __builtin_cpu_supports("avxvnni")) best_first[found++] = &avxvnni::table();
    if (avx2) best_first[found++] = &avx2::table();
#elif defined(KVSEAL_HAS_NEON)
    if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) best_first[found++] = &neon::table();
#endif
    best_first[found++] = &portable::table();
    return found;
}

int attend_block_tokens(int group) { return group >= ATTEND_QUERIES ? 1 : ATTEND_QUERIES / group; }

int attend_side_by_side(int kv_heads, int group) {
    if (group > ATTEND_DIRECT) return 1;
    return kv_heads < ATTEND_QUERIES / group ? kv_heads : ATTEND_QUERIES / group;
}

int64_t attend_scratch_floats(const KVLayout& kv, int group) { return AttendScratch(kv, group).floats + 16; }

}  // namespace kvseal
