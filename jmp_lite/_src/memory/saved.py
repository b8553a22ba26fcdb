"""`saved`: the arrays that the backward pass keeps, before XLA, and what made them.

    layer    op           line     dtype  shape     size       hint
    decoder  dot_general  m.py:12  f32    [64,512]  128.0 KiB  a product in float32

Limits: XLA keeps less than this list, and needs buffers of its own.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple, ParamSpec

import jax

from jmp_lite._src import compat, dtypes, reports
from jmp_lite._src.autocast import products
from jmp_lite._src.autocast.checks import check_function, takes_function
from jmp_lite._src.autocast.transform import autocast
from jmp_lite._src.jaxprs import control_flow, core, name_scopes, sources, tracing
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var
from jmp_lite._src.jaxprs.primitives import Fact, facts
from jmp_lite._src.policy import Policy, PolicyMap
from jmp_lite._src.reports import size

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """One array that the backward pass keeps, a row of `saved`.

    Attributes:
      layer: the name-scope path of the operation that made it, `""` outside any scope.
      operation: the name of its primitive; `"argument"`, `"constant"`.
      line: `file:line` of the user's code; for an argument, its name.
      dtype: its dtype.
      shape: its shape.
      bytes: its size.
      hint: how it could be half, or why it need not be saved; `""` if nothing is known.
    """

    layer: str
    operation: str
    line: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class SavedReport(reports.Report):
    """What `saved` found: the arrays that the backward pass of a function keeps.

    Attributes:
      rows: the arrays that the forward pass makes, the largest first.
      arguments: the arguments among what is kept: they exist anyway.
    """

    rows: tuple[SavedArray, ...]
    arguments: tuple[SavedArray, ...]

    _derived = ("bytes", "by_layer", "by_dtype")

    @property
    def bytes(self) -> int:
        """The bytes of all rows: arguments are not counted."""
        return sum(row.bytes for row in self.rows)

    @property
    def by_layer(self) -> dict[str, int]:
        """The bytes of each layer, the largest first."""
        return total((row.layer, row.bytes) for row in self.rows)

    @property
    def by_dtype(self) -> dict[str, int]:
        """The bytes of each dtype, the largest first."""
        return total((row.dtype, row.bytes) for row in self.rows)

    def _table(self, every):
        arguments = sum(row.bytes for row in self.arguments)
        largest = itertools.islice(self.by_layer.items(), 5)
        layers = [f"{name or '(no scope)'} {size(n)}" for name, n in largest]
        if more := len(self.by_layer) - len(layers):
            layers.append(f"{more} more")
        dtypes = [
            f"{reports.short_dtype(d)} {size(n)}" for d, n in self.by_dtype.items()
        ]
        groups = [[row] for row in self.rows] if every else _alike(self.rows)
        return reports.Table(
            f"kept for the backward pass: {size(self.bytes)} in {len(self.rows)} "
            f"arrays, beside {size(arguments)} of arguments",
            ("layer", "op", "line", "dtype", "shape", "×", "size", "hint"),
            [_cells(rows) for rows in groups],
            numbers=("×", "size"),
            caption=f"by layer: {', '.join(layers)}; by dtype: {', '.join(dtypes)}",
        )


def total(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sum of the numbers of each name, the largest first."""
    sums = Counter()
    for name, number in pairs:
        sums[name] += number
    return dict(sums.most_common())


def _alike(rows: Iterable[SavedArray]) -> list[list[SavedArray]]:
    """Return the rows of one operation and line together, whatever their layer."""
    groups: dict[tuple[object, ...], list[SavedArray]] = defaultdict(list)
    for row in rows:
        groups[row.operation, row.line, row.dtype, row.shape, row.hint].append(row)
    return sorted(groups.values(), key=lambda rows: -sum(row.bytes for row in rows))


def _cells(rows: list[SavedArray]) -> list[str]:
    row = rows[0]
    return [
        reports.span(row.layer for row in rows),
        row.operation,
        reports.short_line(row.line),
        reports.short_dtype(row.dtype),
        "[" + ",".join(map(str, row.shape)) + "]",
        f"{len(rows)}",
        size(sum(row.bytes for row in rows)),
        row.hint,
    ]


@takes_function
def saved(
    fun: Callable[P, object], policy: Policy | PolicyMap | str | None = None
) -> Callable[P, SavedReport]:
    """Return a function of the same arguments that lists what its gradient keeps.

    These are the residuals of `jax.vjp` by all arguments, as
    `jax.ad_checkpoint.print_saved_residuals` has them, with bytes, layers and hints.
    XLA keeps less than this, and needs buffers of its own.

    Args:
      fun: the function, a loss say; it returns arrays.
      policy: that of `autocast`, which the function then runs under; None: as it is.

    Returns:
      A function that returns a `SavedReport`; nothing is computed, and arguments may be
      `jax.ShapeDtypeStruct`s.

    Raises:
      TypeError: `fun` is no function, or has arguments besides those of the call.
      ValueError: as `autocast`.

    Examples:
      >>> import jax.numpy as jnp
      >>> def loss(w, x):
      ...     with jax.named_scope("head"):
      ...         return jnp.sin(x @ w).sum()
      >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 4), (16, 8))]
      >>> report = saved(loss)(*shapes)
      >>> [(row.layer, row.operation, row.shape, row.bytes) for row in report.rows]
      [('head', 'cos', (16, 4), 256)]
      >>> [row.line for row in report.arguments]
      ['x', 'w']
    """
    check_function(fun, "saved", policy)
    of_any: Callable[..., object] = fun if policy is None else autocast(fun, policy)

    @functools.wraps(fun)
    def residuals(*args: P.args, **kwargs: P.kwargs) -> list[jax.Array]:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}

        def of_arrays(arrays):
            args, kwargs = tracing.fill(tree, leaves, arrays, arrays.values())
            results = jax.tree.leaves(of_any(*args, **kwargs))
            return list(filter(tracing.is_traceable, results))

        return jax.tree.leaves(jax.vjp(of_arrays, arrays)[1])

    def list_saved(*args: P.args, **kwargs: P.kwargs) -> SavedReport:
        jaxpr = compat.open_jaxpr(tracing.trace(residuals, args, kwargs).closed)
        names = jaxpr.debug_info.arg_names or ()
        arguments = dict(itertools.zip_longest(jaxpr.invars, names, fillvalue=""))
        rows, given = [], []
        made_in = functools.cache(_Made)
        for var in {id(v): v for v in jaxpr.outvars}.values():
            found = _find(jaxpr, var, made_in)
            if compat.is_literal(found.var) or found.var not in arguments:
                rows.append(found.row(var))
            else:
                name = arguments[found.var]
                given.append(_row(found.var, "", "argument", name))
        by_bytes = functools.partial(sorted, key=lambda row: -row.bytes)
        return SavedReport(tuple(by_bytes(rows)), tuple(by_bytes(given)))

    return list_saved


class _Found(NamedTuple):
    var: Var  # that has its value, of the whole program if `eqn` is None
    eqn: Eqn | None  # what made it; None for an argument or a constant
    around: "_Made"  # its jaxpr
    layer: str = ""
    line: str = ""
    is_carried: bool = False  # from one iteration of a loop to the next

    def row(self, var: Var) -> SavedArray:
        layer = name_scopes.without_marks(self.layer)
        if self.eqn is None:
            return _row(var, layer, "constant", self.line)
        is_autocast = name_scopes.AUTOCAST in self.layer.split("/")
        hint = "a loop carries it"  # which no policy computes again
        if not self.is_carried:
            hint = self.around.hint(self.eqn, self.var, is_autocast)
        return _row(var, layer, self.eqn.primitive.name, self.line, hint)


def _row(var: Var, layer: str, operation: str, line: str, hint: str = "") -> SavedArray:
    dtype, shape = compat.aval_of(var).dtype, tuple(core.shape(var))
    count = dtypes.packed(math.prod(shape) * dtype.itemsize, dtype)
    return SavedArray(layer, operation, line, str(dtype), shape, count, hint)


class _Made:
    """What made the variables of a jaxpr."""

    def __init__(self, jaxpr: Jaxpr):
        self.by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        divisions = [jaxpr.eqns[i] for i in products.find_softmaxes(jaxpr)]
        self._of_softmax = {v for e in divisions for v in (e.outvars[0], e.invars[0])}

    def hint(self, eqn: Eqn, var: Var, is_autocast: bool) -> str:
        """Return why an array is kept, and what to do about it."""
        of_eqn, again = facts(eqn.primitive.name), "save_products computes it again"
        if core.is_bool(var):
            return f"a mask: {again}"
        if not core.is_f32(var) or products.is_half_product(eqn):
            return ""
        if of_eqn & Fact.PRODUCT:
            product = "a product in float32"
            return product if is_autocast else f"{product}: half under autocast"
        if var in self._of_softmax:
            half = "of a softmax: autocast keeps half probabilities alone"
            return "of a softmax" if is_autocast else half
        if not of_eqn & Fact.ELEMENTWISE:
            return ""
        if is_autocast or of_eqn & Fact.LINEAR:  # autocast computes no sums again
            return f"elementwise: {again}"
        return f"elementwise: autocast or {again}"


def _next_carry(eqn: Eqn, sub: control_flow.SubJaxpr, found: _Found) -> Var | None:
    """Return what a scan hands to its next iteration as an input that was found."""
    counts = compat.scan_counts(eqn.params) if eqn.primitive.name == "scan" else None
    if counts is None or found.eqn is not None or found.var not in sub.jaxpr.invars:
        return None
    index = sub.jaxpr.invars.index(found.var) - counts[0]
    return sub.jaxpr.outvars[index] if 0 <= index < counts[1] else None


def _wrapped(eqn: Eqn, var: compat.Var) -> Var | None:
    """Return what a result is, if an equation hands it on as it is.

    `jax.checkpoint` wraps `reduce_precision` around what it keeps.
    """
    is_reduced = eqn.primitive.name == "reduce_precision"
    if not (is_reduced or facts(eqn.primitive.name) & Fact.IN_ORDER):
        return None
    operand = eqn.invars[eqn.outvars.index(var)]
    return operand if core.shape(operand) == core.shape(var) else None


def _find(
    jaxpr: Jaxpr,
    var: Var,
    made_in: Callable[[Jaxpr], _Made],
    layer: str = "",
    line: str = "",
) -> _Found:
    """Return what made a result of a program, in the calls and loops that it has."""
    made, path = made_in(jaxpr), layer
    while not compat.is_literal(var) and (eqn := made.by.get(var)) is not None:
        path = name_scopes.join(layer, name_scopes.of(eqn))
        line = sources.source_line(eqn, line)
        if (operand := _wrapped(eqn, var)) is not None:
            var = operand
            continue
        index = eqn.outvars.index(var)
        subs = control_flow.bodies_of(eqn) or ()
        sub = next((sub for sub in subs if index in sub.results), None)
        if sub is None:
            return _Found(var, eqn, made, path, line)
        out = sub.jaxpr.outvars[sub.results.index(index)]
        inside = _find(sub.jaxpr, out, made_in, path, line)
        if carried := _next_carry(eqn, sub, inside):
            inside = _find(sub.jaxpr, carried, made_in, path, line)
            inside = inside._replace(is_carried=True)
        # What a body only hands on, the call has made.
        return inside if inside.eqn else _Found(var, eqn, made, path, line)
    return _Found(var, None, made, path, line)
