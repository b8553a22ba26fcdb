"""Optax transformations for mixed precision, and a look at what they did."""

from jmp_lite.optimizers.monitor import LossScaleCollapsed, check_progress, metrics
from jmp_lite.optimizers.scale_aware import ScaleAwareState, scale_aware

__all__ = [
    "LossScaleCollapsed",
    "ScaleAwareState",
    "check_progress",
    "metrics",
    "scale_aware",
]
