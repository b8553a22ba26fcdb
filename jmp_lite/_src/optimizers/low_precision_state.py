"""Optimiser state in low precision: bfloat16 or 8 bits, rounded stochastically.

The inner optimiser computes in float32. Under `jit`, XLA fuses this with the rounding;
without, all of the state is in float32 during an update.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jmp_lite._src import arguments, compat, policy, trees
from jmp_lite._src.optimizers import base, blocks, rounding
from jmp_lite._src.optimizers.master_weights import with_remainders
from jmp_lite._src.optimizers.scale_aware import ScaleAwareState, update_in_float32

T = TypeVar("T")
_Shapes = dict[str, tuple[int, ...]]

_DTYPES = ("bfloat16", "8bit")

# With fewer numbers in a row, the scales of 8 bits take more than an eighth of a byte
# a number.
_SHORTEST_ROW = 32

# Fields of optax' states that hold moments: averages and sums that start at zero, whose
# new number is computed from the old one, so that an error of rounding fades.
_MOMENTS = frozenset(
    "e_g e_x ema exp_avg exp_avg_sq m m1 m2 mu n nu nu_max sum_of_squares trace "
    "v".split()
)


@trees.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowPrecisionArray(trees.KeepsDtypes, metaclass=compat.FlaxSerializable):
    """A float32 array `[..., n]` in low precision: a leaf of an optimiser state.

    Args:
      values: bf16 `[..., n]`, or codes of 8 bits, u8 `[..., n]`.
      scales: None, or the scale of each block of 256 codes, f32 `[..., ceil(n / 256)]`.

    Examples:
      >>> tx = low_precision_state(optax.ema(0.5, debias=False), min_size=1)
      >>> _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
      >>> state.inner_state.ema.dtype_name, state.inner_state.ema.to_float32()
      ('bfloat16', Array([0.5, 0.5], dtype=float32))
    """

    values: Any
    scales: Any = None

    @property
    def dtype_name(self) -> str:
        """The dtype as `low_precision_state` names it."""
        return _DTYPES[0] if self.scales is None else _DTYPES[1]

    @jax.jit
    def to_float32(self) -> jax.Array:
        """Return the numbers, f32 `[..., n]`."""
        if self.scales is None:
            return jax.tree.map(lambda x: x.astype(jnp.float32), self.values)
        [scales] = jax.tree.leaves(self.scales)
        return jax.tree.map(lambda x: blocks.decode(x, scales), self.values)


class LowPrecisionState(NamedTuple):
    """The state of `low_precision_state`.

    Attributes:
      inner_state: the state of the wrapped optimiser, in which the leaves that are
        stored in low precision are `LowPrecisionArray`s.
      key: the PRNG key for the next step, typed or raw like the initial key.
    """

    inner_state: optax.OptState
    key: jax.Array


def low_precision_state(
    inner: optax.GradientTransformation | optax.MultiSteps,
    dtype: DTypeLike = "bfloat16",
    *,
    key: jax.Array | None = None,
    rules: Mapping[str, DTypeLike | None] | None = None,
    min_size: int = 4096,
    where: Callable[[str], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Store the moments of an optimiser in bfloat16 or 8 bits.

    The inner optimiser sees float32. Its new state is rounded stochastically: to one of
    the two nearest numbers, unbiased. With `b2 = 0.999`, the second moment of Adam
    decays in a step by less than half the spacing of bfloat16: rounded to nearest, it
    would never decay. For a moment `s`::

      u, x = inner.update(float32(g), float32(s), float32(params), ...)
      s    = x rounded stochastically; bitwise unchanged where x == float32(s)

    `"8bit"` is 8 bits a number and a float32 scale for each block of 256 numbers of
    the last axis. Numbers are spaced by less than 8 % at the block's largest one, and
    wider below. A second moment does not become 0: the step of Adam would explode. One
    NaN makes its block NaN; an inf stays one number. Where gradients in a block differ
    by more than 4 decades, as those of a head over a vocabulary do, an update of Adam
    has an error of 0.23 of itself at 6 decades, of 0.36 at 8 (bfloat16: 0.01). Use
    bfloat16 there by `rules`.

    A leaf of the state is stored in low precision if it is float32, its key path ends
    in that of a parameter of its shape, it has at least `min_size` elements, and it is
    a moment: a field of that name in optax' states (`mu`, `nu`, `trace`, `ema`, ...),
    or what `where` chooses. All else is float32: copies and sums of gradients or
    parameters, of which rounding would leave little; states of optimisers that are not
    optax'; and the moments of `optax.rmsprop(centered=True)`, which are subtracted from
    each other. Rows of fewer than 32 elements are bfloat16 instead of 8 bits.

    Use it inside of `scale_aware` or around it. If it is sharded along the last axis,
    blocks do not cross shards whose size is a multiple of 256. Under `vmap`, members
    with the same key round with the same noise. Call `init` under `jit`, so that the
    float32 state is not allocated.

    Args:
      inner: any optax transformation, or an `optax.MultiSteps`.
      dtype: `"bfloat16"` or `"8bit"`.
      key: a PRNG key, typed or raw; the default is `jax.random.key(0)`. The noise of an
        element is a hash of it, of the step, the leaf's number and the element's index.
      rules: a mapping of patterns to a dtype, or None for float32. A pattern is a
        regular expression over the key paths of parameters, as in `PolicyMap`; the
        first that applies replaces `dtype`.
      min_size: leaves with fewer elements are unchanged.
      where: whether a leaf of the state of `inner` is a moment, by its key path, such
        as `"0/mu/layers/w"`; None: by its name.

    Returns:
      A transformation. `update(grads, state, params, **extra)` takes gradients of any
      float dtypes and returns the updates of `inner`, float32 (float64 stays float64).

    Raises:
      TypeError: `inner` is not an optax transformation; `key` is not a PRNG key;
        `rules` is not a mapping; `where` is not a function.
      ValueError: the dtype is not one of these; a pattern is not a regular expression.
        In `init`: no parameter uses a pattern; a parameter is float16 in a
        `master_weights(storage="remainder")` inside. In `update`: `state` belongs to
        another transformation or has other dtypes; `inner` changes the structure of its
        state.

    Warns:
      UserWarning: in `init`: all of the state stays as it is, because no leaf is a
        moment in float32.

    Examples:
      >>> tx = low_precision_state(optax.adam(1e-3), "8bit")
      >>> params = {"w": jnp.ones((64, 256)), "b": jnp.ones(256)}
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> moments = state.inner_state[0]
      >>> moments.nu["w"].values.dtype, moments.nu["b"].dtype
      (dtype('uint8'), dtype('float32'))
      >>> updates["w"].dtype
      dtype('float32')

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022
      (https://arxiv.org/abs/2110.02861); DeepSeek-AI, DeepSeek-V3 Technical Report,
      2024, section 3.3.3 (https://arxiv.org/abs/2412.19437), moments in bfloat16.
    """
    inner = base.as_transformation(inner)
    least = max(arguments.count(min_size, "min_size", least=0), 1)
    rules = arguments.mapping(rules, "rules", "patterns to dtypes or None")
    pairs = tuple(
        (policy.check_pattern(pattern), None if d is None else _parse_dtype(d))
        for pattern, d in rules.items()
    )
    choice = _Choice(_parse_dtype(dtype), pairs, least, where)
    if key is not None:
        base.check_key(key)
    if where is not None and not callable(where):
        raise TypeError(arguments.wrong("where", "a function of a key path", where))

    def init_fn(params: optax.Params) -> optax.OptState:
        stored, params = base.stored_dtypes(params), trees.cast_at_least_float32(params)
        paths = trees.key_paths(base.fast_params(params))
        policy.check_patterns([pattern for pattern, _ in choice.rules], paths)
        inner_state = with_remainders(inner.init(params), stored)
        inner_state = _store_moments(inner_state, params, choice)
        variables = compat.nnx_class("Variable")
        inner_state = trees.map_nodes(_around_variable, inner_state, variables)
        # The key is copied, because a step may donate its state.
        first_key = jax.random.key(0) if key is None else jnp.copy(key)
        return LowPrecisionState(inner_state, first_key)

    def update_fn(updates, state, params=None, **extra):
        base.check_state(state, LowPrecisionState, "low_precision_state(...)")
        base.check_gradients(updates, params)
        choice.check(state, updates if params is None else params)
        low = state.inner_state
        old = trees.map_nodes(LowPrecisionArray.to_float32, low, LowPrecisionArray)
        grads = trees.cast_at_least_float32(updates)
        new_updates, new = update_in_float32(inner, grads, old, params, extra)
        base.check_structure(new, old, "low_precision_state")

        next_key, seed = rounding.next_seed(state.key)
        leaves, structure = jax.tree.flatten(low, is_compressed)
        stored = [
            _rounded(x, y, rounding.leaf_seed(seed, i)) if is_compressed(x) else y
            for i, (x, y) in enumerate(zip(leaves, jax.tree.leaves(new), strict=True))
        ]
        new = jax.tree.unflatten(structure, stored)
        applied = [x.last_finite for _, x in trees.find(new, ScaleAwareState)]
        if applied:  # if all of them skipped this step, it leaves the key unchanged
            applied = functools.reduce(jnp.logical_or, applied)
            next_key = trees.select_tree(applied, next_key, state.key)
        return new_updates, LowPrecisionState(new, next_key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _store_moments(state: T, params: optax.Params, choice: "_Choice") -> T:

    def is_centered(x):  # `nu - mu**2`, of rounded moments, is noise, and its root NaN
        return type(x).__name__.startswith("ScaleByRStdDev")

    leaves = jax.tree.leaves_with_path(state, is_leaf=is_centered)
    centered = [path for path, x in leaves if is_centered(x)]
    shapes, others = _shapes(params), []

    def is_moment(path, start):
        if choice.where is not None:
            return choice.where(trees.key_path(path))
        field = getattr(path[start - 1], "name", None) if start else None
        return field in _MOMENTS and not any(path[: len(c)] == c for c in centered)

    def store(path, x):
        start, param = _find_param(path, x, shapes)
        dtype = choice.dtype_of(param, x)
        is_wide = param is not None and x.ndim and x.dtype == jnp.float64
        if dtype is None and not is_wide:
            return x
        if dtype is not None and is_moment(path, start):
            return compress(x, dtype)
        others.append(trees.key_path(path))
        return x

    new = jax.tree.map_with_path(store, state)
    if others and not trees.find(new, LowPrecisionArray):
        reason = "by where=" if choice.where else "by their names in optax"
        warnings.warn(
            f"low_precision_state stores all of the state as it is: {reason}, none of "
            f"{others[:4]} is a moment in float32. Choose those that are averages: "
            "where=lambda path: ...",
            stacklevel=3,
        )
    return new


@functools.partial(jax.jit, static_argnames="dtype")  # traced once for each shape
def compress(x: jax.Array, dtype: str) -> LowPrecisionArray:
    """Round an f32 array `[..., n]` to nearest."""
    # Otherwise XLA would compute the codes of constant zeros when it compiles.
    x = x + jax.lax.optimization_barrier(jnp.float32(-0.0))
    if dtype == "bfloat16":
        return LowPrecisionArray(x.astype(jnp.bfloat16))
    return LowPrecisionArray(*blocks.encode(x, jnp.uint32(2**31)))


@jax.jit
def _rounded(
    old: LowPrecisionArray, x: jax.Array, seed: jax.Array
) -> LowPrecisionArray:
    """Return `x` stochastically rounded; `old` in each block that did not change."""
    noise = rounding.noise_like(x, seed)
    arrays, structure = jax.tree.flatten(old)
    if old.scales is None:
        rounded = rounding.round_stochastically(x, jnp.bfloat16, noise)
        new = [rounded.astype(jnp.bfloat16)]
    else:
        new = blocks.encode(x, noise, tuple(arrays))
    return jax.tree.unflatten(structure, new)


def _around_variable(variable: Any) -> Any:
    """Put an array in low precision around its variable of nnx.

    `nnx.Optimizer` writes each of its variables as one array: it would write a
    `State` over a `LowPrecisionArray` in a variable.
    """
    array = variable.get_raw_value()
    if not is_compressed(array):
        return variable
    scales = array.scales
    if scales is not None:
        # A shard of the numbers may be smaller than a block, which has one scale.
        names = {"out_sharding", "optimizer_sharding"} & variable.get_metadata().keys()
        scales = variable.replace(scales, **dict.fromkeys(names))
    return LowPrecisionArray(variable.replace(array.values), scales)


def into_variables(state: T) -> T:
    """Put the arrays in low precision into their variables of nnx again."""

    def put(x: LowPrecisionArray) -> object:
        array = LowPrecisionArray(*jax.tree.leaves(x))
        return jax.tree.unflatten(jax.tree.structure(x.values), [array])

    return trees.map_nodes(put, state, LowPrecisionArray)


def is_compressed(x: object) -> TypeGuard[LowPrecisionArray]:
    return isinstance(x, LowPrecisionArray)


@dataclasses.dataclass(frozen=True)
class _Choice:
    dtype: str  # of parameters that no rule matches
    rules: tuple[tuple[str, str | None], ...]  # a pattern, and a dtype or None
    min_size: int  # leaves with fewer elements are not compressed
    where: Callable[[str], bool] | None  # which leaves are moments, by their key paths

    def dtype_of(self, param: str | None, x: jax.Array) -> str | None:
        """Return the dtype for a leaf of the state, or None if it is unchanged."""
        if param is None or x.dtype != jnp.float32 or x.size < self.min_size:
            return None
        dtype = self._dtype_at(param) if x.ndim else None
        return "bfloat16" if dtype == "8bit" and x.shape[-1] < _SHORTEST_ROW else dtype

    def _dtype_at(self, param: str) -> str | None:
        index = policy.first_match([pattern for pattern, _ in self.rules], param)
        return self.dtype if index is None else self.rules[index][1]

    def check(self, state: LowPrecisionState, params: optax.Params) -> None:
        """Raise if a leaf has another dtype than this choice gives.

        Sizes are not checked: in `shard_map`, those of a leaf are smaller than they
        were in `init`.
        """
        shapes = _shapes(params)
        leaves = jax.tree.leaves_with_path(state.inner_state, is_leaf=is_compressed)
        for path, x in leaves:
            if not is_compressed(x):
                continue
            [(rest, values)] = jax.tree.leaves_with_path(x.values)
            _, param = _find_param((*path, *rest), values, shapes)
            expected = {self.dtype, *(d for _, d in self.rules)}
            if param is not None:
                expected = {self._dtype_at(param)}
            if "8bit" in expected and values.shape[-1] < _SHORTEST_ROW:
                expected.add("bfloat16")
            if x.dtype_name not in expected:
                names = " or ".join(str(d or "float32") for d in expected)
                raise ValueError(
                    "Expected the state of this low_precision_state(...), got one of "
                    f"other dtypes or rules: {trees.key_path(path)!r} is "
                    f"{x.dtype_name}, expected {names}. Call init again, or "
                    "jmp_lite.checkpoint.restore(..., cast=True) to convert it."
                )


def _shapes(params: optax.Params) -> _Shapes:
    """Return the shapes of floating parameters by their key paths."""
    leaves = jax.tree.leaves_with_path(base.fast_params(params))
    return {trees.key_path(path): x.shape for path, x in leaves if trees.is_castable(x)}


def _find_param(path: KeyPath, x: Any, shapes: _Shapes) -> tuple[int, str | None]:
    """Return where the path of a parameter of this shape begins in one, and it."""
    for start in range(len(path) + 1 if trees.is_array(x) else 0):  # the longest
        param = trees.key_path(path[start:])
        if shapes.get(param) == x.shape:
            return start, param
    return 0, None


def _parse_dtype(dtype: Any) -> str:
    name = dtype
    if not isinstance(dtype, str):
        with contextlib.suppress(TypeError, ValueError):
            name = np.dtype(dtype).name
    remedy = '8 bits are "8bit".' if name in ("float8", "int8", "uint8") else ""
    return arguments.one_of(name, "dtype", _DTYPES, remedy)
