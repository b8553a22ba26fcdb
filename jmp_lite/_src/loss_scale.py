"""Loss scales: pytrees that scale small gradients into the range of half precision.

The loss is multiplied by the loss scale before the backward pass, and the gradients are
divided by it afterwards. All runs inside `jit`; no value is read on the host.
"""

import dataclasses
import math
import warnings
from typing import TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jmp_lite._src import arguments, compat, trees
from jmp_lite._src.jaxprs import name_scopes
from jmp_lite._src.policy import Policy, PolicyMap, get_policy, policies_of
from jmp_lite._src.trees import Leaf, PyTree

T = TypeVar("T")

# Beyond these, the scale or its inverse is flushed to 0, and the gradients with it.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126

# States of what may withhold gradients from the optimiser inside of it.
_WITHHOLD = optax.MultiStepsState, optax.ApplyIfFiniteState

# What is given as a number is an f32 or i32 array after that.
_Scalar = jax.Array | np.ndarray | np.number | float

_REFILLS = ("scale_change", "growth", "finite_step")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(metaclass=compat.FlaxSerializable):
    """A loss scale of 1, for float32 and bfloat16.

    Examples:
      >>> NoOpLossScale().scale(3.0)
      3.0
    """

    @property
    def loss_scale(self) -> int:
        """The scale, 1."""
        return 1

    def scale(self, tree: T) -> T:
        """Return the tree unchanged."""
        return tree

    def unscale(self, tree: T) -> T:
        """Return the tree unchanged."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> "NoOpLossScale":
        """Return this loss scale unchanged."""
        check_flag(grads_finite)
        return self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(metaclass=compat.FlaxSerializable):
    """A constant loss scale: a static value without leaves.

    Args:
      loss_scale: the factor. Use a power of two, so that scaling is exact.

    Raises:
      TypeError: the factor is not a number.
      ValueError: in what uses it: the factor is not positive and finite.

    Examples:
      >>> float(StaticLossScale(1024.0).unscale(jnp.float16(512)))
      0.5
    """

    loss_scale: _Scalar = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        # A float is hashable, an array is not. A tracer has no value to convert.
        if not isinstance(self.loss_scale, Tracer):
            scale = arguments.number(self.loss_scale, "loss_scale")
            object.__setattr__(self, "loss_scale", scale)

    def scale(self, tree: T) -> T:
        """Return the tree times the scale; see `DynamicLossScale.scale`."""
        check_loss_scale(self)
        return _multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Return the tree divided by the scale; see `DynamicLossScale.unscale`."""
        check_loss_scale(self)
        return _multiply(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> "StaticLossScale":
        """Return this loss scale unchanged."""
        check_flag(grads_finite)
        return self


def _static(default: T) -> T:
    return dataclasses.field(default=default, metadata={"static": True})


class _InverseOfFactor(float):
    """A backoff factor that was not given, so that it follows another factor."""


@trees.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(trees.KeepsDtypes, metaclass=compat.FlaxSerializable):
    """A loss scale that adapts to the largest value that keeps gradients finite.

    After each step, `adjust` applies::

      finite:      counter += 1;  refill "finite_step": bad_steps = 0
                   if counter == period:
                       counter = bad_steps = 0
                       loss_scale = min(loss_scale * factor, max_loss_scale)
      non-finite:  counter = 0;  bad_steps = min(bad_steps + 1, hysteresis)
                   if bad_steps == hysteresis:
                       loss_scale = max(loss_scale * backoff_factor, min_loss_scale)
                       refill "scale_change": bad_steps = 0

    The scale never becomes 0 or inf. Expect a few skipped steps at the start of a run,
    while the loss scale settles. Growth never lowers a scale, and backoff never raises
    one, also if it was traced or restored and is out of bounds.

    Args:
      loss_scale: the initial scale, f32 `[]`. Use a power of two, so that scaling is
        exact.
      counter: finite steps since the scale last changed or a step overflowed, i32 `[]`.
      period: the number of consecutive finite steps before growth, at least 1.
      factor: the growth factor, above 1.
      min_loss_scale: the lower bound of the scale.
      backoff_factor: the factor applied after an overflow, in (0, 1); the default is
        `1 / factor`.
      max_loss_scale: the upper bound of the scale. apex also uses `2**24`.
      hysteresis: the number of overflows that lower the scale once, at least 1.
      hysteresis_refill: the event that resets the count of overflows:
        `"scale_change"` (TF1's `decr_every_n_nan_or_inf`); `"growth"` (Megatron: after
        the first `hysteresis` overflows, each further one lowers the scale, until it
        grows); or `"finite_step"` (DeepSpeed's consecutive hysteresis).
      bad_steps: overflows counted so far, i32 `[]`; None if `hysteresis` is 1.

    Raises:
      ValueError: the scale is not positive, or not between `min_loss_scale` and
        `max_loss_scale`; a setting is out of its range.
      TypeError: the scale is not a number or array; a setting is not a number known at
        trace time.

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

    loss_scale: _Scalar = 2.0**15
    counter: _Scalar = 0
    period: int = _static(2000)
    factor: float = _static(2)
    min_loss_scale: float = _static(1.0)
    _: dataclasses.KW_ONLY
    backoff_factor: float | None = _static(None)
    max_loss_scale: float = _static(2.0**24)
    hysteresis: int = _static(1)
    hysteresis_refill: str = _static("scale_change")
    bad_steps: _Scalar | None = None

    def __post_init__(self) -> None:
        for name in ("loss_scale", "min_loss_scale"):
            _warn_of_integer(getattr(self, name), name)
        if arguments.is_number(self.loss_scale):
            _check_positive(self.loss_scale)

        def number(name, *condition):
            return arguments.number(getattr(self, name), name, *condition)

        factor = number("factor", "finite and above 1", lambda x: 1 < x < math.inf)
        backoff = _InverseOfFactor(1 / factor)
        if not isinstance(self.backoff_factor, _InverseOfFactor | None):
            backoff = number("backoff_factor", "between 0 and 1", lambda x: 0 < x < 1)
        hysteresis = arguments.count(self.hysteresis, "hysteresis")
        arguments.one_of(self.hysteresis_refill, "hysteresis_refill", _REFILLS)
        bad_steps = 0 if self.bad_steps is None else self.bad_steps
        bad_steps = _as_scalar(bad_steps, "bad_steps", jnp.int32)
        vars(self).update(
            loss_scale=_as_scalar(self.loss_scale, "loss_scale", jnp.float32),
            counter=_as_scalar(self.counter, "counter", jnp.int32),
            period=arguments.count(self.period, "period"),
            factor=factor,
            min_loss_scale=number("min_loss_scale"),
            backoff_factor=backoff,
            max_loss_scale=number("max_loss_scale"),
            hysteresis=hysteresis,
            bad_steps=bad_steps if hysteresis > 1 else None,
        )
        self._check_bounds()

    def scale(self, tree: T) -> T:
        """Multiply the floating and complex leaves of a tree by the scale.

        Args:
          tree: a loss, or any pytree.

        Returns:
          The scaled tree. f16 and bf16 leaves become f32, because a scaled loss can
          exceed the range of f16. Integers, bools, fp8, keys, `float0` and objects
          are returned unchanged.
        """
        return _multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divide the floating and complex leaves of a tree by the scale.

        Args:
          tree: gradients, or any pytree.

        Returns:
          The unscaled tree. f16 and bf16 leaves become f32, because the result can
          underflow in half precision. Other leaves are as in `scale`.
        """
        return _multiply(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """Return the loss scale for the next step.

        Args:
          grads_finite: whether the last gradients were finite, bool `[]`.

        Returns:
          The loss scale after the update above; every leaf keeps its dtype.

        Raises:
          TypeError: `grads_finite` is not a boolean scalar.
        """
        finite, scale = check_flag(grads_finite), self.loss_scale
        counter = jnp.where(finite, optax.safe_increment(self.counter), 0)
        grow = finite & (counter >= self.period)
        bad_steps, lower = self._count_bad_steps(finite, grow)
        ceiling = min(self.max_loss_scale, _LARGEST)
        floor = max(self.min_loss_scale, _SMALLEST)
        grown = jnp.maximum(jnp.minimum(scale * self.factor, ceiling), scale)
        backoff = self.backoff_factor or 1 / self.factor
        lowered = jnp.minimum(jnp.maximum(scale * backoff, floor), scale)
        scale = jnp.where(grow, grown, jnp.where(lower, lowered, scale))
        leaves = jax.tree.leaves([scale, jnp.where(grow, 0, counter), bad_steps])
        # Unflatten skips the constructor, whose checks would block on the device.
        return jax.tree.unflatten(jax.tree.structure(self), leaves)

    def _count_bad_steps(
        self, finite: jax.Array, grow: jax.Array
    ) -> tuple[jax.Array | None, jax.Array]:
        """Return the next count of overflows, and whether the scale is lowered."""
        if self.bad_steps is None:  # the hysteresis is 1
            return None, ~finite
        counted = jnp.minimum(optax.safe_increment(self.bad_steps), self.hysteresis)
        lower = ~finite & (counted == self.hysteresis)
        refills = {"scale_change": grow | lower, "growth": grow, "finite_step": finite}
        kept = jnp.where(finite, self.bad_steps, counted)
        return jnp.where(refills[self.hysteresis_refill], 0, kept), lower

    def _check_bounds(self):
        low, high = self.min_loss_scale, self.max_loss_scale
        if not 0 <= low <= high:
            raise ValueError(
                f"Expected 0 <= min_loss_scale <= max_loss_scale, got {low} and {high}."
            )
        if not arguments.is_number(self.loss_scale):
            return
        value = float(self.loss_scale)
        if not np.float32(low) <= np.float32(value) <= np.float32(high):
            name = "min_loss_scale" if value < low else "max_loss_scale"
            raise ValueError(
                "Expected a loss scale between min_loss_scale and max_loss_scale, got "
                f"{value}, {low} and {high}: pass {name}={value} too."
            )


def _multiply(tree: T, factor: ArrayLike) -> T:
    """Multiply a tree, in the scope by which `lint` knows a scale that is constant."""
    with jax.named_scope(name_scopes.LOSS_SCALE):
        return trees.multiply(tree, factor)


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale
"""Any loss scale: the type of what `loss_scale_for` returns."""


def loss_scale_for(policy: Policy | PolicyMap | str) -> LossScale:
    """Return the loss scale that a policy needs.

    Args:
      policy: a policy, its string, or a `PolicyMap`.

    Returns:
      `DynamicLossScale()` if any dtype is float16, otherwise `NoOpLossScale()`.
      Gradients of float16 parameters, activations and outputs are float16, in which
      those below 3e-8 underflow; bfloat16 has the range of float32.

    Examples:
      >>> loss_scale_for("mixed_bfloat16")
      NoOpLossScale()
    """
    policy = policy if isinstance(policy, PolicyMap) else get_policy(policy)
    used = [
        (p.param_dtype, p.compute_dtype, p.output_dtype) for p in policies_of(policy)
    ]
    in_float16 = any(jnp.float16 in dtypes for dtypes in used)
    return DynamicLossScale() if in_float16 else NoOpLossScale()


def get_loss_scale(tree: PyTree) -> LossScale:
    """Return the only loss scale in a tree, at any depth.

    It warns of `optax.MultiSteps` and `optax.apply_if_finite` around `scale_aware`.

    Args:
      tree: a loss scale, an optimiser state, a train state, an `nnx.Optimizer`…

    Returns:
      The loss scale. Its leaves are arrays, also if nnx stores them in variables.

    Raises:
      ValueError: the tree holds no loss scale, or several.

    Examples:
      >>> get_loss_scale({"opt": (None, DynamicLossScale(8.0))}).loss_scale
      Array(8., dtype=float32)
    """
    found = trees.find(tree, LossScale)
    if len(found) == 1:
        for _, state in trees.find(tree, _WITHHOLD):
            if trees.find(state, LossScale):
                warnings.warn(
                    "An optimiser around scale_aware (its state is a "
                    f"{type(state).__name__}) hides overflows from it: the loss scale "
                    "may never fall, and an inf stays in the sum of MultiSteps. Put "
                    "MultiSteps inside, as scale_aware(optax.MultiSteps(optimizer, k))"
                    ", and leave apply_if_finite out: scale_aware does that.",
                    stacklevel=3,
                )
        variables = compat.nnx_class("Variable")
        return trees.map_nodes(lambda x: x.get_value(), found[0][1], variables)
    if found:
        raise ValueError(
            "Expected one loss scale, found several, at "
            f"{[path for path, _ in found]}. Put one scale_aware around the optimisers "
            "of one loss, as around optax.partition. If each has a loss of its own, "
            "pass its part of the tree."
        )
    raise ValueError(
        "Found no loss scale in a tree of type "
        f"{type(tree).__name__} with the leaves "
        f"{trees.key_paths(tree)[:8]}; expected a loss scale or "
        f"a state that holds one, such as scale_aware(...).init(params).{_remedy(tree)}"
    )


def check_loss_scale(loss_scale: object) -> None:
    """Raise unless this is a loss scale with a positive, finite value, if known."""
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            "Expected a NoOpLossScale, StaticLossScale or DynamicLossScale, got "
            f"{loss_scale!r}.{_remedy(loss_scale)}"
        )
    value = loss_scale.loss_scale
    if trees.is_array(value) and jnp.ndim(value) != 0:
        raise TypeError(f"Expected one number in the loss scale, got {value!r}.")
    if arguments.is_number(value):
        _check_positive(value)


def check_flag(grads_finite: ArrayLike) -> jax.Array:
    return trees.check_flag(grads_finite, "all_finite(grads) makes one")


def _remedy(x: object) -> str:
    """Return how to make a loss scale of what was passed as one, or ""."""
    if isinstance(x, str):
        try:
            get_policy(x)
        except ValueError:  # "dynamic", say
            return " One that adapts is DynamicLossScale(); none, NoOpLossScale()."
    if isinstance(x, str | Policy | PolicyMap):
        return f" For that of a policy, write loss_scale_for({x!r})."
    if x is None:
        return " None at all is NoOpLossScale()."
    if isinstance(x, type) and issubclass(x, LossScale):
        return f" Make one first: {x.__name__}(...)."
    if arguments.is_number(x):
        constant, dynamic = f"StaticLossScale({x!r})", f"DynamicLossScale({x!r})"
        return f" A constant one is {constant}; one that starts there is {dynamic}."
    return compat.of_another_package(x, *get_args(LossScale))


def _warn_of_integer(x: Leaf, name: str) -> None:
    dtype = x.dtype if trees.is_array(x) else type(x)
    if jnp.issubdtype(dtype, jnp.integer):
        warnings.warn(
            f"Expected floating type for {name}, got {np.dtype(dtype)}; it is cast to "
            "float32.",
            stacklevel=4,
        )


def _as_scalar(x: Leaf, name: str, dtype: DTypeLike) -> Leaf:
    """Convert a number or an array to a jax array of this dtype; keep a shape."""
    if arguments.is_number(x) and dtype == jnp.int32:
        arguments.count(x, name, least=0)
    is_array = trees.is_array(x) and arguments.is_real(x.dtype)
    if not is_array and not arguments.is_number(x):
        raise TypeError(arguments.wrong(name, "a number", x))
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x, dtype)


def _check_positive(scale: Leaf) -> None:
    value = float(scale)
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError(
            f"Expected a positive, finite loss scale, got {value}; the scale and its "
            "inverse must be normal float32 numbers, 2**-126 to 2**126."
        )
