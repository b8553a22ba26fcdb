"""Where numbers that are not finite come from, carried beside every value of a run.

An origin is an i32 vector `[6]`: when, which site, and the iterations of the loops
around it. A value has one, that of the earliest of its numbers that are not finite; a
value that is finite again has none.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from jmp_lite import compat
from jmp_lite.autocast.rewrite import Traced
from jmp_lite.numerics.walk import Equation, Walker

# How many iteration numbers an origin has, and how many operands a report.
_LOOPS = 4
_OPERANDS = 4

# The origin of a value that is finite.
NEVER = 2**31 - 1
_NONE = np.array([NEVER, *[0] * (1 + _LOOPS)], np.int32)
# When something came in that may be meant to be there: after all that is made.
_LATE = NEVER - 1
# Sites below zero are arguments, and this one any constant.
CONSTANT = -(2**31)

_NO_LOW = np.full(_OPERANDS, np.inf, np.float32)


def find_origin(traced: Traced) -> tuple[list[Any], jax.Array]:
    """Run a traced function; return its outputs, and the earliest origin among them."""
    outs, origins, _ = _run(_Origins(), traced)
    return outs, _first(jnp.stack([jnp.asarray(_NONE), *origins]))


def find_ranges(traced: Traced, origin: jax.Array) -> tuple[tuple[float, float], ...]:
    """Run a traced function; return the ranges of the operands at an origin."""
    _, _, records = _run(_Ranges(origin), traced)
    lows, highs = (x[int(origin[1])].tolist() for x in records)
    pairs = zip(lows, highs, strict=True)
    return tuple((low, high) for low, high in pairs if not low > high)


class _Origins(Walker):
    """Carries the origin of non-finite numbers beside each value."""

    def observe(self, equation: Equation) -> tuple[Sequence[Any], Any]:
        moment = equation.moment
        here = (moment.clock, equation.site, *moment.loops[:_LOOPS])
        operands = _operands(equation)
        out_tags = [
            _origin_of(out, operands, here) if _can_overflow(out) else _NONE
            for out in equation.outs
        ]
        return out_tags, self.record(equation, here)

    def record(self, equation: Equation, here: Any) -> Any:
        del equation, here
        return ()

    def tag_constant(self, value: Any) -> Any:
        return _brought_along(value, CONSTANT, _LATE)

    def unstack(self, tag: Any, length: int) -> Any:
        return jnp.broadcast_to(tag, (length, *tag.shape))

    def stack(self, tags: Any) -> Any:
        return _first(tags)


class _Ranges(_Origins):
    """Also records the operands' ranges at one origin."""

    def __init__(self, target: jax.Array):
        self.target = target

    def record(self, equation: Equation, here: Any) -> Any:
        floats = [x for x in equation.ins if _can_overflow(x)]
        return _ranges_at(floats[:_OPERANDS], here, self.target)

    def empty(self) -> Any:
        return _NO_LOW, -_NO_LOW

    def merge(self, a: Any, b: Any) -> Any:
        # NaN, which an operand may hold, passes through both.
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])


def _run(walker: _Origins, traced: Traced) -> tuple[list[Any], list[Any], Any]:
    """Return the outputs of a traced function, their origins, and the records."""
    jaxpr, consts = compat.open_jaxpr(traced.closed), compat.consts_of(traced.closed)
    # The first of several NaN is at fault: earlier than all that runs.
    tags = [_brought_along(x, -1 - i, i - _LATE) for i, x in enumerate(traced.args)]
    return walker.run(jaxpr, consts, traced.args, tags)[:3]


def _operands(equation: Equation) -> list[tuple[Any, Any]]:
    """Return the floating operands that reach the result, and their origins."""
    pairs = list(zip(equation.ins, equation.tags, strict=True))
    if equation.eqn.primitive.name == "select_n":
        (which, _), *cases = pairs
        pairs = [(_chosen(which, i, x), tag) for i, (x, tag) in enumerate(cases)]
    return [
        (x, tag) for x, tag in pairs if _can_overflow(x) and not _is_finite_number(x)
    ]


@jax.jit
def _chosen(which: Any, i: Any, case: Any) -> jax.Array:
    if not _can_overflow(case):
        return case
    return jnp.where(which.astype(jnp.int32) == i, case, jnp.zeros_like(case))


@jax.jit
def _origin_of(out: Any, operands: Any, here: Any) -> jax.Array:
    """Return the origin of the non-finite numbers of a result."""
    shape = jnp.shape(out)
    bad, nan = ~jnp.isfinite(out), jnp.isnan(out)
    # Element by element, where shapes allow it: what is elsewhere has not come here.
    seen = [(x if jnp.shape(x) == shape else _summary(x)) for x, _ in operands]
    made, made_nan, arrived = bad, nan, []
    for x in seen:
        made, made_nan = made & jnp.isfinite(x), made_nan & ~jnp.isnan(x)
        arrived.append(bad & ~jnp.isfinite(x))
    is_bad, is_made, *has_arrived = _any([bad, made | made_nan, *arrived])
    tags = [
        jnp.where(has, tag, _NONE)
        for has, (_, tag) in zip(has_arrived, operands, strict=True)
    ]
    earlier = _first(jnp.stack([jnp.asarray(_NONE), *tags]))
    # What nothing made, and may be a mask, yields to the first that an operation made.
    is_here = (earlier[0] == NEVER) | ((earlier[0] == _LATE) & is_made)
    return jnp.where(is_bad, jnp.where(is_here, _as_origin(here), earlier), _NONE)


def _summary(x: Any) -> jax.Array:
    """Return a number that is NaN or inf if one in an array is, else 0."""
    is_nan, is_bad = _any([jnp.isnan(x), ~jnp.isfinite(x)])
    return jnp.where(is_nan, jnp.nan, jnp.where(is_bad, jnp.inf, 0.0))


def _any(masks: list[Any]) -> list[Any]:
    """Return which masks, all of one shape, hold anywhere: one reduction of all."""
    false = [np.bool_(False)] * len(masks)
    return jax.lax.reduce(masks, false, _either, range(jnp.ndim(masks[0])))


def _either(a: Any, b: Any) -> list[Any]:
    return [x | y for x, y in zip(a, b, strict=True)]


@jax.jit
def _ranges_at(operands: Any, here: Any, origin: Any) -> Any:
    lows, highs = (jnp.asarray(x) for x in (_NO_LOW, -_NO_LOW))
    is_here = (_as_origin(here) == origin).all()
    for i, x in enumerate(operands):
        number = jnp.abs(x) if jnp.iscomplexobj(x) else jnp.asarray(x)
        if number.size:
            low = number.min().astype(jnp.float32)
            high = number.max().astype(jnp.float32)
            lows = lows.at[i].set(jnp.where(is_here, low, jnp.inf))
            highs = highs.at[i].set(jnp.where(is_here, high, -jnp.inf))
    return lows[None], highs[None]


def _brought_along(value: Any, index: int, when: int) -> Any:
    """Return the origin of what an argument or a constant brings along.

    A NaN in an argument is at fault before anything runs. An inf may be a mask, and is
    at fault only if it reaches a result by itself: last of all.
    """
    if not _can_overflow(value) or _is_finite_number(value):
        return _NONE
    return _brought(value, index, when)


@jax.jit
def _brought(value: Any, index: Any, when: Any) -> jax.Array:
    when = jnp.where(jnp.isnan(value).any(), when, _LATE)
    origin = jnp.asarray(_NONE).at[0].set(when).at[1].set(index)
    return jnp.where(jnp.isfinite(value).all(), _NONE, origin)


def _as_origin(here: Any) -> jax.Array:
    padded = [*here, *[0] * (2 + _LOOPS - len(here))]
    return jnp.stack([jnp.asarray(x, jnp.int32) for x in padded])


def _first(origins: jax.Array) -> jax.Array:
    """Return the earliest of origins `[n, 6]`."""
    if not origins.shape[0]:
        return jnp.asarray(_NONE)
    return origins[jnp.argmin(origins[:, 0])]


def _is_finite_number(x: Any) -> bool:
    """Return whether this is a number of the program, and finite."""
    is_literal = not isinstance(x, jax.Array) and np.ndim(x) == 0
    return is_literal and bool(np.isfinite(np.asarray(x)))


def _can_overflow(x: Any) -> bool:
    aval = jax.typeof(x)
    is_array = isinstance(aval, ShapedArray)
    return is_array and jnp.issubdtype(aval.dtype, jnp.inexact)
