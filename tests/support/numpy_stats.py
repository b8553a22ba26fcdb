"""Statistics of numbers as NumPy has them, for the tests of those of numerics."""

from typing import Any

import jax.numpy as jnp
import numpy as np

EXPONENTS = range(-64, 32)


def expected_stats(x: Any, dtype: Any) -> dict[str, Any]:
    """Return the statistics, by casting in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        magnitudes = np.abs(np.asarray(x).astype(np.float64)).ravel()
        rounded = magnitudes.astype(dtype).astype(np.float64)
    numbers = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    exponents = np.clip(np.frexp(numbers)[1] - 1, EXPONENTS[0], EXPONENTS[-1])
    smallest_normal = float(jnp.finfo(dtype).smallest_normal)
    return {
        "size": magnitudes.size,
        "nonfinite": np.sum(~np.isfinite(magnitudes)),
        "zero": np.sum(magnitudes == 0),
        "subnormal": np.sum((rounded > 0) & (rounded < smallest_normal)),
        "underflow": np.sum((rounded == 0) & (magnitudes > 0)),
        "overflow": np.sum(np.isfinite(magnitudes) & np.isinf(rounded)),
        "max_abs": np.max(numbers, initial=0.0).astype(np.float32),
        "min_abs": np.min(numbers, initial=np.inf).astype(np.float32),
        "histogram": [np.sum(exponents == e) for e in EXPONENTS],
    }
