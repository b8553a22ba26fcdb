"""The operation that made the first NaN or inf: its layer, its line, its operands.

Every value carries the origin of its non-finite numbers. An operation is the origin if
it makes one where all its operands are finite, or a NaN from an inf that no operation
made (a `-inf` mask). A value that is finite again has no origin, so neither a mask that
reaches no result nor a skipped step is reported.

An origin is an i32 vector `[6]`: how many equations ran before, the site, and the
iterations of the loops around it. The origin of a value is that of the earliest of its
non-finite numbers, `_NONE` if all are finite.

In float16, 1e5 is inf: arithmetic with a half constant that is not finite makes the
number. A choice or a mask is intended, and so is a constant of float32.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_lite._src import arguments, compat, dtypes, reports, trees
from jmp_lite._src.autocast.checks import refuse_modules
from jmp_lite._src.jaxprs.primitives import Fact, cases, degrees, facts
from jmp_lite._src.jaxprs.sites import Site, sites
from jmp_lite._src.jaxprs.tracing import Traced, is_traceable, trace
from jmp_lite._src.jaxprs.walk import Equation, Walker
from jmp_lite._src.numerics import runs
from jmp_lite._src.numerics.report import place
from jmp_lite._src.numerics.runs import Array, Operation, is_floating

# How many iteration numbers an origin has, and how many operands a report.
_LOOPS = 4
_OPERANDS = 4

_NEVER = 2**31 - 1
_NONE = np.array([_NEVER, *[0] * (1 + _LOOPS)], np.int32)
# The times of what came in, after everything that is computed: of constants in half,
# without a finite number or with some, and of what may be intended.
_WHOLE, _PART, _LATE = _NEVER - 1, _NEVER - 2, _NEVER - 3
_INTENDED = np.array([_LATE, *[_NEVER] * (1 + _LOOPS)], np.int32)
# Sites below zero are arguments, and this one any constant.
_CONSTANT = -(2**31)
# Set in the site of an operation that made its numbers of a constant.
_OF_CONSTANT = 2**30
_BY_CONSTANT = np.array([0, _OF_CONSTANT, *[0] * _LOOPS], np.int32)

# An array, and its origin.
_Operand = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class NonFinite(reports.Report):
    """The first operation that made a NaN or inf which reached a result.

    Args:
      primitive: its name, as a jaxpr prints it; `"argument"` if the number came in with
        an argument, `"constant"` if the program holds it.
      layer: its name-scope path, `""` outside any scope; the key path of an argument.
      line: `file:line` of the user's code.
      direction: `"forward"` or `"backward"`.
      dtype: that of its result.
      iterations: those of the loops around it, outermost first, counted from 0; the
        index of the row for any `scan`, one in reverse included.
      operands: the smallest and the largest number of each floating operand; empty from
        `NonFiniteTracker.report`.
      by_constant: whether an operand is a constant that is not finite in half.

    Examples:
      >>> import jax.numpy as jnp
      >>> found = first_nonfinite(lambda x: jnp.exp(x) - 1)(jnp.float32(100.0))
      >>> found.primitive, found.dtype, found.operands
      ('exp', 'float32', ((100.0, 100.0),))
    """

    primitive: str
    layer: str
    line: str
    direction: str
    dtype: str
    iterations: tuple[int, ...]
    operands: tuple[tuple[float, float], ...]
    by_constant: bool = False

    def _text(self):
        number = "A number that is not finite"
        if self.primitive == "argument":
            return f"{number} came in with the argument {self.layer}."
        if self.primitive == "constant":
            return f"{number} is a constant of the program."
        loop = f", iteration {list(self.iterations)}" if self.iterations else ""
        ranges = " and ".join(f"[{low:.3g}, {high:.3g}]" for low, high in self.operands)
        operands = f" out of {ranges}" if ranges else ""
        operation = f"{self.primitive} ({self.dtype}, {self.direction}{loop})"
        unnamed = " A jax.named_scope around each layer would name the layer."
        if self.primitive == "shard_map":  # one operation, with all that it holds
            unnamed = " Ask the function that it maps, under jax.vmap, which operation."
        return (
            f"{place(self.layer, operation, self.line)} "
            f"made the first number that is not finite{operands}.{self._advice()}"
            f"{'' if self.layer else unnamed}"
        )

    def _advice(self) -> str:
        """Return what to do if half cannot hold a constant or a result."""
        if self.by_constant:
            half = "half" if self.dtype == "float32" else self.dtype
            return (
                f" A constant that it reads is beyond {half}, so inf or 0 there: use "
                "another, or compute in float32."
            )
        is_half = self.dtype == "float16" and self.direction == "forward"
        # Where finite numbers in half become inf because they are large: not in 1 / 0.
        grows = facts(self.primitive) & (Fact.PRODUCT | Fact.LINEAR)
        grows = grows or degrees(self.primitive, {"y": 2}) == (1.0, 1.0)
        if not is_half or not grows:
            return ""
        return (
            f" Its results in half went beyond {float(jnp.finfo(jnp.float16).max):g}: "
            'give the layer the policy "full". Under autocast, numerics.advise '
            "(previous=...) finds a policy, too."
        )

    def _table(self, every):
        rows = [(name, str(value)) for name, value in vars(self).items() if value]
        return reports.Table(str(self), ("", "of the operation"), rows)


def first_nonfinite(fun: Callable[..., Any]) -> Callable[..., NonFinite | None]:
    """Return a function that finds the operation that made the first NaN or inf.

    Runs each operation of `fun` apart and checks its result on the host: for one batch,
    not for every step. `track_nonfinite` does the same inside `jit`.

    Args:
      fun: any JAX function: a loss, `jax.grad(loss)`, a whole train step.

    Returns:
      A function of the arguments of `fun` that returns a `NonFinite`, or None if all
      results of `fun` are finite.

    Raises:
      TypeError: `fun` is not callable; in a call: an argument is an nnx module, or
        traced.

    Examples:
      >>> import jax.numpy as jnp
      >>> def f(x):
      ...     return jnp.log(x - 1.0).sum()
      >>> found = first_nonfinite(f)(jnp.ones(3))
      >>> found.primitive, found.operands
      ('log', ((0.0, 0.0),))
      >>> first_nonfinite(f)(jnp.full(3, 2.0)) is None
      True

    References:
      torch's anomaly mode; Hugging Face's DebugUnderflowOverflow.
    """
    arguments.function(fun, "watch")

    def run(*args, **kwargs) -> NonFinite | None:
        runs.check_has_values(
            (args, kwargs),
            "first_nonfinite",
            " Of a gradient, call first_nonfinite(jax.grad(loss))(params). In jit, use "
            "track_nonfinite.",
        )
        return locate(_trace(fun, args, kwargs), (args, kwargs))

    return run


def track_nonfinite(
    fun: Callable[..., Any],
) -> Callable[..., tuple[Any, "NonFiniteTracker"]]:
    """Return a function that also returns the origin of a NaN or inf in its results.

    The same program checks the result of each operation, and takes some ten times as
    long to compile. Take gradients inside: `track_nonfinite(jax.grad(loss))`.

    Args:
      fun: any JAX function.

    Returns:
      A function that returns the result of `fun` and a `NonFiniteTracker`, a pytree.
      It can be called in `jit`. Call `report()` of the tracker on the host.

    Raises:
      TypeError: `fun` is not callable; in a call: an argument is an nnx module; the
        result is differentiated.

    Examples:
      >>> import jax.numpy as jnp
      >>> loss, tracker = jax.jit(track_nonfinite(lambda x: 1 / x))(jnp.float32(0.0))
      >>> tracker.report().primitive
      'div'
    """
    arguments.function(fun, "watch")

    def watched(*args, **kwargs):
        traced = _trace(fun, args, kwargs)
        jaxpr = compat.open_jaxpr(traced.closed)
        cells = [(x, _of_argument(x, i)) for i, x in enumerate(traced.args)]
        outs, _ = _Watcher().run(jaxpr, compat.consts_of(traced.closed), cells)
        origin = _first([jnp.asarray(_NONE), *(tag for _, tag in outs)])
        tracker = _tracker_of(traced, origin, (args, kwargs))
        return traced.restore([_not_differentiated(x) for x, _ in outs]), tracker

    return watched


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NonFiniteTracker:
    """The origin of the first NaN or inf in the results of a run.

    Args:
      origin: i32 `[6]`: how many operations ran before, which one it is, and the
        iterations of the loops around it.
      sites: the operations of the program; static.
      arguments: the key paths of its arguments; static.

    Examples:
      >>> import jax.numpy as jnp
      >>> _, tracker = track_nonfinite(jnp.sqrt)(jnp.float32(4.0))
      >>> tracker.report() is None
      True
    """

    origin: Array
    sites: tuple[Site, ...] = dataclasses.field(metadata={"static": True})
    arguments: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def report(self) -> NonFinite | None:
        """Return the operation, without ranges; None if all results were finite.

        Waits for the device: call it between steps.

        Raises:
          ValueError: these are several trackers, stacked by `scan` or `vmap`.
        """
        if np.ndim(self.origin) != 1:
            raise ValueError(
                "Expected the tracker of one run, got them stacked to "
                f"{list(np.shape(self.origin)[:-1])}: take run i of them with "
                "jax.tree.map(lambda x: x[i], tracker)."
            )
        when, index, *iterations = trees.on_host(self.origin).tolist()
        if when == _NEVER:
            return None
        if index == _CONSTANT:
            return NonFinite("constant", "", "", "forward", "", (), ())
        if index < 0:
            name = self.arguments[-1 - index]
            return NonFinite("argument", name, "", "forward", "", (), ())
        by_constant, index = divmod(index, _OF_CONSTANT)
        site = self.sites[index]
        where = site.primitive, site.layer, site.line, site.direction, site.dtype
        return NonFinite(*where, tuple(iterations[: site.loops]), (), bool(by_constant))


def _trace(fun: Callable[..., Any], args: Any, kwargs: Any) -> Traced:
    refuse_modules((args, kwargs), "A function to watch")
    jax.tree.map(trees.with_value, (args, kwargs))
    return trace(fun, args, kwargs, without_refs=True)


def _tracker_of(traced: Traced, origin: Array, arguments: Any) -> NonFiniteTracker:
    """Return the tracker of a traced call, by the origin of its results."""
    leaves = jax.tree.leaves_with_path(arguments)
    names = [trees.key_path(path[1:]) for path, x in leaves if is_traceable(x)]
    known = sites(compat.open_jaxpr(traced.closed))
    return NonFiniteTracker(origin, tuple(known), tuple(names))


def locate(
    traced: Traced, arguments: Any, *, in_half: bool = False
) -> NonFinite | None:
    """Run a traced call on the host; return what made its first NaN or inf.

    `in_half`: an operation in half counts even if its numbers reach no result.
    """
    jaxpr, run = compat.open_jaxpr(traced.closed), _Run()
    cells = [run.cell(x, _of_argument(x, i)) for i, x in enumerate(traced.args)]
    outs, _ = run.run(jaxpr, compat.consts_of(traced.closed), cells)
    inside = run.in_half if in_half else _NONE
    origin = np.asarray(_first([inside, *(cell.tag for cell in outs)]))
    found, ranges = _tracker_of(traced, origin, arguments).report(), run.ranges
    return found and dataclasses.replace(found, operands=ranges.get(int(origin[0]), ()))


@jax.custom_jvp
def _not_differentiated(x: Array) -> Array:
    return x


@_not_differentiated.defjvp
def _refuse_derivative(primals: object, tangents: object) -> NoReturn:
    # The walk runs the functions of custom derivatives without their rules.
    raise TypeError(
        "What track_nonfinite returns cannot be differentiated: take the gradient "
        "inside, track_nonfinite(jax.grad(loss))."
    )


class _Origins:
    """Tags that are origins."""

    def tag_constant(self, value: Array) -> Array:
        is_half = dtypes.is_half(jax.typeof(value).dtype)
        times = (_PART, _WHOLE) if is_half else (_LATE, _LATE)
        return _of_input(value, _CONSTANT, "isfinite", *times)

    def stack(self, tags: Sequence[Array] | Array) -> Array:
        return _first(tags)


class _Watcher(_Origins, Walker):
    """Finds origins in a program that JAX traces."""

    def observe(self, equation: Equation) -> list[Array]:
        here, (operands, mixes) = _here(equation), _operands(equation)
        return [
            _origin_in_program(x, operands, mixes, here) if is_floating(x) else _NONE
            for x in equation.outs
        ]


class _Run(_Origins, runs.Run):
    """Finds origins on the host, and the ranges of their operands."""

    def __init__(self):
        super().__init__()
        # Of the operands of an origin, by its `eqn_count`.
        self.ranges: dict[int, tuple[tuple[float, float], ...]] = {}
        self.in_half = _NONE  # the earliest origin that is in half

    def observe(self, op: Operation) -> list[Array]:
        return [self._origin(op, out) for out in op.outs]

    def _origin(self, op: Operation, out: Array) -> Array:
        """Return the origin of one result of an operation, by those of its operands."""
        if not is_floating(out) or _library(out).isfinite(out).all():
            return _NONE
        found = np.asarray(_origin_of(out, *_operands(op), np.asarray(_here(op))))
        when = int(op.moment.eqn_count)
        if found[0] == when:
            floats = list(filter(is_floating, op.ins))
            self.ranges[when] = tuple(map(_range, floats[:_OPERANDS]))
            # Not by a constant: an infinite one may be where a maximum starts.
            if dtypes.is_half(out.dtype) and found[1] == op.site:
                self.in_half = _first([self.in_half, found])
        return found


def _of_argument(value: Array, index: int) -> Array:
    """Return the origin of the numbers of an argument, by its index.

    A NaN precedes everything that runs, and the first argument with one precedes the
    others. An inf may be a mask: it comes last, after everything that runs.
    """
    return _of_input(value, -1 - index, "isnan", index - _LATE, _LATE)


def _of_input(value: Array, site: int, test: str, when: int, otherwise: int) -> Array:
    """Return the origin of an input: its time, `when` a number of it passes a test."""
    if not is_floating(value) or _is_finite_number(value):
        return _NONE
    value = runs.look(value)
    xp = _library(value)
    time = xp.where(getattr(xp, test)(value).any(), when, otherwise)
    return xp.where(xp.isfinite(value).all(), _NONE, _origin(time, site, ()))


def _origin(eqn_count: ArrayLike, site: int, loops: Sequence[ArrayLike]) -> Array:
    padded = [eqn_count, site, *loops, *[0] * _LOOPS][: 2 + _LOOPS]
    xp = _library(*padded)
    return xp.stack([xp.asarray(x, np.int32) for x in padded])


def _here(op: Equation | Operation) -> Array:
    """Return the origin of what an operation makes."""
    powers = degrees(op.eqn.primitive.name, op.eqn.params)
    pairs = zip(op.eqn.invars, powers, strict=False)
    read = [v for v, d in pairs if d < 0 and compat.is_literal(v)]
    by_zero = any(v.val == 0 and dtypes.is_half(compat.aval_of(v).dtype) for v in read)
    eqn_count, loops = op.moment
    return _origin(eqn_count, op.site | by_zero * _OF_CONSTANT, loops)


def _first(origins: Sequence[Array] | Array) -> Array:
    """Return the earliest of origins, a sequence or an array `[n, 6]`."""
    if not len(origins):
        return _NONE
    is_stacked = isinstance(origins, jax.Array)
    stacked = origins if is_stacked else _library(*origins).stack(origins)
    return stacked[_library(stacked).argmin(stacked[:, 0])]


def _operands(op: Equation | Operation) -> tuple[list[_Operand], int | None]:
    """Return the floating operands that reach the result, and their origins.

    And from which time on a constant among them makes the numbers of the result: None
    if there is no other operand, as what is made of a constant alone is a constant.
    """
    name, pairs = op.eqn.primitive.name, list(zip(op.ins, op.tags, strict=True))
    if of_choice := cases(name, pairs):
        which = op.ins[0]
        pairs = [(_chosen(which, i, x), tag) for i, (x, tag) in enumerate(of_choice)]
    pairs = [(x, tag) for x, tag in pairs if is_floating(x)]
    operands = [(x, tag) for x, tag in pairs if not _is_finite_number(x)]
    if len(pairs) < 2:
        return operands, None
    if degrees(name, op.eqn.params):
        return operands, _PART
    # A constant with some finite numbers may be a mask, which is added.
    is_arithmetic = facts(name) & (Fact.BROADCASTS | Fact.LIMITS) == Fact.BROADCASTS
    return operands, _WHOLE if is_arithmetic else _NEVER


def _chosen(which: Array, i: int, case: Array) -> Array:
    """Return an operand of a `select_n` with 0 wherever it is not selected."""
    if not is_floating(case):
        return case
    xp = _library(which, case)
    return xp.where(which.astype(np.int32) == i, case, xp.zeros_like(case))


def _origin_of(
    out: Array, operands: Sequence[_Operand], mixes: int | None, here: Array
) -> Array:
    xp, shape = _library(out, here, *(x for x, _ in operands)), np.shape(out)
    bad, nan = ~xp.isfinite(out), xp.isnan(out)
    # Element by element, where the shapes are equal: numbers elsewhere do not matter.
    seen = [(x if np.shape(x) == shape else _summary(x)) for x, _ in operands]
    made, made_nan, arrived = bad, nan, []
    for x, (_, tag) in zip(seen, operands, strict=True):
        is_finite = xp.isfinite(x)
        if mixes is not None:
            is_constant = (mixes <= tag[0]) & (tag[0] < _NEVER)
            is_finite = is_finite | is_constant
            here = xp.where(is_constant, here | _BY_CONSTANT, here)
        made, made_nan = made & is_finite, made_nan & ~xp.isnan(x)
        arrived.append(bad & ~is_finite)
    is_bad, is_made, *has_arrived = _any([bad, made | made_nan, *arrived], xp)
    tags = [
        xp.where(has, tag, _NONE)
        for has, (_, tag) in zip(has_arrived, operands, strict=True)
    ]
    earlier = _first([_NONE, *tags])
    # An inf that came in may be a mask: the first operation that makes one precedes it.
    is_here = (earlier[0] == _NEVER) | ((earlier[0] >= _LATE) & is_made)
    if mixes is not None:
        earlier = xp.minimum(earlier, _INTENDED)
    return xp.where(is_bad, xp.where(is_here, here, earlier), _NONE)


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
    either = functools.partial(jax.tree.map, operator.or_)
    return jax.lax.reduce(masks, false, either, range(jnp.ndim(masks[0])))


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
