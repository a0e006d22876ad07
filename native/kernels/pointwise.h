// RMS norm, rotary embedding, SiLU: one token at a time.
//
// Each token's values depend on that token alone, in one order (L13).
#pragma once
#include <cmath>

#include "../kernels.h"
#include "simd.h"

namespace kvseal {
namespace KVSEAL_ISA {

// out = x / sqrt(mean(x^2) + eps) * weight. Squares are summed in eight lanes, then as a tree. In place is fine.
static void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    f8 squares = splat(0.0f);
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        const f8 v = load8(x + i);
        squares = fma8(v, v, squares);
    }
    float total = sum8(squares);
    for (; i < n; ++i) total += x[i] * x[i];
    const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
    const f8 factors = splat(factor);
    for (i = 0; i + 8 <= n; i += 8) store8(out + i, load8(x + i) * factors * load8(weight + i));
    for (; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

// Dimension i turns with dimension i + half; the rest of the head stands still.
static void rope(float* x, int heads, int head_dim, int half, const float* cosines, const float* sines) {
    for (int h = 0; h < heads; ++h) {
        float* first = x + static_cast<int64_t>(h) * head_dim;
        float* second = first + half;
        int i = 0;
        for (; i + 8 <= half; i += 8) {
            const f8 a = load8(first + i), b = load8(second + i), c = load8(cosines + i), s = load8(sines + i);
            store8(first + i, a * c - b * s);
            store8(second + i, b * c + a * s);
        }
        for (; i < half; ++i) {
            const float a = first[i], b = second[i];
            first[i] = a * cosines[i] - b * sines[i];
            second[i] = b * cosines[i] + a * sines[i];
        }
    }
}

// out = gate / (1 + e^-gate) * up. Reads and writes only n elements.
static void silu_multiply(const float* gate, const float* up, int n, float* out) {
    const f8 one = splat(1.0f), zero = splat(0.0f);
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        const f8 g = load8(gate + i);
        store8(out + i, g / (one + exp8(zero - g)) * load8(up + i));
    }
    for (; i < n; ++i) out[i] = gate[i] / (1.0f + exp1(-gate[i])) * up[i];
}

static void exponential(const float* x, int n, float* out) {
    int i = 0;
    for (; i + 8 <= n; i += 8) store8(out + i, exp8(load8(x + i)));
    for (; i < n; ++i) out[i] = exp1(x[i]);
}

}  // namespace KVSEAL_ISA
}  // namespace kvseal
