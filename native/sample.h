// What a sampler needs of a row of logits: its largest, the logarithm of its sum of exponentials, its k largest.
//
// Plain loops in double where sums are long; one row at a time (L13). Ties go to the lower id.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace kvseal {

inline int64_t argmax(const float* row, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i)
        if (row[i] > row[best] || (row[best] != row[best] && row[i] == row[i])) best = i;
    return best;
}

inline double log_sum_exp(const float* row, int64_t n) {
    const float top = row[argmax(row, n)];
    double lanes[4] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i & 3] += static_cast<double>(std::exp(row[i] - top));
    return static_cast<double>(top) + std::log((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
}

// Ids of the k largest, largest first.
inline std::vector<int32_t> top_k(const float* row, int64_t n, int64_t k) {
    k = std::min(k, n);
    std::vector<int32_t> heap;  // smallest of the chosen on top
    heap.reserve(static_cast<size_t>(k));
    const auto better = [row](int32_t a, int32_t b) { return row[a] > row[b] || (row[a] == row[b] && a < b); };
    for (int32_t i = 0; i < n; ++i) {
        if (static_cast<int64_t>(heap.size()) < k) {
            heap.push_back(i);
            std::push_heap(heap.begin(), heap.end(), better);
        } else if (k > 0 && better(i, heap.front())) {
            std::pop_heap(heap.begin(), heap.end(), better);
            heap.back() = i;
            std::push_heap(heap.begin(), heap.end(), better);
        }
    }
    std::sort_heap(heap.begin(), heap.end(), better);
    return heap;
}

}  // namespace kvseal
