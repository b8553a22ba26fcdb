"""Optax transformations for mixed precision, and a look at what they did."""

from jmp_lite.optimizers.master_weights import MasterWeightsState, master_weights
from jmp_lite.optimizers.monitor import LossScaleCollapsed, check_progress, metrics
from jmp_lite.optimizers.scale_aware import ScaleAwareState, scale_aware
from jmp_lite.optimizers.stochastic_rounding import (
    StochasticRoundingState,
    stochastic_rounding,
)

__all__ = [
    "LossScaleCollapsed",
    "MasterWeightsState",
    "ScaleAwareState",
    "StochasticRoundingState",
    "check_progress",
    "master_weights",
    "metrics",
    "scale_aware",
    "stochastic_rounding",
]
