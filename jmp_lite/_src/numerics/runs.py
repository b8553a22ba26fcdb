"""Run a jaxpr, and observe on the host every floating-point number that it computes.

NumPy does the checking: compiling a check after each operation would take a minute for
a model of two layers. Python runs loops and branches, so that each iteration is
observed. The limits of `sites` apply.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmp_lite._src.autocast.emit import Emitter
from jmp_lite._src.autocast.storage import EqnPlan
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.core import Eqn
from jmp_lite._src.jaxprs.primitives import cases
from jmp_lite._src.numerics.shadows import (
    Array,
    Cell,
    PolicyRun,
    is_floating,
    read_by,
    stored,
)

# Larger arrays stay on their device.
_MOST_ON_HOST = 2**22


class Operation(NamedTuple):
    """An operation that has run: what it read and computed."""

    eqn: Eqn
    site: int  # its number among the sites
    eqn_plan: EqnPlan | None
    ins: Sequence[Any]  # None where neither floating nor a mask that chooses
    outs: Sequence[Any]  # None where not floating
    low_ins: Sequence[Any]  # of the policy's run, likewise
    low_outs: Sequence[Any]
    multiplied: Sequence[Any]  # of a product in half, its operands there
    tags: Sequence[Any]  # of its operands
    also: Sequence[Any]  # the tags of what else the policy's run reads
    eqn_count: int = 0  # how many operations ran before it in the run
    loops: tuple[int, ...] = ()  # the iterations around it, outermost first


class Observer:
    """Observes what runs on the host. Subclasses define the tags."""

    observe: Callable[[Operation], Sequence[Any]]  # the tags of an operation's results
    tag_constant: Callable[[Any], Any]  # of a constant of the program
    stack: Callable[[Any], Any]  # of an array, and of its rows, from those of its rows


class Run(PolicyRun):
    """Runs a jaxpr on the device, and passes its operations to an observer."""

    def __init__(self, observer: Observer, emitter: Emitter | None = None):
        super().__init__(emitter)
        self.observer = observer

    def cell(self, value: Array, tag: Any) -> Cell:
        """Return the cell of what came in, which is its own shadow."""
        return Cell(value, value if self.emitter else None, tag)

    def constant(self, value, var):
        if not isinstance(value, jax.Array):
            value = np.asarray(value, var.aval.dtype)
        return self.cell(value, self.observer.tag_constant(value))

    def run_eqn(self, eqn, eqn_plan, site, cells, moment, read):
        values, lows = [cell.value for cell in cells], [cell.shadow for cell in cells]
        also = [read(v) for v in self.also_reads(eqn, eqn_plan)]
        # A value that is its own shadow is computed once. In a loop it may be that in
        # the first iteration alone, and all iterations share one program.
        is_own = [
            not moment.loops and x is low for x, low in zip(values, lows, strict=True)
        ]
        given = [None if own else low for own, low in zip(is_own, lows, strict=True)]
        others = [cell.shadow for cell in also]
        outs, shadows, multiplied = self.compute(eqn, eqn_plan, values, given, others)
        if self.emitter:
            pairs = zip(outs, shadows, strict=True)
            shadows = [x if low is None else low for x, low in pairs]
        seen = _on_host()
        ins = seen(values)
        if cases(eqn.primitive.name, ins):
            ins[0] = look(values[0])
        operation = Operation(
            eqn=eqn,
            site=site,
            eqn_plan=eqn_plan,
            ins=ins,
            outs=seen(outs),
            low_ins=seen(read_by(eqn_plan, lows)),
            low_outs=seen(map(stored, shadows)),
            multiplied=seen(multiplied),
            tags=[cell.tag for cell in cells],
            also=[cell.tag for cell in also],
            eqn_count=moment.eqn_count,
            loops=moment.loops,
        )
        tags = self.observer.observe(operation)
        return [Cell(*made) for made in zip(outs, shadows, tags, strict=True)]

    def scan(self, eqn, eqn_plan, body, split, moment):
        (consts, carry, xs), eqn_count = split, moment.eqn_count
        num_carry, length, made = len(carry), eqn.params["length"], []
        if not length:
            # JAX makes the empty arrays.
            bind = jax.jit(functools.partial(binding.bind, eqn))
            outs = bind([cell.value for cell in (*consts, *carry, *xs)])
            ys = [self.cell(x, self.observer.stack([])) for x in outs]
            ys = self.leave(eqn, eqn_plan, ys)
            return [*carry, *ys[num_carry:]], eqn_count
        in_order = slice(None, None, -1 if eqn.params["reverse"] else 1)
        for i in range(length)[in_order]:
            now = moment.inside(eqn_count, i)
            outs, eqn_count = body([*consts, *carry, *_rows(xs, i)], now)
            carry = outs[:num_carry]
            made.append(outs[num_carry:])
        ys = map(self._stack, zip(*made[in_order], strict=True))
        return [*carry, *ys], eqn_count

    def while_loop(self, test, body, split, moment):
        holds = jax.jit(functools.partial(binding.evaluate, test.jaxpr, test.consts))
        (given, consts, carry), eqn_count = split, moment.eqn_count
        iteration = 0
        while holds([cell.value for cell in (*given, *carry)])[0]:
            now = moment.inside(eqn_count, iteration)
            carry, eqn_count = body([*consts, *carry], now)
            iteration += 1
        return carry, eqn_count

    def switch(self, index, branches, cells, moment):
        return branches[int(np.asarray(index[0]))](cells, moment)

    def _stack(self, rows: Sequence[Cell]) -> Cell:
        values, shadows, tags = zip(*rows, strict=True)
        shadow = _stacked(shadows) if self.emitter else None
        return Cell(_stacked(values), shadow, self.observer.stack(tags))


def _on_host() -> Callable[[Iterable[Array | None]], list[Array | None]]:
    """Return a function of arrays: those of numbers as `look` has them, each once."""
    looked: dict[int, Array] = {}

    def seen(arrays: Iterable[Array | None]) -> list[Array | None]:
        return [
            looked.setdefault(id(x), look(x))
            if x is not None and is_floating(x)
            else None
            for x in arrays
        ]

    return seen


def look(x: Array) -> Array:
    """Return an array as NumPy's, unless it is too large or not all of it is here."""
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return x
    return np.asarray(x) if _is_here(x) and x.size <= _MOST_ON_HOST else x


def _is_here(x: jax.Array) -> bool:
    is_number = not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return is_number and (x.is_fully_addressable or x.is_fully_replicated)


def _rows(xs: Sequence[Cell], i: int) -> list[Cell]:
    """Return row `i` of each array: a view of what `_stacked` made."""
    arrays, tree = jax.tree.flatten([(x.value, x.shadow) for x in xs])
    on_device = [x for x in arrays if isinstance(x, jax.Array)]
    rows = iter(_row(on_device, np.int32(i)) if on_device else ())
    taken = [next(rows) if isinstance(x, jax.Array) else x[i] for x in arrays]
    pairs = zip(jax.tree.unflatten(tree, taken), xs, strict=True)
    return [Cell(x, shadow, cell.tag) for (x, shadow), cell in pairs]


@jax.jit
def _row(arrays: list[jax.Array], i: np.int32) -> list[jax.Array]:
    return [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in arrays]


def _stacked(rows: Sequence[Array]) -> Array:
    """Return rows as one array; on the host, or one program would have all of them."""
    if all(not isinstance(x, jax.Array) or _is_here(x) for x in rows):
        return np.stack([np.asarray(x) for x in rows])
    return jnp.stack([jnp.asarray(x) for x in rows])
