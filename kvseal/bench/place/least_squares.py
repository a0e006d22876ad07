"""Least squares with coefficients that are never negative.

Owns the algorithm of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23) and nothing else. A step never takes less time
because it does more, and a fit that says so has only fitted noise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
_SMALL = 1e-10


def nonnegative(features: Vector, values: Vector) -> Vector:
    """x >= 0 that makes |features @ x - values| least; features [samples, coefficients], values [samples]."""
    count = features.shape[1]
    free = np.zeros(count, bool)
    found = np.zeros(count)
    scale = max(1.0, float(np.abs(features.T @ values).max()))
    for _ in range(3 * count):
        gradient = features.T @ (values - features @ found)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= _SMALL * scale:
            break
        free[best] = True
        found = _within(features, values, found, free)
    return found


def _within(features: Vector, values: Vector, found: Vector, free: npt.NDArray[np.bool_]) -> Vector:
    """The best solution over the free coefficients; those that it would make negative are held at 0 (`free` is changed)."""
    while True:
        wanted = np.zeros_like(found)
        wanted[free] = np.linalg.lstsq(features[:, free], values, rcond=None)[0]
        negative = free & (wanted <= 0)
        if not negative.any():
            return wanted
        steps = found[negative] / np.maximum(found[negative] - wanted[negative], 1e-300)
        found = found + steps.min() * (wanted - found)
        free &= found > _SMALL * max(1.0, float(found.max()))
        found[~free] = 0.0
