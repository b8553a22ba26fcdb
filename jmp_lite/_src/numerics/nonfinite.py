"""The operation that made the first NaN or inf: its layer, its line, its operands.

Every value carries the origin of its non-finite numbers. An operation is the origin if
it makes one where all its operands are finite, or a NaN from an inf that no operation
made (a `-inf` mask). A value that is finite again has no origin, so neither a mask that
reaches no result nor a skipped step is reported.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite._src import arguments, compat, reports, trees
from jmp_lite._src.autocast.checks import refuse_modules
from jmp_lite._src.jaxprs.primitives import Fact, degrees, facts
from jmp_lite._src.jaxprs.sites import Site, sites
from jmp_lite._src.jaxprs.tracing import Traced, is_traceable, trace
from jmp_lite._src.numerics.origins import (
    BY_CONSTANT,
    CONSTANT,
    NEVER,
    find,
    watch,
)
from jmp_lite._src.numerics.runs import Array, check_has_values


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
        if self.primitive == "argument":
            return (
                f"A number that is not finite came in with the argument {self.layer}."
            )
        if self.primitive == "constant":
            return "A number that is not finite is a constant of the program."
        where = f" in {self.layer}" if self.layer else ""
        line = f" at {self.line}" if self.line else ""
        loop = f", iteration {list(self.iterations)}" if self.iterations else ""
        ranges = " and ".join(f"[{low:.3g}, {high:.3g}]" for low, high in self.operands)
        operands = f" out of {ranges}" if ranges else ""
        unnamed = " A jax.named_scope around each layer would name the layer."
        if self.primitive == "shard_map":  # one operation, with all that it holds
            unnamed = " Ask the function that it maps, under jax.vmap, which operation."
        return (
            f"{self.primitive} ({self.dtype}, {self.direction}{loop}){where}{line} "
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
        check_has_values(
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
        outs, origin = watch(traced)
        tracker = _tracker_of(traced, origin, (args, kwargs))
        return traced.restore([_not_differentiated(x) for x in outs]), tracker

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
        if when == NEVER:
            return None
        if index == CONSTANT:
            return NonFinite("constant", "", "", "forward", "", (), ())
        if index < 0:
            name = self.arguments[-1 - index]
            return NonFinite("argument", name, "", "forward", "", (), ())
        by_constant, index = divmod(index, BY_CONSTANT)
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
    origin, ranges = find(traced, in_half)
    found = _tracker_of(traced, origin, arguments).report()
    return found and dataclasses.replace(found, operands=ranges)


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
