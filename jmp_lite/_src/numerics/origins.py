"""Where numbers that are not finite come from, carried beside every value of a run.

An origin is an i32 vector `[6]`: how many equations ran before, the site, and the
iterations of the loops around it. The origin of a value is that of the earliest of its
non-finite numbers, `NONE` if all are finite.

In float16, 1e5 is inf: arithmetic with a half constant that is not finite makes the
number. A choice or a mask is intended, and so is a constant of float32.
"""

from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_lite._src import compat, dtypes
from jmp_lite._src.jaxprs.primitives import Fact, degrees, facts
from jmp_lite._src.jaxprs.primitives import cases as cases_of
from jmp_lite._src.jaxprs.tracing import Traced
from jmp_lite._src.jaxprs.walk import Equation, Walker
from jmp_lite._src.numerics.runs import (
    Array,
    Observer,
    Operation,
    Run,
    is_floating,
    look,
)

# How many iteration numbers an origin has, and how many operands a report.
_LOOPS = 4
_OPERANDS = 4

NEVER = 2**31 - 1
NONE = np.array([NEVER, *[0] * (1 + _LOOPS)], np.int32)
# The times of what came in, after everything that is computed: of constants in half,
# without a finite number or with some, and of what may be intended.
_WHOLE, _PART, _LATE = NEVER - 1, NEVER - 2, NEVER - 3
_INTENDED = np.array([_LATE, *[NEVER] * (1 + _LOOPS)], np.int32)
# Sites below zero are arguments, and this one any constant.
CONSTANT = -(2**31)
# Set in the site of an operation that made its numbers of a constant.
BY_CONSTANT = 2**30
_BY_CONSTANT = np.array([0, BY_CONSTANT, *[0] * _LOOPS], np.int32)

# Per operand, the smallest and the largest number in it.
OperandRanges = tuple[tuple[float, float], ...]
# An array, and its origin.
Operand = tuple[Array, Array]


def watch(traced: Traced) -> tuple[list[Array], Array]:
    """Run a traced function inside `jit`: its outputs, the earliest origin of them."""
    jaxpr, consts = compat.open_jaxpr(traced.closed), compat.consts_of(traced.closed)
    cells = [(x, of_argument(x, i)) for i, x in enumerate(traced.args)]
    outs, _ = _Watcher().run(jaxpr, consts, cells)
    origin = first([jnp.asarray(NONE), *(tag for _, tag in outs)])
    return [x for x, _ in outs], origin


def find(traced: Traced, in_half: bool) -> tuple[np.ndarray, OperandRanges]:
    """Observe a traced function on the host: the earliest origin, the ranges there.

    `in_half`: operations in half are origins, too, if no result has their numbers.
    """
    jaxpr, consts = compat.open_jaxpr(traced.closed), compat.consts_of(traced.closed)
    observer = _OriginObserver()
    run = Run(observer)
    cells = [run.cell(x, of_argument(x, i)) for i, x in enumerate(traced.args)]
    outs, _ = run.run(jaxpr, consts, cells)
    inside = observer.in_half if in_half else NONE
    origin = np.asarray(first([inside, *(cell.tag for cell in outs)]))
    return origin, observer.ranges.get(int(origin[0]), ())


class _Origins:
    def tag_constant(self, value: Array) -> Array:
        is_half = dtypes.is_half(jax.typeof(value).dtype)
        times = (_PART, _WHOLE) if is_half else (_LATE, _LATE)
        return _of_input(value, CONSTANT, "isfinite", *times)

    def stack(self, tags: Sequence[Array] | Array) -> Array:
        return first(tags)


class _Watcher(_Origins, Walker):
    def observe(self, equation: Equation) -> list[Array]:
        here = _here(equation, *equation.moment)
        operands, mixes = _operands(equation)
        return [
            _origin_in_program(x, operands, mixes, here) if is_floating(x) else NONE
            for x in equation.outs
        ]


class _OriginObserver(_Origins, Observer):
    def __init__(self):
        # By `eqn_count`, of operations that are an origin.
        self.ranges: dict[int, OperandRanges] = {}
        self.in_half = NONE  # the earliest origin that is in half

    def observe(self, op: Operation) -> list[Array]:
        return [self._origin(op, out) for out in op.outs]

    def _origin(self, op: Operation, out: Array | None) -> Array:
        """Return the origin of one result of an operation, by those of its operands."""
        if out is None or _library(out).isfinite(out).all():
            return NONE
        here = np.asarray(_here(op, op.eqn_count, op.loops))
        found = np.asarray(_origin_of(out, *_operands(op), here))
        if found[0] == op.eqn_count:
            floats = [x for x in op.ins if x is not None and is_floating(x)]
            self.ranges[op.eqn_count] = tuple(map(_range, floats[:_OPERANDS]))
            # Not by a constant: an infinite one may be where a maximum starts.
            if dtypes.is_half(out.dtype) and found[1] == op.site:
                self.in_half = first([self.in_half, found])
        return found


def of_argument(value: Array, index: int) -> Array:
    """Return the origin of the numbers of an argument, by its index.

    A NaN precedes everything that runs, and the first argument with one precedes the
    others. An inf may be a mask: it comes last, after everything that runs.
    """
    return _of_input(value, -1 - index, "isnan", index - _LATE, _LATE)


def _of_input(value: Array, site: int, test: str, when: int, otherwise: int) -> Array:
    """Return the origin of an input: its time, `when` a number of it passes a test."""
    if not is_floating(value) or _is_finite_number(value):
        return NONE
    value = look(value)
    xp = _library(value)
    time = xp.where(getattr(xp, test)(value).any(), when, otherwise)
    return xp.where(xp.isfinite(value).all(), NONE, _origin(time, site, ()))


def _origin(eqn_count: ArrayLike, site: int, loops: Sequence[ArrayLike]) -> Array:
    padded = [eqn_count, site, *loops, *[0] * _LOOPS][: 2 + _LOOPS]
    xp = _library(*padded)
    return xp.stack([xp.asarray(x, np.int32) for x in padded])


def _here(
    op: Equation | Operation, eqn_count: ArrayLike, loops: Sequence[ArrayLike]
) -> Array:
    """Return the origin of what an operation makes."""
    powers = degrees(op.eqn.primitive.name, op.eqn.params)
    pairs = zip(op.eqn.invars, powers, strict=False)
    read = [v for v, d in pairs if d < 0 and compat.is_literal(v)]
    by_zero = any(v.val == 0 and dtypes.is_half(compat.aval_of(v).dtype) for v in read)
    return _origin(eqn_count, op.site | by_zero * BY_CONSTANT, loops)


def first(origins: Sequence[Array] | Array) -> Array:
    """Return the earliest of origins, a sequence or an array `[n, 6]`."""
    if not len(origins):
        return NONE
    is_stacked = isinstance(origins, jax.Array)
    stacked = origins if is_stacked else _library(*origins).stack(origins)
    return stacked[_library(stacked).argmin(stacked[:, 0])]


def _operands(op: Equation | Operation) -> tuple[list[Operand], int | None]:
    """Return the floating operands that reach the result, and their origins.

    And from which time on a constant among them makes the numbers of the result: None
    if there is no other operand, as what is made of a constant alone is a constant.
    """
    name, pairs = op.eqn.primitive.name, list(zip(op.ins, op.tags, strict=True))
    if cases := cases_of(name, pairs):
        which = op.ins[0]
        pairs = [(_chosen(which, i, x), tag) for i, (x, tag) in enumerate(cases)]
    pairs = [(x, tag) for x, tag in pairs if x is not None and is_floating(x)]
    operands = [(x, tag) for x, tag in pairs if not _is_finite_number(x)]
    if len(pairs) < 2:
        return operands, None
    if degrees(name, op.eqn.params):
        return operands, _PART
    # A constant with some finite numbers may be a mask, which is added.
    is_arithmetic = facts(name) & (Fact.BROADCASTS | Fact.LIMITS) == Fact.BROADCASTS
    return operands, _WHOLE if is_arithmetic else NEVER


def _chosen(which: Array, i: int, case: Array | None) -> Array | None:
    """Return an operand of a `select_n` with 0 wherever it is not selected."""
    if case is None or not is_floating(case):
        return case
    xp = _library(which, case)
    return xp.where(which.astype(np.int32) == i, case, xp.zeros_like(case))


def _origin_of(
    out: Array, operands: Sequence[Operand], mixes: int | None, here: Array
) -> Array:
    xp, shape = _library(out, here, *(x for x, _ in operands)), np.shape(out)
    bad, nan = ~xp.isfinite(out), xp.isnan(out)
    # Element by element, where the shapes are equal: numbers elsewhere do not matter.
    seen = [(x if np.shape(x) == shape else _summary(x)) for x, _ in operands]
    made, made_nan, arrived = bad, nan, []
    for x, (_, tag) in zip(seen, operands, strict=True):
        is_finite = xp.isfinite(x)
        if mixes is not None:
            is_constant = (mixes <= tag[0]) & (tag[0] < NEVER)
            is_finite = is_finite | is_constant
            here = xp.where(is_constant, here | _BY_CONSTANT, here)
        made, made_nan = made & is_finite, made_nan & ~xp.isnan(x)
        arrived.append(bad & ~is_finite)
    is_bad, is_made, *has_arrived = _any([bad, made | made_nan, *arrived], xp)
    tags = [
        xp.where(has, tag, NONE)
        for has, (_, tag) in zip(has_arrived, operands, strict=True)
    ]
    earlier = first([NONE, *tags])
    # An inf that came in may be a mask: the first operation that makes one precedes it.
    is_here = (earlier[0] == NEVER) | ((earlier[0] >= _LATE) & is_made)
    if mixes is not None:
        earlier = xp.minimum(earlier, _INTENDED)
    return xp.where(is_bad, xp.where(is_here, here, earlier), NONE)


# Traced once for each shape.
_origin_in_program = jax.jit(_origin_of, static_argnums=2)


def _summary(x: Array) -> Array:
    """Return NaN if an array has one, else inf if it has one, else 0."""
    xp = _library(x)
    is_nan, is_bad = _any([xp.isnan(x), ~xp.isfinite(x)], xp)
    return xp.where(is_nan, np.nan, xp.where(is_bad, np.inf, 0.0))


def _any(masks: list[Array], xp: ModuleType) -> Sequence[ArrayLike]:
    """Return which masks, all of one shape, hold anywhere."""
    if xp is np:
        return [mask.any() for mask in masks]
    # One reduction of all: XLA on the CPU reads an array once for each.
    false = [np.bool_(False)] * len(masks)
    return jax.lax.reduce(masks, false, _either, range(jnp.ndim(masks[0])))


def _either(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    return [x | y for x, y in zip(a, b, strict=True)]


def _range(x: Array) -> tuple[float, float]:
    """Return the smallest and the largest number, or magnitude, in an array."""
    xp = _library(x)
    number = xp.abs(x) if xp.iscomplexobj(x) else xp.asarray(x)
    if not number.size:
        return (np.inf, -np.inf)
    return float(number.min()), float(number.max())


def _library(*arrays: ArrayLike) -> ModuleType:
    """Return `jax.numpy` if one of these is an array of JAX, else NumPy."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def _is_finite_number(x: ArrayLike) -> bool:
    """Return whether this is a number written in the program, and finite."""
    is_literal = not isinstance(x, jax.Array) and np.ndim(x) == 0
    return is_literal and bool(np.isfinite(np.asarray(x)))
