"""Mixed precision for JAX: policies, loss scales, and optimisers that mind them."""

from jmp_lite import numerics as numerics
from jmp_lite._src.autocast.explain import explain
from jmp_lite._src.autocast.ops import OpRules, default_rules
from jmp_lite._src.autocast.transform import autocast, full_precision, sums_in_float32
from jmp_lite._src.dtypes import best_half_dtype, half_dtype
from jmp_lite._src.gradients import scaled_grad, scaled_value_and_grad
from jmp_lite._src.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    get_loss_scale,
    loss_scale_for,
)
from jmp_lite._src.optimizers.master_weights import MasterWeightsState, master_weights
from jmp_lite._src.optimizers.monitor import LossScaleCollapsed, check_progress, metrics
from jmp_lite._src.optimizers.scale_aware import ScaleAwareState, scale_aware
from jmp_lite._src.optimizers.stochastic_rounding import (
    StochasticRoundingState,
    stochastic_rounding,
)
from jmp_lite._src.policy import (
    Policy,
    PolicyMap,
    cast_to_full,
    cast_to_half,
    get_policy,
)
from jmp_lite._src.trees import all_finite, cast_floating, cast_like, select_tree

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "LossScaleCollapsed",
    "MasterWeightsState",
    "NoOpLossScale",
    "OpRules",
    "Policy",
    "PolicyMap",
    "ScaleAwareState",
    "StaticLossScale",
    "StochasticRoundingState",
    "all_finite",
    "autocast",
    "best_half_dtype",
    "cast_floating",
    "cast_like",
    "cast_to_full",
    "cast_to_half",
    "check_progress",
    "default_rules",
    "explain",
    "full_precision",
    "get_loss_scale",
    "get_policy",
    "half_dtype",
    "loss_scale_for",
    "master_weights",
    "metrics",
    "numerics",
    "scale_aware",
    "scaled_grad",
    "scaled_value_and_grad",
    "select_tree",
    "stochastic_rounding",
    "sums_in_float32",
]
