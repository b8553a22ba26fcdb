"""Mixed precision for JAX: policies, loss scales, and optimisers that mind them."""

from jmp_lite import numerics as numerics
from jmp_lite.autocast import (
    OpRules,
    autocast,
    default_rules,
    explain,
    full_precision,
    sums_in_float32,
)
from jmp_lite.dtypes import best_half_dtype, half_dtype
from jmp_lite.gradients import scaled_grad, scaled_value_and_grad
from jmp_lite.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    get_loss_scale,
    loss_scale_for,
)
from jmp_lite.optimizers import (
    LossScaleCollapsed,
    MasterWeightsState,
    ScaleAwareState,
    StochasticRoundingState,
    check_progress,
    master_weights,
    metrics,
    scale_aware,
    stochastic_rounding,
)
from jmp_lite.policy import (
    Policy,
    PolicyMap,
    cast_to_full,
    cast_to_half,
    get_policy,
)
from jmp_lite.trees import all_finite, cast_floating, cast_like, select_tree

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
    "scale_aware",
    "scaled_grad",
    "scaled_value_and_grad",
    "select_tree",
    "stochastic_rounding",
    "sums_in_float32",
]
