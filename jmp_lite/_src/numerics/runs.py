"""Run a jaxpr, and observe on the host every floating-point number that it computes.

To compile a check after each operation takes a minute for a model of two layers. Here
compiled stretches compute, and NumPy checks. Python runs loops and branches, so that
each iteration is observed. The limits of `sites` apply.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.sites import bodies_of, count_sites
from jmp_lite._src.jaxprs.walk import split_while
from jmp_lite._src.numerics.stretches import (
    CompiledStretch,
    Constant,
    Operation,
    Shadow,
    Stretch,
    cut,
)

# Larger arrays stay on their device.
_MOST_ON_HOST = 2**22

_Loops = tuple[int, ...]


class Cell(NamedTuple):
    """What a variable holds: its value, its shadow, and the observer's tag."""

    value: Any
    shadow: Any
    tag: Any


class Observer:
    """Observes what runs. Subclasses define the tags, on the host."""

    def observe(self, op: Operation) -> Sequence[Any]:
        """Return the tags of an operation's results."""
        raise NotImplementedError

    def tag_constant(self, value: Any) -> Any:
        """Return the tag of a constant of the program."""
        raise NotImplementedError

    def stack(self, tags: Sequence[Any]) -> Any:
        """Return the tag of an array, and of its rows, from those of its rows."""
        raise NotImplementedError


class Run:
    """Runs a jaxpr on the device, and passes its operations to an observer."""

    def __init__(self, observer: Observer, shadow: Shadow):
        self.observer, self.shadow = observer, shadow
        self._eqn_count = 0
        # By the identity of a jaxpr and its plan, which are kept alive beside them.
        self._stretches: dict[Any, tuple[list[Stretch], Any]] = {}
        self._compiled: dict[Any, CompiledStretch] = {}

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        cells: Sequence[Cell],
        *,
        plan: Any = None,
        first_site: int = 0,
        loops: _Loops = (),
    ) -> list[Cell]:
        """Run a jaxpr.

        Args:
          jaxpr: an open jaxpr.
          consts: the values of its constvars.
          cells: its inputs.
          plan: has `eqn_plans`, as for `Walker.run`; None if the shadow needs none.
          first_site: the number of its first site.
          loops: the iteration of each loop around it.

        Returns:
          Its outputs.
        """
        env: dict[Any, Cell] = dict(zip(jaxpr.invars, cells, strict=True))
        env.update(zip(jaxpr.constvars, map(self._constant, consts), strict=True))

        def read(var):
            if compat.is_literal(var):
                return self._constant(np.asarray(var.val, var.aval.dtype))
            return env[var]

        key = id(jaxpr), id(plan)
        if key not in self._stretches:
            self._stretches[key] = cut(jaxpr, plan, self.shadow), (jaxpr, plan)
        site = first_site
        for stretch in self._stretches[key][0]:
            if stretch.in_python:
                eqn, eqn_plan = stretch.eqns[0], stretch.eqn_plans[0]
                ins = [read(v) for v in eqn.invars]
                outs = self._run_bodies(eqn, eqn_plan, ins, site, loops)
                env.update(zip(eqn.outvars, outs, strict=True))
            else:
                ins = [env[v] for v in stretch.invars]
                outs = self._run_stretch(stretch, ins, site, loops)
                env.update(zip(stretch.outvars, outs, strict=True))
            for var in stretch.last_read:
                env.pop(var, None)
            site += stretch.sites
        return [read(v) for v in jaxpr.outvars]

    def _constant(self, value: Any) -> Cell:
        return Cell(value, self.shadow.start(value), self.observer.tag_constant(value))

    def _run_stretch(
        self, stretch: Stretch, cells: Sequence[Cell], site: int, loops: _Loops
    ) -> list[Cell]:
        # A value that is its own shadow is computed once. In a loop it may be that in
        # the first iteration alone, and all iterations share one program.
        shared = tuple(not loops and c.shadow is c.value for c in cells)
        key = id(stretch), shared
        if key not in self._compiled:
            self._compiled[key] = CompiledStretch(stretch, self.shadow, shared)
        compiled = self._compiled[key]
        pairs = zip(cells, shared, strict=True)
        shadows = [None if is_shared else c.shadow for c, is_shared in pairs]
        inputs = [c.value for c in cells], shadows
        arrays = [*jax.tree.leaves(inputs), *compiled.call(*inputs)]
        tags = [c.tag for c in cells]

        @functools.cache
        def on_host(slot):
            return look(arrays[slot])

        def get(slot, array_of: Callable[[Any], Any] = arrays.__getitem__):
            if slot is None:
                return None
            return slot.value if isinstance(slot, Constant) else array_of(slot)

        def seen(slots):
            return [get(slot, on_host) for slot in slots]

        def tag(index):
            if isinstance(index, Constant):
                return self.observer.tag_constant(index.value)
            return tags[index]

        for op in compiled.operations:
            run = op._replace(
                site=site + op.site,
                ins=seen(op.ins),
                outs=seen(op.outs),
                low_ins=seen(op.low_ins),
                low_outs=seen(op.low_outs),
                read=seen(op.read),
                tags=list(map(tag, op.tags)),
                also=list(map(tag, op.also)),
                eqn_count=self._eqn_count,
                loops=loops,
            )
            tags += self.observer.observe(run)
            self._eqn_count += 1
        return [Cell(get(x), get(low), tag(i)) for x, low, i in compiled.outs]

    # Loops, branches, and calls that hold them or are long.

    def _run_bodies(self, eqn, eqn_plan, cells, site: int, loops: _Loops) -> list[Cell]:
        sub_jaxprs = bodies_of(eqn)
        plans = (eqn_plan.bodies if eqn_plan else ()) or [None] * len(sub_jaxprs)
        cells = self._cast(eqn.invars, cells, eqn_plan and eqn_plan.half_in)

        def body(k: int, cells: Sequence[Cell], loops: _Loops) -> list[Cell]:
            before = (eqn for sub in sub_jaxprs[:k] for eqn in sub.jaxpr.eqns)
            outs = self.run(
                sub_jaxprs[k].jaxpr,
                sub_jaxprs[k].consts,
                cells,
                plan=plans[k],
                first_site=site + count_sites(before),
                loops=loops,
            )
            return self._cast(eqn.outvars, outs, eqn_plan and eqn_plan.half_out)

        match eqn.primitive.name:
            case "scan":
                return self._scan(eqn, eqn_plan, body, cells, loops)
            case "while":
                return self._while(eqn, sub_jaxprs, body, cells, loops)
            case "cond":
                return body(int(np.asarray(cells[0].value)), cells[1:], loops)
        return body(0, cells, loops)

    def _cast(self, variables, cells: Sequence[Cell], is_low: Any) -> list[Cell]:
        shadows = self.shadow.cast(variables, [c.shadow for c in cells], is_low)
        return [c._replace(shadow=s) for c, s in zip(cells, shadows, strict=True)]

    def _scan(self, eqn, eqn_plan, body, cells, loops: _Loops) -> list[Cell]:
        num_consts, num_carry = compat.scan_counts(eqn.params) or (0, 0)
        split = num_consts + num_carry
        consts, carry, xs = cells[:num_consts], cells[num_consts:split], cells[split:]
        length, made = eqn.params["length"], []
        if not length:
            # JAX makes the empty arrays.
            bind = jax.jit(functools.partial(binding.bind, eqn))
            outs, tag = bind([c.value for c in cells]), self.observer.stack([])
            ys = [Cell(x, self.shadow.start(x), tag) for x in outs]
            ys = self._cast(eqn.outvars, ys, eqn_plan and eqn_plan.half_out)
            return [*carry, *ys[num_carry:]]
        in_order = slice(None, None, -1 if eqn.params["reverse"] else 1)
        for i in range(length)[in_order]:
            outs = body(0, [*consts, *carry, *_rows(xs, i)], (*loops, i))
            carry, row = outs[:num_carry], outs[num_carry:]
            made.append(row)
        return [*carry, *map(self._stack, zip(*made[in_order], strict=True))]

    def _stack(self, rows: Sequence[Cell]) -> Cell:
        values, shadows, tags = zip(*rows, strict=True)
        shadow = None if shadows[0] is None else _stacked(shadows)
        return Cell(_stacked(values), shadow, self.observer.stack(tags))

    def _while(self, eqn, sub_jaxprs, body, cells, loops: _Loops) -> list[Cell]:
        # The sites of the condition are not observed.
        (test, _), (given, consts, carry) = sub_jaxprs, split_while(eqn, cells)
        holds = jax.jit(functools.partial(binding.evaluate, test.jaxpr, test.consts))
        iteration = 0
        while np.asarray(holds([c.value for c in (*given, *carry)])[0]):
            carry = body(1, [*consts, *carry], (*loops, iteration))
            iteration += 1
        return carry


# Arrays.


def look(x: Any) -> Any:
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
    return [Cell(value, shadow, x.tag) for (value, shadow), x in pairs]


@jax.jit
def _row(arrays: list[jax.Array], i: Any) -> list[jax.Array]:
    return [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in arrays]


def _stacked(rows: Sequence[Any]) -> Any:
    """Return rows as one array; on the host, or one program would have all of them."""
    if all(not isinstance(x, jax.Array) or _is_here(x) for x in rows):
        return np.stack([np.asarray(x) for x in rows])
    return jnp.stack(rows)
