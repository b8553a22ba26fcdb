"""The states of our optimisers, what is in them, and the error that tells of one."""

from jmp_lite._src.optimizers.low_precision_state import (
    LowPrecisionArray,
    LowPrecisionState,
)
from jmp_lite._src.optimizers.master_weights import (
    MasterRemaindersState,
    MasterWeightsState,
)
from jmp_lite._src.optimizers.monitor import TooManySkippedStepsError
from jmp_lite._src.optimizers.scale_aware import ScaleAwareState
from jmp_lite._src.optimizers.stochastic_rounding import StochasticRoundingState

__all__ = [
    "LowPrecisionArray",
    "LowPrecisionState",
    "MasterRemaindersState",
    "MasterWeightsState",
    "ScaleAwareState",
    "StochasticRoundingState",
    "TooManySkippedStepsError",
]
