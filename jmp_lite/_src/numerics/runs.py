"""Run a jaxpr, and observe on the host every floating-point number that it computes.

To compile a check after each operation takes a minute for a model of two layers. Here
compiled stretches compute, and NumPy checks. Python runs loops and branches, so that
each iteration is observed. The limits of `sites` apply.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmp_lite._src.autocast.emit import Emitter
from jmp_lite._src.autocast.storage import Plan
from jmp_lite._src.jaxprs import binding
from jmp_lite._src.jaxprs.core import Jaxpr
from jmp_lite._src.numerics.stretches import (
    Array,
    Beside,
    Cell,
    CompiledStretch,
    Constant,
    Operation,
    PolicyRun,
    Stretch,
    cut,
    layout,
    structure_of,
)

# Larger arrays stay on their device.
_MOST_ON_HOST = 2**22


class Observer:
    """Observes what runs on the host. Subclasses define the tags."""

    observe: Callable[[Operation], Sequence[Any]]  # the tags of an operation's results
    tag_constant: Callable[[Any], Any]  # of a constant of the program
    stack: Callable[[Any], Any]  # of an array, and of its rows, from those of its rows


# By what they compute: for one run, or for several that share them.
Programs = dict[Hashable, CompiledStretch]


class Run(PolicyRun):
    """Runs a jaxpr on the device, and passes its operations to an observer."""

    def __init__(
        self,
        observer: Observer,
        emitter: Emitter | None = None,
        programs: Programs | None = None,
    ):
        super().__init__(emitter)
        self.observer = observer
        self._programs: Programs = {} if programs is None else programs
        # By the identity of a jaxpr and its plan, which are kept alive beside them.
        self._stretches: dict[
            tuple[int, int], tuple[list[Stretch], Jaxpr, Plan | None]
        ] = {}
        self._compiled: dict[Hashable, CompiledStretch] = {}

    def cell(self, value: Array, tag: Any) -> Cell:
        """Return the cell of what came in, which is its own shadow."""
        return value, Beside(value if self.emitter else None, tag)

    def constant(self, value, var):
        if not isinstance(value, jax.Array):
            value = np.asarray(value, var.aval.dtype)
        return self.cell(value, self.observer.tag_constant(value))

    def split(self, jaxpr, plan):
        key = id(jaxpr), id(plan)
        if key not in self._stretches:
            self._stretches[key] = cut(jaxpr, plan), jaxpr, plan
        return self._stretches[key][0]

    def run_stretch(self, stretch, site, cells, moment, read):
        # A value that is its own shadow is computed once. In a loop it may be that in
        # the first iteration alone, and all iterations share one program.
        shared = tuple(
            beside.shadow is None or not moment.loops and beside.shadow is value
            for value, beside in cells
        )
        pairs = zip(cells, shared, strict=True)
        shadows = [None if is_shared else c[1].shadow for c, is_shared in pairs]
        inputs = [value for value, _ in cells], shadows
        key = id(stretch), shared, layout(inputs)
        with jax.disable_jit(False):  # under which nothing is compiled
            if key not in self._compiled:
                half = self.emitter and np.dtype(self.emitter.half_dtype)
                same = half, structure_of(stretch), *key[1:]
                if same not in self._programs:
                    self._programs[same] = CompiledStretch(
                        stretch, self.emitter, shared, inputs
                    )
                self._compiled[key] = self._programs[same]
            compiled = self._compiled[key]
            arrays = [*jax.tree.leaves(inputs), *compiled.call(*inputs)]
        tags = [beside.tag for _, beside in cells]

        @functools.cache
        def on_host(slot):
            return look(arrays[slot])

        def get(slot, array_of: Callable[[int], Any] = arrays.__getitem__):
            if slot is None:
                return None
            return slot.value if isinstance(slot, Constant) else array_of(slot)

        def seen(slots):
            return [get(slot, on_host) for slot in slots]

        def tag(index):
            if isinstance(index, Constant):
                return self.observer.tag_constant(index.value)
            return tags[index]

        for i, op in enumerate(compiled.operations):
            run = op._replace(
                site=site + op.site,
                ins=seen(op.ins),
                outs=seen(op.outs),
                low_ins=seen(op.low_ins),
                low_outs=seen(op.low_outs),
                multiplied=seen(op.multiplied),
                tags=list(map(tag, op.tags)),
                also=list(map(tag, op.also)),
                eqn_count=moment.eqn_count + i,
                loops=moment.loops,
            )
            tags += self.observer.observe(run)
        outs = []
        for slot, (low, index) in compiled.outs:
            shadow = jax.tree.map(get, low) if self.emitter else None
            outs.append((get(slot), Beside(shadow, tag(index))))
        return outs, moment.eqn_count + len(compiled.operations)

    def scan(self, eqn, eqn_plan, body, split, moment):
        (consts, carry, xs), eqn_count = split, moment.eqn_count
        num_carry, length, made = len(carry), eqn.params["length"], []
        if not length:
            # JAX makes the empty arrays.
            bind = jax.jit(functools.partial(binding.bind, eqn))
            outs = bind([value for value, _ in (*consts, *carry, *xs)])
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
        while holds([value for value, _ in (*given, *carry)])[0]:
            now = moment.inside(eqn_count, iteration)
            carry, eqn_count = body([*consts, *carry], now)
            iteration += 1
        return carry, eqn_count

    def switch(self, index, branches, cells, moment):
        return branches[int(np.asarray(index[0]))](cells, moment)

    def _stack(self, rows: Sequence[Cell]) -> Cell:
        values, besides = zip(*rows, strict=True)
        shadows, tags = zip(*besides, strict=True)
        shadow = _stacked(shadows) if self.emitter else None
        return _stacked(values), Beside(shadow, self.observer.stack(tags))


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
    arrays, tree = jax.tree.flatten([(x, beside.shadow) for x, beside in xs])
    on_device = [x for x in arrays if isinstance(x, jax.Array)]
    rows = iter(_row(on_device, np.int32(i)) if on_device else ())
    taken = [next(rows) if isinstance(x, jax.Array) else x[i] for x in arrays]
    pairs = zip(jax.tree.unflatten(tree, taken), xs, strict=True)
    return [(x, Beside(shadow, beside.tag)) for (x, shadow), (_, beside) in pairs]


@jax.jit
def _row(arrays: list[jax.Array], i: np.int32) -> list[jax.Array]:
    return [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in arrays]


def _stacked(rows: Sequence[Array]) -> Array:
    """Return rows as one array; on the host, or one program would have all of them."""
    if all(not isinstance(x, jax.Array) or _is_here(x) for x in rows):
        return np.stack([np.asarray(x) for x in rows])
    return jnp.stack([jnp.asarray(x) for x in rows])
