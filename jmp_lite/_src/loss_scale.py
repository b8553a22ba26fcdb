"""Loss scales: pytrees that lift small gradients into half precision's range.

A loss is multiplied by the scale before the backward pass and the gradients are
divided by it after. The dynamic scale is found by trial: it is raised after a run of
finite gradients and lowered when they overflow. All of it is state inside `jit`:
nothing here looks at a value on the host.
"""

import dataclasses
import math
import warnings
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import compat, trees
from jmp_lite._src.policy import Policy, PolicyMap, get_policy

T = TypeVar("T")

# Between these, the scale and its inverse are both normal float32 numbers: beyond, one
# of the two is flushed to 0 and so are the gradients.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126

_REFILLS = ("scale_change", "growth", "finite_step")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(metaclass=compat.KnownToFlax):
    """A loss scale that does nothing: for float32 and bfloat16.

    Examples:
      >>> NoOpLossScale().scale(3.0)
      3.0
    """

    @property
    def loss_scale(self) -> int:
        """The scale, 1."""
        return 1

    def scale(self, tree: T) -> T:
        """Return the tree as it is."""
        return tree

    def unscale(self, tree: T) -> T:
        """Return the tree as it is."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Return this same loss scale."""
        del grads_finite
        return self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(metaclass=compat.KnownToFlax):
    """A loss scale that never changes, a constant of the program: it has no leaves.

    Args:
      loss_scale: the factor, best a power of two: scaling is then exact.

    Examples:
      >>> float(StaticLossScale(1024.0).unscale(jnp.float16(512)))
      0.5
    """

    loss_scale: Any = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        # Hashable, also when an array was given; a tracer stays what it is.
        if trees.is_concrete_number(self.loss_scale):
            object.__setattr__(self, "loss_scale", float(self.loss_scale))

    def scale(self, tree: T) -> T:
        """Return the tree times the scale, as `DynamicLossScale.scale` does."""
        return trees.multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Return the tree over the scale, as `DynamicLossScale.unscale` does."""
        return trees.multiply(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Return this same loss scale."""
        del grads_finite
        return self


@trees.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(metaclass=compat.KnownToFlax):
    """A loss scale that finds the largest value which keeps gradients finite.

    After each step, `adjust` applies::

      finite:      counter += 1;  refill "finite_step": bad_steps = 0
                   if counter == period:
                       counter = bad_steps = 0
                       loss_scale = min(loss_scale * factor, max_loss_scale)
      non-finite:  counter = 0;  bad_steps = min(bad_steps + 1, hysteresis)
                   if bad_steps == hysteresis:
                       loss_scale = max(loss_scale * backoff_factor, min_loss_scale)
                       refill "scale_change": bad_steps = 0

    Growth never lowers a scale that starts above its ceiling, backoff never raises one
    that starts below its floor, and neither ever reaches 0 or inf. The first steps of a
    run may overflow while the scale settles: that is how it is found.

    Args:
      loss_scale: the first scale, f32 `[]`, best a power of two: scaling is then exact.
      counter: finite steps since the scale last changed or a step overflowed, i32 `[]`.
      period: grow after this many finite steps in a row, at least 1.
      factor: what growth multiplies the scale by, above 1.
      min_loss_scale: the floor.
      backoff_factor: what an overflow multiplies the scale by, in (0, 1); the default
        is `1 / factor`.
      max_loss_scale: the ceiling. `2**24` is apex's.
      hysteresis: this many overflows lower the scale once, at least 1.
      hysteresis_refill: when the count of overflows starts anew: `"scale_change"` (as
        TF1's `decr_every_n_nan_or_inf`), `"growth"` (as Megatron: once used up, each
        overflow lowers until the scale has grown), or `"finite_step"` (as DeepSpeed's
        consecutive hysteresis).
      bad_steps: overflows counted so far, i32 `[]`; None where `hysteresis` is 1.

    Raises:
      ValueError: a scale that is not positive, or a setting out of its range.
      TypeError: `min_loss_scale` or `max_loss_scale` is not a number known at trace
        time.

    Examples:
      >>> loss_scale = DynamicLossScale(2.0**15, period=2)
      >>> float(loss_scale.adjust(jnp.bool_(False)).loss_scale)
      16384.0
      >>> for _ in range(2):
      ...     loss_scale = loss_scale.adjust(jnp.bool_(True))
      >>> float(loss_scale.loss_scale), int(loss_scale.counter)
      (65536.0, 0)

    References:
      Micikevicius et al., Mixed Precision Training, 2018
      (https://arxiv.org/abs/1710.03740); jmp; torch.amp.GradScaler.
    """

    loss_scale: Any = 2.0**15
    counter: Any = 0
    period: Any = dataclasses.field(default=2000, metadata={"static": True})
    factor: Any = dataclasses.field(default=2, metadata={"static": True})
    min_loss_scale: Any = dataclasses.field(default=1.0, metadata={"static": True})
    _: dataclasses.KW_ONLY
    backoff_factor: Any = dataclasses.field(default=None, metadata={"static": True})
    max_loss_scale: Any = dataclasses.field(default=2.0**24, metadata={"static": True})
    hysteresis: Any = dataclasses.field(default=1, metadata={"static": True})
    hysteresis_refill: str = dataclasses.field(
        default="scale_change", metadata={"static": True}
    )
    bad_steps: Any = None

    def __post_init__(self):
        for name in ("loss_scale", "min_loss_scale"):
            _warn_if_not_floating(getattr(self, name), name)
        scale, bad_steps = self.loss_scale, self.bad_steps
        if trees.is_concrete_number(scale):
            _check_positive(scale)
        settings = {
            "min_loss_scale": _static_number(self.min_loss_scale, "min_loss_scale"),
            "max_loss_scale": _static_number(self.max_loss_scale, "max_loss_scale"),
            "loss_scale": _as_scalar(scale, jnp.float32),
            "counter": _as_scalar(self.counter, jnp.int32),
        }
        self._check_settings(**settings)
        if self.backoff_factor is None:
            settings["backoff_factor"] = 1 / self.factor
        bad_steps = 0 if bad_steps is None else bad_steps
        counts = self.hysteresis > 1
        settings["bad_steps"] = _as_scalar(bad_steps, jnp.int32) if counts else None
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    def scale(self, tree: T) -> T:
        """Multiply the numbers of a tree by the scale.

        Args:
          tree: a loss, or any pytree.

        Returns:
          The tree, f16 and bf16 leaves now f32 (a loss × 65536 would leave f16's
          range); integers, bools, keys, `float0` and objects as they are.
        """
        return trees.multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divide the numbers of a tree by the scale.

        Args:
          tree: gradients, or any pytree.

        Returns:
          The tree, f16 and bf16 leaves now f32 (the result may be too small for half);
          complex leaves stay complex; integers, bools, keys, `float0` and objects are
          as they were.
        """
        return trees.multiply(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Return the next loss scale.

        Args:
          grads_finite: whether the last gradients were finite, bool `[]`.

        Returns:
          The scale after the rules above; every leaf keeps its dtype.

        Raises:
          ValueError: `grads_finite` is not a scalar.
        """
        finite = jnp.asarray(grads_finite).astype(jnp.bool_)
        if finite.ndim != 0:
            raise ValueError(
                f"Expected grads_finite to be a boolean scalar, got shape "
                f"{finite.shape}; all_finite(grads) makes one."
            )
        scale, counter = self.loss_scale, self.counter
        counter = jnp.where(finite, counter + 1, 0)
        grow = finite & (counter >= int(self.period))
        bad_steps, lower = self._count_bad_steps(finite, grow)
        ceiling = min(self.max_loss_scale, _LARGEST)
        floor = max(self.min_loss_scale, _SMALLEST)
        grown = jnp.maximum(jnp.minimum(scale * self.factor, ceiling), scale)
        lowered = jnp.minimum(jnp.maximum(scale * self.backoff_factor, floor), scale)
        scale = jnp.where(grow, grown, jnp.where(lower, lowered, scale))
        leaves = [scale, jnp.where(grow, 0, counter), bad_steps]
        # Not through the constructor: its checks would wait for the device.
        return jax.tree.unflatten(
            jax.tree.structure(self), [leaf for leaf in leaves if leaf is not None]
        )

    def _count_bad_steps(self, finite: jax.Array, grow: jax.Array) -> tuple[Any, Any]:
        """Return the next count of overflows, and whether the scale is lowered."""
        if self.hysteresis == 1:
            return None, ~finite
        counted = jnp.minimum(self.bad_steps + 1, self.hysteresis)
        lower = ~finite & (counted == self.hysteresis)
        refill = grow
        if self.hysteresis_refill == "scale_change":
            refill = grow | lower
        if self.hysteresis_refill == "finite_step":
            refill = finite
        kept = jnp.where(finite, self.bad_steps, counted)
        return jnp.where(refill, 0, kept), lower

    def _check_settings(self, min_loss_scale: float, max_loss_scale: float, **_):
        backoff = self.backoff_factor
        refill = self.hysteresis_refill
        checks = {
            "period": ("at least 1, a whole int32", _is_count(self.period)),
            "factor": ("finite and above 1", 1 < self.factor < math.inf),
            "backoff_factor": ("between 0 and 1", backoff is None or 0 < backoff < 1),
            "hysteresis": ("at least 1, a whole int32", _is_count(self.hysteresis)),
            "hysteresis_refill": (f"one of {_REFILLS}", refill in _REFILLS),
        }
        for name, (expected, holds) in checks.items():
            if not holds:
                got = getattr(self, name)
                raise ValueError(f"Expected {name} to be {expected}, got {got!r}.")
        if not 0 <= min_loss_scale <= max_loss_scale:
            raise ValueError(
                "Expected 0 <= min_loss_scale <= max_loss_scale, got "
                f"{min_loss_scale} and {max_loss_scale}."
            )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def loss_scale_for(policy: Policy | PolicyMap | str) -> LossScale:
    """Return the loss scale that a policy needs.

    Args:
      policy: a policy, its string, or a `PolicyMap`.

    Returns:
      `DynamicLossScale()` where anything is computed in float16, whose smallest number
      is 6e-8; else `NoOpLossScale()`: bfloat16 has float32's range.

    Examples:
      >>> loss_scale_for("mixed_bfloat16")
      NoOpLossScale()
    """
    if isinstance(policy, PolicyMap):
        policies = [policy.default, *(p for _, p in policy.rules)]
    else:
        policies = [get_policy(policy)]
    in_float16 = any(p.compute_dtype == jnp.float16 for p in policies)
    return DynamicLossScale() if in_float16 else NoOpLossScale()


def get_loss_scale(tree: Any) -> LossScale:
    """Return the one loss scale in a tree, at any depth.

    Args:
      tree: a loss scale, an optimiser state, a whole train state, an `nnx.Optimizer`…

    Returns:
      The loss scale, its leaves arrays, also where nnx keeps them in variables.

    Raises:
      ValueError: the tree holds none, or several.

    Examples:
      >>> get_loss_scale({"opt": (None, DynamicLossScale(8.0))}).loss_scale
      Array(8., dtype=float32)
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, LossScale)
    )
    found = [(path, leaf) for path, leaf in leaves if isinstance(leaf, LossScale)]
    if len(found) == 1:
        return compat.without_variables(found[0][1])
    if found:
        raise ValueError(
            "Expected one loss scale, found several, at "
            f"{[trees.key_path(path) for path, _ in found]}: pass the part that is "
            "meant."
        )
    raise ValueError(
        "Found no loss scale in a tree of type "
        f"{type(tree).__name__} with the leaves "
        f"{[trees.key_path(path) for path, _ in leaves][:8]}; expected a loss scale or "
        "a state that holds one, such as scale_aware(...).init(params)."
    )


def check_loss_scale(loss_scale: Any) -> None:
    """Raise unless this is a loss scale whose value, where it is known, can scale.

    Raises:
      TypeError: not a loss scale.
      ValueError: its value is zero, negative, infinite or NaN.
    """
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            "Expected a NoOpLossScale, StaticLossScale or DynamicLossScale, got "
            f"{loss_scale!r}."
        )
    if trees.is_concrete_number(loss_scale.loss_scale):
        _check_positive(loss_scale.loss_scale)


def _as_scalar(x: Any, dtype: Any) -> Any:
    """Return a number or array as a jax array of this dtype, anything else as it is."""
    if isinstance(x, jax.Array):
        return x if x.dtype == dtype and not x.weak_type else x.astype(dtype)
    is_number = isinstance(x, np.ndarray | np.generic | int | float)
    return jnp.asarray(x, dtype) if is_number else x


def _static_number(x: Any, name: str) -> float:
    if not trees.is_concrete_number(x):
        raise TypeError(
            f"Expected {name} to be a number known when the program is traced, got "
            f"{x!r}: it is a constant of the program, not a part of the state."
        )
    return float(x)


def _check_positive(scale: Any) -> None:
    value = float(scale)
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError(
            f"Expected a positive, finite loss scale, got {value}; float32 holds it "
            "and its inverse from 2**-126 to 2**126."
        )


def _is_count(x: Any) -> bool:
    return float(x).is_integer() and 1 <= x < 2**31


def _warn_if_not_floating(x: Any, name: str) -> None:
    dtype = getattr(x, "dtype", None)
    is_integer = isinstance(x, int) or (
        dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    )
    if is_integer:
        dtype = "int" if dtype is None else dtype
        warnings.warn(
            f"Expected floating type for {name}, got {dtype}; it is made float32.",
            stacklevel=4,
        )
