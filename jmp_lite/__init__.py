"""Mixed precision for JAX: policies, loss scales, and optimisers that mind them."""

import typing

from jmp_lite._src import extras
from jmp_lite._src.autocast.explain import explain
from jmp_lite._src.autocast.options import OpRules
from jmp_lite._src.autocast.transform import (
    autocast,
    full_precision,
    in_half,
    sums_in_float32,
)
from jmp_lite._src.dtypes import half_dtype, recommended_half_dtype
from jmp_lite._src.fp8 import fp8_dot_general
from jmp_lite._src.gradients import scaled_grad, scaled_value_and_grad
from jmp_lite._src.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    get_loss_scale,
    loss_scale_for,
)
from jmp_lite._src.optimizers.low_precision_state import (
    LowPrecisionArray,
    LowPrecisionState,
    low_precision_state,
)
from jmp_lite._src.optimizers.master_weights import (
    MasterRemaindersState,
    MasterWeightsState,
    master_weights,
)
from jmp_lite._src.optimizers.monitor import (
    TooManySkippedStepsError,
    check_skipped_steps,
    loss_scale_metrics,
)
from jmp_lite._src.optimizers.scale_aware import (
    ScaleAwareState,
    scale_aware,
    select_tree,
)
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
from jmp_lite._src.trees import all_finite, cast_floating, cast_like

if typing.TYPE_CHECKING:
    from jmp_lite import checkpoint as checkpoint
    from jmp_lite import linen as linen
    from jmp_lite import memory as memory
    from jmp_lite import nnx as nnx
    from jmp_lite import numerics as numerics

__version__ = "0.2.0"

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "LowPrecisionArray",
    "LowPrecisionState",
    "MasterRemaindersState",
    "MasterWeightsState",
    "NoOpLossScale",
    "OpRules",
    "Policy",
    "PolicyMap",
    "ScaleAwareState",
    "StaticLossScale",
    "StochasticRoundingState",
    "TooManySkippedStepsError",
    "all_finite",
    "autocast",
    "cast_floating",
    "cast_like",
    "cast_to_full",
    "cast_to_half",
    "check_skipped_steps",
    "explain",
    "fp8_dot_general",
    "full_precision",
    "get_loss_scale",
    "get_policy",
    "half_dtype",
    "in_half",
    "loss_scale_for",
    "loss_scale_metrics",
    "low_precision_state",
    "master_weights",
    "memory",
    "numerics",
    "recommended_half_dtype",
    "scale_aware",
    "scaled_grad",
    "scaled_value_and_grad",
    "select_tree",
    "stochastic_rounding",
    "sums_in_float32",
]


# `numerics`, a third of the import time, and what needs flax or Orbax are imported when
# they are first used.
def __getattr__(name: str) -> typing.Any:
    return extras.lazy_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
