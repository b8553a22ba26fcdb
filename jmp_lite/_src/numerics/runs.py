"""Run a jaxpr, and look on the host at every floating-point number that it makes.

To compile a check after each operation takes a minute for a model of two layers. Here
the program computes, NumPy checks. Loops and branches run in Python, so that each
iteration is seen. What `sites` says of what is not looked into holds here too.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmp_lite._src import compat
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.sites import bodies_of, count_sites
from jmp_lite._src.numerics.programs import (
    CompiledStretch,
    Constant,
    Operation,
    Shadow,
    Stretch,
    cut,
)

# Larger arrays are looked at where they lie.
_MOST_ON_HOST = 2**22


class Cell(NamedTuple):
    """What a variable holds: its value, its shadow, and what the observer tagged it."""

    value: Any
    shadow: Any
    tag: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed(Operation):
    """An operation that has run, with the arrays and the tags that it read and made.

    Attributes:
      eqn_count: how many operations ran before it.
      loops: the iteration of each loop around it, outermost first.
    """

    eqn_count: int
    loops: tuple[int, ...]


class Observer:
    """Looks at what runs. Subclasses say what is carried beside values on the host."""

    def observe(self, op: Observed) -> Sequence[Any]:
        """Return the tags of an operation's results."""
        raise NotImplementedError

    def tag_constant(self, value: Any) -> Any:
        """Return the tag of a constant of the program."""
        raise NotImplementedError

    def stack(self, tags: Sequence[Any]) -> Any:
        """Return the tag of an array, and of its rows, from those of its rows."""
        raise NotImplementedError


class Run:
    """Runs a jaxpr on the device, and has an observer look at it."""

    def __init__(self, observer: Observer, shadow: Shadow):
        self.observer, self.shadow = observer, shadow
        self._eqn_count = 0
        self._programs: dict[Any, Any] = {}
        # Programs are found by the identity of their jaxpr, which must stay alive.
        self._alive: list[Any] = []

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        cells: Sequence[Cell],
        *,
        plan: Any = None,
        first_site: int = 0,
        loops: tuple[int, ...] = (),
    ) -> list[Cell]:
        """Run a jaxpr.

        Args:
          jaxpr: an open jaxpr.
          consts: the values of its constvars.
          cells: its inputs.
          plan: whatever the shadow knows about the jaxpr.
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

        site = first_site
        for stretch in self._stretches(jaxpr, plan):
            if stretch.is_opened:
                index, (eqn,) = stretch.start, stretch.eqns
                ins = [read(v) for v in eqn.invars]
                outs = self._open(eqn, index, plan, ins, site, loops)
                env.update(zip(eqn.outvars, outs, strict=True))
            else:
                ins = [env[v] for v in stretch.invars]
                outs = self._run_straight(stretch, plan, ins, site, loops)
                env.update(zip(stretch.outvars, outs, strict=True))
            for var in stretch.last_read:
                env.pop(var, None)
            site += stretch.sites
        return [read(v) for v in jaxpr.outvars]

    def _constant(self, value: Any) -> Cell:
        return Cell(value, self.shadow.start(value), self.observer.tag_constant(value))

    def _stretches(self, jaxpr: Any, plan: Any) -> list["Stretch"]:
        key = id(jaxpr), id(plan)
        if key not in self._programs:
            self._alive.append((jaxpr, plan))
            self._programs[key] = cut(jaxpr, functools.partial(self._reads, plan))
        return self._programs[key]

    def _reads(self, plan: Any, index: int, eqn: Any) -> list[Any]:
        own = [v for v in eqn.invars if not compat.is_literal(v)]
        return [*own, *self.shadow.also_reads(plan, index)]

    # Operations without a loop.

    def _run_straight(
        self,
        stretch: "Stretch",
        plan: Any,
        cells: Sequence[Cell],
        site: int,
        loops: tuple[int, ...],
    ) -> list[Cell]:
        # What is its own shadow is computed once. In a loop it may be that in the first
        # iteration alone: one program serves all.
        shared = tuple(not loops and c.shadow is c.value for c in cells)
        key = id(stretch), shared
        if key not in self._programs:
            self._programs[key] = CompiledStretch(stretch, plan, self.shadow, shared)
        program = self._programs[key]
        shadows = [
            None if is_shared else c.shadow
            for c, is_shared in zip(cells, shared, strict=True)
        ]
        inputs = [c.value for c in cells], shadows
        kept = [*jax.tree.leaves(inputs), *program.call(*inputs)]
        tags = [c.tag for c in cells]

        @functools.cache
        def looked(slot):
            return look(kept[slot])

        def get(slot):
            return slot.value if isinstance(slot, Constant) else kept[slot]

        def seen(slots):
            return [
                None if s is None else s.value if isinstance(s, Constant) else looked(s)
                for s in slots
            ]

        def tag(ref):
            if isinstance(ref, Constant):
                return self.observer.tag_constant(ref.value)
            return tags[ref]

        for op in program.operations:
            tags += self.observer.observe(
                Observed(
                    eqn=op.eqn,
                    site=site + op.site,
                    eqn_count=self._eqn_count,
                    loops=loops,
                    step=op.step,
                    ins=seen(op.ins),
                    outs=seen(op.outs),
                    low_ins=seen(op.low_ins),
                    low_outs=seen(op.low_outs),
                    read=seen(op.read),
                    tags=[tag(ref) for ref in op.tags],
                    also=[tag(ref) for ref in op.also],
                )
            )
            self._eqn_count += 1
        return [
            Cell(get(value), None if shadow is None else get(shadow), tag(ref))
            for value, shadow, ref in program.outs
        ]

    # Loops, branches, and calls that hold them.

    def _open(self, eqn, index, plan, cells, site, loops) -> list[Cell]:
        frames = bodies_of(eqn)
        firsts = [site + count_sites(frames[:k]) for k in range(len(frames))]
        shadows = [c.shadow for c in cells]
        shadows = self.shadow.enter(plan, index, eqn, shadows)
        cells = _with_shadows(cells, shadows)

        def body(k: int, cells: Sequence[Cell], loops: tuple[int, ...]):
            outs = self.run(
                frames[k].jaxpr,
                frames[k].consts,
                cells,
                plan=self.shadow.body_plan(plan, index, k),
                first_site=firsts[k],
                loops=loops,
            )
            shadows = [c.shadow for c in outs]
            return _with_shadows(outs, self.shadow.leave(plan, index, eqn, shadows))

        name = eqn.primitive.name
        if name == "scan" and not eqn.params["length"]:
            return self._scan_nothing(eqn, index, plan, cells)
        if name == "scan":
            return self._scan(eqn, body, cells, loops)
        if name == "while":
            return self._while(eqn, frames, body, cells, loops)
        if name == "cond":
            return body(int(np.asarray(cells[0].value)), cells[1:], loops)
        return body(0, cells, loops)

    def _scan(self, eqn, body, cells, loops) -> list[Cell]:
        num_consts, num_carry = compat.scan_counts(eqn.params) or (0, 0)
        split = num_consts + num_carry
        consts, carry, xs = cells[:num_consts], cells[num_consts:split], cells[split:]
        length, made = eqn.params["length"], []
        backwards = slice(None, None, -1 if eqn.params["reverse"] else 1)
        for i in range(length)[backwards]:
            outs = body(0, [*consts, *carry, *_rows(xs, i)], (*loops, i))
            carry, row = outs[:num_carry], outs[num_carry:]
            made.append(row)
        columns = zip(*made[backwards], strict=True)
        return [*carry, *map(self._stack, columns)]

    def _scan_nothing(self, eqn, index, plan, cells) -> list[Cell]:
        run = jax.jit(lambda args: binding.bind(eqn, args))
        outs = run([c.value for c in cells])
        shadows = [self.shadow.start(x) for x in outs]
        shadows = self.shadow.leave(plan, index, eqn, shadows)
        num_consts, num_carry = compat.scan_counts(eqn.params) or (0, 0)
        carry = cells[num_consts : num_consts + num_carry]
        ys = zip(outs[num_carry:], shadows[num_carry:], strict=True)
        return [*carry, *(Cell(x, s, self.observer.stack([])) for x, s in ys)]

    def _stack(self, column: Sequence[Cell]) -> Cell:
        value, shadow = (
            None if rows[0] is None else _stacked(rows)
            for rows in ([c.value for c in column], [c.shadow for c in column])
        )
        return Cell(value, shadow, self.observer.stack([c.tag for c in column]))

    def _while(self, eqn, frames, body, cells, loops) -> list[Cell]:
        condition, body_frame = frames
        num_cond = len(condition.operands) - len(eqn.outvars)
        num_body = len(body_frame.operands) - len(eqn.outvars)
        split = num_cond + num_body
        consts, carry = cells[num_cond:split], cells[split:]

        # The condition's own sites are not observed.
        @jax.jit
        def holds(args):
            return binding.evaluate(condition.jaxpr, condition.consts, args)[0]

        iteration = 0
        while np.asarray(holds([c.value for c in (*cells[:num_cond], *carry)])):
            carry = body(1, [*consts, *carry], (*loops, iteration))
            iteration += 1
        return carry


def _with_shadows(cells: Sequence[Cell], shadows: Sequence[Any]) -> list[Cell]:
    return [c._replace(shadow=s) for c, s in zip(cells, shadows, strict=True)]


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
