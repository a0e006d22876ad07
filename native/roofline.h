// What this machine can do at most: the yardsticks that the benchmarks hold kernels against, measured in the same run.
//
// Owns two loops. `fma_rate`: single-precision fused multiply-adds of one core, in as wide registers as it has, nothing read. `ReadProbe`:
// memory read front to back by some threads at once. Computes nothing that anybody needs and is called by benchmarks alone.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "memory.h"

namespace kvseal {
namespace roofline {

inline double seconds_since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

constexpr int CHAINS = 12;  // independent sums: latency times ports is 8 to 10 on current cores
constexpr int64_t ROUNDS = 20000;

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) inline float fma_rounds_256() {
    __m256 sums[CHAINS];
    for (auto& sum : sums) sum = _mm256_setzero_ps();
    const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
    for (int64_t i = 0; i < ROUNDS; ++i)
        for (int c = 0; c < CHAINS; ++c) sums[c] = _mm256_fmadd_ps(sums[c], a, b);
    for (int c = 1; c < CHAINS; ++c) sums[0] = _mm256_add_ps(sums[0], sums[c]);
    return _mm256_cvtss_f32(sums[0]);
}
__attribute__((target("avx512f"))) inline float fma_rounds_512() {
    __m512 sums[CHAINS];
    for (auto& sum : sums) sum = _mm512_setzero_ps();
    const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
    for (int64_t i = 0; i < ROUNDS; ++i)
        for (int c = 0; c < CHAINS; ++c) sums[c] = _mm512_fmadd_ps(sums[c], a, b);
    for (int c = 1; c < CHAINS; ++c) sums[0] = _mm512_add_ps(sums[0], sums[c]);
    float lanes[16];
    _mm512_storeu_ps(lanes, sums[0]);
    return lanes[0];
}
#endif

// Vectors of four: NEON on 64-bit ARM, whatever there is elsewhere.
inline float fma_rounds_128() {
    typedef float f4 __attribute__((vector_size(16)));
    f4 sums[CHAINS] = {};
    const f4 a = {0.999f, 0.999f, 0.999f, 0.999f};
    for (int64_t i = 0; i < ROUNDS; ++i)
        for (int c = 0; c < CHAINS; ++c)
            for (int lane = 0; lane < 4; ++lane) sums[c][lane] = __builtin_fmaf(sums[c][lane], a[lane], 0.001f);
    float total = 0.0f;
    for (const f4& sum : sums) total += sum[0] + sum[1] + sum[2] + sum[3];
    return total;
}

// GFLOP/s of this thread's core over at least `seconds`; a fused multiply-add counts as two.
inline double fma_rate(double seconds) {
    float (*rounds)() = fma_rounds_128;
    int lanes = 4;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) rounds = fma_rounds_256, lanes = 8;
    if (__builtin_cpu_supports("avx512f")) rounds = fma_rounds_512, lanes = 16;
#endif
    volatile float sink = rounds();  // the core reaches its clock
    int64_t calls = 0;
    const auto began = std::chrono::steady_clock::now();
    double spent = 0.0;
    while (spent < seconds) {
        sink = sink + rounds();
        ++calls;
        spent = seconds_since(began);
    }
    return 2.0 * lanes * CHAINS * static_cast<double>(ROUNDS) * static_cast<double>(calls) / spent / 1e9;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline uint64_t read_all_256(const uint8_t* from, const uint8_t* end) {
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (; from + 256 <= end; from += 256) {
        for (int line = 0; line < 256; line += 64) __builtin_prefetch(from + 4096 + line);
        for (int part = 0; part < 8; ++part)
            sums[part & 3] = _mm256_add_epi64(sums[part & 3], _mm256_load_si256(reinterpret_cast<const __m256i*>(from + 32 * part)));
    }
    const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
    return static_cast<uint64_t>(_mm256_extract_epi64(sum, 0));
}
#endif

inline uint64_t read_all(const uint8_t* from, const uint8_t* end) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return read_all_256(from, end);
#endif
    uint64_t sums[8] = {};
    for (; from + 64 <= end; from += 64)
        for (int i = 0; i < 8; ++i) sums[i] += reinterpret_cast<const uint64_t*>(from)[i];
    return sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

// Memory that has been written once; `read` reads all of it, each thread its own part, and returns GB/s.
class ReadProbe {
  public:
    explicit ReadProbe(int64_t bytes) : memory_(bytes) {
        for (int64_t at = 0; at < bytes; at += 64) memory_.data()[at] = static_cast<uint8_t>(at >> 6);
    }

    double read(int threads) {
        const int64_t part = memory_.bytes() / threads / 256 * 256;
        std::atomic<int> ready{0};
        std::vector<uint64_t> sums(static_cast<size_t>(threads) * 8);
        auto work = [&](int thread) {
            ready.fetch_add(1);
            while (ready.load() < threads) std::this_thread::yield();
            const uint8_t* from = memory_.data() + thread * part;
            sums[static_cast<size_t>(thread) * 8] = read_all(from, from + part);
        };
        std::vector<std::thread> team;
        for (int thread = 1; thread < threads; ++thread) team.emplace_back(work, thread);
        while (ready.load() < threads - 1) std::this_thread::yield();
        const auto began = std::chrono::steady_clock::now();
        work(0);
        for (std::thread& one : team) one.join();
        const double spent = seconds_since(began);
        uint64_t sum = 0;
        for (uint64_t each : sums) sum += each;
        sink_ = sum;
        return static_cast<double>(part) * threads / spent / 1e9;
    }

    int64_t bytes() const { return memory_.bytes(); }

  private:
    Mapping memory_;
    volatile uint64_t sink_ = 0;
};

}  // namespace roofline
}  // namespace kvseal
