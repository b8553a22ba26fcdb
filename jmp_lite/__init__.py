"""Mixed precision for JAX: policies, loss scales, and optimisers that mind them."""

import typing as _typing

from jmp_lite._src import extras as _extras
from jmp_lite._src.autocast.explain import explain
from jmp_lite._src.autocast.transform import (
    autocast,
    full_precision,
    in_half,
    sums_in_float32,
)
from jmp_lite._src.dtypes import half_dtype, recommended_half_dtype
from jmp_lite._src.gradients import scaled_grad, scaled_value_and_grad
from jmp_lite._src.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    get_loss_scale,
    loss_scale_for,
)
from jmp_lite._src.optimizers.low_precision_state import low_precision_state
from jmp_lite._src.optimizers.master_weights import master_weights
from jmp_lite._src.optimizers.monitor import check_skipped_steps, loss_scale_metrics
from jmp_lite._src.optimizers.scale_aware import scale_aware, select_tree
from jmp_lite._src.optimizers.stochastic_rounding import stochastic_rounding
from jmp_lite._src.policy import (
    Policy,
    PolicyMap,
    cast_to_full,
    cast_to_half,
    get_policy,
)
from jmp_lite._src.trees import all_finite

if _typing.TYPE_CHECKING:
    from jmp_lite import checkpoint as checkpoint
    from jmp_lite import linen as linen
    from jmp_lite import memory as memory
    from jmp_lite import nnx as nnx
    from jmp_lite import numerics as numerics
    from jmp_lite import ops as ops
    from jmp_lite import states as states
    from jmp_lite import trees as trees

__version__ = "0.2.0"

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "PolicyMap",
    "StaticLossScale",
    "all_finite",
    "autocast",
    "cast_to_full",
    "cast_to_half",
    "check_skipped_steps",
    "explain",
    "full_precision",
    "get_loss_scale",
    "get_policy",
    "half_dtype",
    "in_half",
    "loss_scale_for",
    "loss_scale_metrics",
    "low_precision_state",
    "master_weights",
    "recommended_half_dtype",
    "scale_aware",
    "scaled_grad",
    "scaled_value_and_grad",
    "select_tree",
    "stochastic_rounding",
    "sums_in_float32",
]


# Namespaces are imported when they are first used: `numerics` is a third of the import
# time, and others need flax or Orbax.
def __getattr__(name: str) -> _typing.Any:
    return _extras.lazy_attribute(__name__, name)


def __dir__() -> list[str]:
    dunders = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *_extras.NAMESPACES, *dunders})
