"""Master weights: parameters stored in half, optimised in float32."""

import functools
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath

from jmp_lite._src import arguments, compat, dtypes, trees
from jmp_lite._src.optimizers import base, remainder, rounding

T = TypeVar("T")


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
      inner_state: the state of the wrapped optimiser.
      masters: the parameters in float32 (float64 stays float64), in the same tree
        structure. Leaves that are not floating are not used.
    """

    inner_state: optax.OptState
    masters: optax.Params


class MasterRemaindersState(NamedTuple):
    """The state of `master_weights` with `storage="remainder"`.

    Attributes:
      inner_state: the state of the wrapped optimiser.
      remainders: u16 of the shape of each parameter stored in bf16, the low bits of its
        float32 master; parameters in float32 and float64 as they are. In the tree
        structure of the parameters. Leaves that are not floating are not used.
    """

    inner_state: optax.OptState
    remainders: optax.Params


def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    storage: Literal["float32", "remainder"] = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Train parameters that are stored in half precision with float32 copies of them.

    An update smaller than half the spacing of half-precision numbers is lost when it is
    added to a parameter. The float32 masters accumulate it. For parameters `p` in half
    precision and their masters `m`::

      u, inner = inner.update(float32(g), inner_state, m, ...)
      m        = m + u
      update   = float32(half(m)) - float32(p), so that apply_updates returns half(m)

    After each step the parameters equal the rounded masters. Parameters stored in
    float32 use the update `u` and equal their masters; `optax.partition` avoids the
    copy of them.

    Use it around `scale_aware` or inside of it, and last in a chain. Transformations
    between the two must keep the tree of parameters, as `optax.MultiSteps`,
    `partition`, `masked` and `inject_hyperparams` do.

    Parameters that are set between two steps are kept: pretrained weights, averages,
    projections. Where a parameter in half precision is not the rounding of its master,
    the master continues from the parameter, element by element.

    With `storage="remainder"`, the state holds 16 bits for each bf16 parameter, which
    restore its float32 master: 2 bytes instead of 4. Masters and inner state are those
    of `storage="float32"`, bit for bit, but parameters are rounded with ties away from
    zero, not to even; and the masters of parameters that are set between two steps have
    the low bits left from the old ones, until `init` is called again.

    Args:
      inner: any optax transformation, or an `optax.MultiSteps`.
      storage: `"float32"` or, for parameters in bf16, `"remainder"`. Parameters in
        float32 and float64 are stored alike by both.

    Returns:
      A transformation. `update(grads, state, params, **extra)` takes gradients of any
      float dtypes and returns float32 updates (float64 stays float64), for
      `optax.apply_updates`. The updates are exact, with one exception: if a parameter
      shrinks in one step to below `2**-12` (f16) or `2**-15` (bf16) of itself, but not
      to 0, float32 cannot represent its update. The master then continues from the
      parameter, which changes it by at most `2**-23` of the parameter before the step.

    Raises:
      TypeError: `inner` is not an optax transformation.
      ValueError: `storage` is unknown. In `init`, with `storage="remainder"`: a
        parameter is float16. In `update`: there are no parameters, the gradients have
        another structure, or `state` belongs to another transformation, storage or
        dtype of parameters.

    Examples:
      >>> tx = master_weights(optax.sgd(2.0**-9))
      >>> params = jnp.ones([], jnp.bfloat16)  # the next smaller number is 1 - 2**-8
      >>> state = tx.init(params)
      >>> for _ in range(4):
      ...     updates, state = tx.update(jnp.bfloat16(1.0), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params), float(state.masters), params.dtype
      (0.9921875, 0.9921875, dtype(bfloat16))
      >>> tx = master_weights(optax.sgd(2.0**-9), storage="remainder")
      >>> tx.init(params).remainders.dtype
      dtype('uint16')

    References:
      Micikevicius et al., Mixed Precision Training, 2018, section 3.1
      (https://arxiv.org/abs/1710.03740); apex' FP16_Optimizer and opt level O2,
      and its DistributedFusedAdam with `store_param_remainders`.
    """
    inner = base.as_transformation(inner)
    arguments.one_of(storage, "storage", ("float32", "remainder"))
    kind, owner = MasterWeightsState, "master_weights(...)"
    if storage == "remainder":
        kind, owner = MasterRemaindersState, 'master_weights(..., storage="remainder")'

    def init_fn(params: optax.Params) -> optax.OptState:
        def master(p):
            m = base.strongly_typed(trees.cast_at_least_float32(p))
            if isinstance(m, np.ndarray) and trees.is_castable(m):
                return jnp.array(m)  # of the dtype that a step gives it
            # Copied, because a step may donate both its state and the parameters.
            return jnp.copy(m) if m is p and isinstance(m, jax.Array) else m

        masters = jax.tree.map(master, params)
        # For the same reason, the inner state must not share buffers with the masters.
        state = trees.copy_shared_buffers(kind(inner.init(masters), masters))
        # Inside of scale_aware, the parameters are float32 here: it does this again.
        return with_remainders(state, base.stored_dtypes(params))

    def update_fn(updates, state, params=None, **extra):
        base.check_state(state, kind, owner)
        old, half_dtypes = base.check_update(updates, state, params)
        in_remainders = kind is MasterRemaindersState

        def half_dtype(path):
            return half_dtypes.get(jax.tree_util.keystr(path))

        def master(path, stored, p):
            dtype = half_dtype(path)
            if in_remainders and trees.is_castable(p):
                _check_stored(path, stored, p.dtype if dtype is None else dtype)
            if dtype is None:  # a parameter stored in float32 is its own master
                return p
            if in_remainders:  # the parameter may be cast to float32
                return _join(p.astype(jnp.bfloat16), stored)
            return _master_of(p, stored, dtype)

        def step(path, stored, p, m, u):
            if u is None or stored is None or not trees.is_castable(m):
                return _Stepped(u, stored)
            m, dtype = m + jnp.asarray(u, m.dtype), half_dtype(path)
            if dtype is None:
                return _Stepped(u, m)
            if not in_remainders:
                return _Stepped(_update_to_weight(p, m, dtype), m)
            # A parameter and its remainder must come from the same bits.
            m = compat.computed_once(m)
            u = _update_to_weight(p, m)
            return _Stepped(u, _remainder_after(p, m, u))

        _, stored = state
        base.check_params(params, stored)
        masters = base.map_with_none(master, stored, params)
        grads = trees.cast_at_least_float32(updates)
        steps, inner_state = inner.update(grads, old, masters, **extra)
        inner_state = base.with_dtypes_of(inner_state, old)
        stepped = base.map_with_none(step, stored, params, masters, steps)
        new_updates = trees.map_nodes(lambda x: x.update, stepped, _Stepped)
        stored = trees.map_nodes(lambda x: x.stored, stepped, _Stepped)
        return new_updates, base.next_state(state, inner_state, stored)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Stepped(NamedTuple):
    """The update of a parameter, and what is stored of its new master."""

    update: jax.Array | None
    stored: jax.Array | None


@functools.partial(jax.jit, static_argnames="dtype")  # traced once for each shape
def _master_of(p: jax.Array, m: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the master of a parameter: the parameter where it is not `m` rounded."""
    p = p.astype(m.dtype)
    # NaN is no rounding: a NaN parameter stays one, a NaN master ends with it.
    return jnp.where(p == dtypes.round_to(m, dtype), m, p)


@functools.partial(jax.jit, static_argnames="dtype")  # traced once for each shape
def _update_to_weight(
    p: jax.Array, m: jax.Array, dtype: np.dtype | None = None
) -> jax.Array:
    """Return the update from `p` to `m` rounded to `dtype`, or as `split` does, f32."""
    weight = remainder.split(m)[0] if dtype is None else dtypes.round_to(m, dtype)
    return rounding.update_between(p.astype(m.dtype), weight.astype(m.dtype))


def with_remainders(states: T, stored: dict[str, np.dtype]) -> T:
    """Replace masters of bf16 parameters in states from `init` by remainders of 0."""

    def remainder_of(path, m):
        dtype = stored.get(jax.tree_util.keystr(path))
        if dtype == jnp.float16:
            raise ValueError(
                'master_weights(storage="remainder") got a float16 parameter at '
                f"{trees.key_path(path)!r}: with 5 bits of exponent it does not hold "
                "the exponent of its float32 master. Store it in bfloat16, or use "
                'storage="float32".'
            )
        return jnp.zeros_like(m, jnp.uint16) if dtype == jnp.bfloat16 else m

    def replace(state):
        remainders = jax.tree.map_with_path(remainder_of, state.remainders)
        return state._replace(remainders=remainders)

    return trees.map_nodes(replace, states, MasterRemaindersState)


def _check_stored(path: KeyPath, stored: jax.Array, dtype: np.dtype) -> None:
    """Raise unless a remainder is stored for a bf16 parameter, and for no other."""
    is_remainder = stored.dtype == jnp.uint16
    if dtype == jnp.float16 or is_remainder != (dtype == jnp.bfloat16):
        raise ValueError(
            f"In master_weights, the parameter {trees.key_path(path)!r} is "
            f"{dtype}, and was another dtype in `init`. Call `init` again."
        )


_join = jax.jit(remainder.join)  # traced once for each shape


@jax.jit
def _remainder_after(p: jax.Array, m: jax.Array, update: jax.Array) -> jax.Array:
    """Return the remainder of a master, or 0 if the update misses its weight, u16."""
    weight, low = remainder.split(m)
    reached = (p.astype(jnp.float32) + update).astype(jnp.bfloat16)  # apply_updates
    # Of the bits, because some devices take subnormals for 0.
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (reached, weight))
    return jnp.where(jnp.equal(*bits), low, jnp.zeros_like(low))
