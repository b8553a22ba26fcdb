"""Float32 values that wait for the backward pass: what of them is kept, in two bytes.

In float16, results that may overflow are float32, and in a loop what it carries. The
forward pass computes with them. The backward pass computes again what clusters made of
them, and for that it need not keep all of their digits. It keeps float16 numbers: of
what is summed along rows, as in a norm, relative to the largest number of each row, and
to the mean where that is far from 0. Of others, under a float16 policy, square roots,
which reach 4e9 and have 10 bits, two more than bfloat16, if products made them; under a
bfloat16 policy, the numbers in bfloat16.

A difference of rounded numbers may be wrong in each digit. So linear operations, which
keep nothing for the backward pass, stay outside of clusters, and what is rounded is
their result. So do quotients and roots of what waits, which need numbers near 0.
"""

import functools
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmp_lite._src import compat, new_primitives
from jmp_lite._src.autocast import sums
from jmp_lite._src.autocast.precision import FLOAT32, Around, CastPlan, has_range_of_f32
from jmp_lite._src.autocast.saving import Work, is_reduction
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.core import F32, Eqn, Jaxpr, Var, variables
from jmp_lite._src.jaxprs.primitives import CALLS, Fact, degree, degrees, facts

# Arrays of so few numbers are kept as they are.
_FEW = 64
# The largest number of a row, as it is kept: float16 has all digits over 29 octaves.
_LARGEST = 2.0**15
_NONE: frozenset[Var] = frozenset()
_LINEAR = Fact.LINEAR | Fact.SUMS | Fact.MOVES | Fact.JOINS


class _Made(NamedTuple):
    """What a value is computed of, of what waits."""

    sources: frozenset[Var] = _NONE  # in whatever way
    alike: frozenset[Var] = _NONE  # element by element
    operands: Sequence[Var] = ()  # of the equation, if it is no sum, and not curved
    is_bounded: bool = False  # it is not large, however large the sources are
    is_curved: bool = False  # it is no polynomial: a large source may be lost in it


class Waiting:
    """The float32 values of a jaxpr that wait, and what clusters compute of them."""

    def __init__(self, values: Set[Var], halves: Set[Var], alone: Set[Var] = _NONE):
        # Of the values, those `alone` need not be summed along rows.
        self.values, self._halves, self._alone = values, halves, alone
        self._rows: dict[Var, tuple[int, ...]] = {}
        self._made: dict[Var, _Made] = {}  # what clusters compute
        self._calls: dict[int, Waiting | None] = {}

    def summed(self) -> Set[Var]:
        """Return what waits and is summed along rows."""
        return self._rows.keys()

    def rows(self, var: Var) -> tuple[int, ...] | None:
        """Return the axes over which a value is summed; None if it does not wait."""
        is_alone = var in self.values and var in self._alone
        return self._rows.get(var, () if is_alone else None)

    def stays_outside(self, eqn: Eqn, work: Work) -> bool:
        """Return whether an equation needs more digits of what waits than are kept.

        `work` is what it does. The derivative of a linear operation needs none of them,
        that of an exponential or a choice all, and so does what is computed from a
        difference. That of a quotient or a root needs the first digits of numbers that
        are nearly 0, which none of the forms in which they are kept has.
        """
        if not self.values:
            return False
        if work.called is not None:
            self._calls[id(eqn)] = found = self._in_call(eqn, work.called)
            return found is None
        if self._alike(eqn, work.loses_digits) or self._alike(eqn, work.divides):
            return True
        known, size = facts(eqn.primitive.name), core.size(eqn.outvars[0])
        operands = _large(variables(eqn.invars), size)
        made = [self._of(v) for v in operands]
        sources = _large(_NONE.union(*(of.sources for of in made)), size)
        if not sources or work.needs_digits:
            return bool(sources)
        is_of_two = len(sources) > 1 or not all(of.sources for of in made)
        if known & (Fact.LINEAR | Fact.JOINS) and is_of_two:
            return True
        has_rows = all(v in self._rows for v in sources)
        is_exposed = any(of.alike and not of.is_bounded for of in made)
        adds = known & Fact.LINEAR and len(operands) < len(eqn.invars)
        if adds and is_exposed and not has_rows:
            return True  # the sum with a number, or with what is smaller: a difference?
        if not known & Fact.LINEAR and degree(eqn) != 1:
            return False
        of_others = (
            v not in self._made
            and v not in self._halves
            and v not in self._rows
            and not any(v in self._made[w].alike for w in operands if w in self._made)
            for v in operands
        )
        # The mean of something, say: a difference from it.
        of_totals = (
            v in self._made and not self._made[v].alike for v in variables(eqn.invars)
        )
        return any(of_others) or (any(of_totals) and not has_rows)

    def note(self, eqn: Eqn, work: Work) -> None:
        """Note what a cluster computes."""
        if called := self._calls.get(id(eqn)):
            return self._note_call(eqn, work.called.jaxpr, called)
        operands = list(variables(eqn.invars))
        of_each = [self._of(v) for v in operands]
        made = _Made(_NONE.union(*(of.sources for of in of_each)))
        if not is_reduction(eqn.primitive.name, eqn.params):
            saturates = bool(facts(eqn.primitive.name) & Fact.SATURATES)
            is_curved = work.transcendental > 0 or any(of.is_curved for of in of_each)
            made = made._replace(
                alike=_NONE.union(*(of.alike for of in of_each)),
                operands=() if is_curved else operands,
                is_curved=is_curved,
                is_bounded=saturates
                or all(of.is_bounded for of in of_each if of.sources),
            )
        elif core.size(eqn.outvars[0]) > 1:
            self._note_rows(eqn.invars[0], eqn.params["axes"])
        self._made.update(dict.fromkeys(eqn.outvars, made))

    def _in_call(self, eqn: Eqn, called: "Called") -> "Waiting | None":
        """Return what a call does to what waits, None if it needs its digits."""
        pairs = list(zip(eqn.invars, called.jaxpr.invars, strict=True))
        pairs = [(v, into) for v, into in pairs if not compat.is_literal(v)]
        return called.given(
            frozenset(
                into for v, into in pairs if _large(self._of(v).sources, core.size(v))
            ),
            frozenset(into for v, into in pairs if v in self._halves),
        )

    def _note_call(self, eqn: Eqn, inner: Jaxpr, called: "Waiting") -> None:
        into = dict(zip(inner.invars, eqn.invars, strict=True))
        for var in called._rows.keys() & into.keys():
            self._note_rows(into[var], called._rows[var])
        for out, var in zip(eqn.outvars, inner.outvars, strict=True):
            if not compat.is_literal(var):
                of = called._of(var)
                sources = (self._of(into[v]) for v in of.sources & into.keys())
                alike = (self._of(into[v]) for v in of.alike & into.keys())
                self._made[out] = _Made(
                    _NONE.union(*(given.sources for given in sources)),
                    _NONE.union(*(given.alike for given in alike)),
                    is_bounded=of.is_bounded,
                    is_curved=of.is_curved,
                )

    def _note_rows(self, total_of: Var, axes: tuple[int, ...]) -> None:
        """Note the axes of what is summed, and of what it is made of by elements."""
        found = [total_of]
        while found:
            var = found.pop()
            is_alike = var in self.values and var.aval.shape == total_of.aval.shape
            if is_alike and var not in self._rows:
                self._rows[var] = axes
                found += self._of(var).operands

    def _alike(self, eqn: Eqn, size: int) -> frozenset[Var]:
        """Return of what waits operands of this size are made, element by element."""
        operands = (v for v in variables(eqn.invars) if 0 < size <= core.size(v))
        return _NONE.union(*(self._of(v).alike for v in operands))

    def _of(self, var: Var) -> _Made:
        if var in self._made or var not in self.values:
            return self._made.get(var, _Made())
        return _Made(frozenset([var]), frozenset([var]))


class Called:
    """What a call runs, and what its equations do."""

    def __init__(self, jaxpr: Jaxpr, works: Sequence[Any]):
        self.jaxpr, self._works = jaxpr, works
        self.given = functools.cache(self._given)

    def _given(self, waits: frozenset[Var], halves: frozenset[Var]) -> Waiting | None:
        """Return what it does if some of its inputs wait, None if it needs digits."""
        made = {v for eqn in self.jaxpr.eqns for v in eqn.outvars if _may_wait(v)}
        found = Waiting(waits | made if waits else _NONE, halves)
        for eqn, work in zip(self.jaxpr.eqns, self._works, strict=True):
            if found.stays_outside(eqn, work):
                return None
            found.note(eqn, work)
        return found


def find(
    plan: CastPlan, halves: Set[Var], is_safe: bool, known: dict[CastPlan, Any]
) -> tuple[Set[Var], Set[Var]]:
    """Return the float32 values of a plan that wait; and those that may wait alone.

    In the safe form of float16, these are results of products, and sums of them.
    Others, such as exponentials, may be out of the range of a square root. `known` is
    of other plans.
    """
    # If results are half, none waits outside of loops: there XLA itself keeps what
    # takes less.
    if not is_safe and plan.around is not Around.LOOP:
        return _NONE, _NONE
    # What is computed, and not from parameters alone.
    pairs = zip(plan.jaxpr.invars, plan.ins, strict=True)
    carried = frozenset(v for v, p in pairs if p == FLOAT32)
    found = {*carried}
    for eqn, eqn_plan in zip(plan.jaxpr.eqns, plan.eqn_plans, strict=True):
        is_computed = any(v in found or v in halves for v in variables(eqn.invars))
        if eqn_plan.rule.is_product or is_computed:
            found.update(eqn.outvars)
    values = frozenset(filter(_may_wait, found - halves))
    if not is_safe:
        return values, values
    sums_of = _sums_of_products(plan, known)
    return values, {v for v in values & sums_of.keys() if not sums_of[v] & carried}


def _sums_of_products(
    plan: CastPlan, known: dict[CastPlan, Any]
) -> dict[Var, frozenset[Var]]:
    """Return what sums, moves and multiples make of products, and of which inputs.

    Half values are taken for results of products.
    """
    if plan in known:
        return known[plan]
    known[plan] = found = {v: frozenset([v]) for v in plan.jaxpr.invars}
    found |= dict.fromkeys(plan.jaxpr.constvars, _NONE)
    for eqn, eqn_plan in zip(plan.jaxpr.eqns, plan.eqn_plans, strict=True):
        name, size = eqn.primitive.name, max(map(core.size, eqn.outvars), default=0)
        large = _large(variables(eqn.invars), size)
        is_multiple = degrees(name, eqn.params) == (1, 1) and len(large) == 1
        made_of = dict.fromkeys(eqn.outvars, large)
        if name in CALLS and eqn_plan.bodies:
            (body,) = eqn_plan.bodies
            into = dict(zip(body.jaxpr.invars, eqn.invars, strict=True))
            outs = zip(eqn.outvars, body.jaxpr.outvars, strict=True)
            outs = [(v, w) for v, w in outs if not compat.is_literal(w)]
            of_body = _sums_of_products(body, known)
            made_of = {
                v: list(variables(map(into.__getitem__, of_body[w])))
                for v, w in outs
                if w in of_body
            }
        elif not (eqn_plan.rule.is_product or facts(name) & _LINEAR or is_multiple):
            made_of = {}
        for v, half in zip(eqn.outvars, eqn_plan.half_out, strict=True):
            if half or eqn_plan.rule.is_product:
                found[v] = _NONE
            elif v in made_of and all(w in found for w in made_of[v]):
                found[v] = _NONE.union(*(found[w] for w in made_of[v]))
    return found


def _may_wait(var: Var) -> bool:
    return core.is_f32(var) and core.size(var) > _FEW


def _large(operands: Iterable[Var], size: int) -> list[Var]:
    return [v for v in operands if core.size(v) * 2 >= size]


class Kept(NamedTuple):
    """What is kept of a float32 array."""

    # In the half dtype: square roots; or, in bfloat16, the array itself; or the bits of
    # float16 numbers that are relative to two numbers of each row.
    numbers: jax.Array
    scale: jax.Array | None  # of each row
    center: jax.Array | None  # of each row


# The tangent of what is kept is that of the array, in the numbers' place: so these have
# the half dtype, and its range. It is for derivatives of gradients alone: `in_place_of`
# has another. Rules of `jax.custom_jvp` would be lost where JAX evaluates a checkpoint
# in a loop in parts.


def keep(x: jax.Array, axes: tuple[int, ...], half_dtype: Any) -> Kept:
    """Return what is kept of a float32 array: `rows` has the axes."""
    kept = _in_two_bytes(sums.without_derivative(x), axes, half_dtype)
    return kept._replace(numbers=sums.differentiate_as(kept.numbers, x))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _in_two_bytes(x: jax.Array, axes: tuple[int, ...], half_dtype: Any) -> Kept:
    if not axes and has_range_of_f32(half_dtype):
        return Kept(x.astype(half_dtype), None, None)
    if not axes:
        root = lax.sign(x) * lax.sqrt(lax.abs(x))
        return Kept(sums.saturate(root, dtype=jnp.dtype(jnp.float16)), None, None)
    finite = jnp.where(lax.is_finite(x), x, 0.0)
    low, high = (  # `jnp.min` asks whether an axis may be empty
        lax.expand_dims(f(finite, axes), axes) for f in (lax.reduce_min, lax.reduce_max)
    )
    # Where all numbers of a row are nearer to the mean than to 0, what they differ by
    # has the digits. Elsewhere, those near 0 would lose theirs to an outlier.
    mean = jnp.mean(x, axes, keepdims=True)  # XLA shares it with a norm's
    is_far = lax.is_finite(mean) & ((low > mean / 2) | (high < mean / 2))
    center = jnp.where(is_far, mean, 0.0)
    least = jnp.finfo(x.dtype).tiny * _LARGEST
    scale = jnp.maximum(jnp.maximum(high, -low), least) / _LARGEST
    numbers = ((x - center) / scale).astype(jnp.float16)
    return Kept(lax.bitcast_convert_type(numbers, half_dtype), scale, center)


def restore(kept: Kept) -> jax.Array:
    """Return the float32 array, as far as it was kept."""
    found = _restore(jax.tree.map(sums.without_derivative, kept))
    return sums.differentiate_as(found, kept.numbers.astype(F32))


@jax.jit
def _restore(kept: Kept) -> jax.Array:
    if kept.scale is not None and kept.center is not None:
        numbers = lax.bitcast_convert_type(kept.numbers, jnp.float16)
        return numbers.astype(F32) * kept.scale + kept.center
    found = kept.numbers.astype(F32)
    is_root = kept.numbers.dtype == jnp.float16
    return found * lax.abs(found) if is_root else found


# The second of two arrays, with the derivative of the first, which need not be kept.
_in_place_of = new_primitives.new_primitive(
    "in_place_of",
    lambda x, restored: restored,
    lambda primals, tangents: new_primitives.with_tangent(
        primals[1], tangents[:1], lambda _, tangent: tangent
    ),
    lambda args, axes: _in_place_of(*sums.all_mapped(args, axes)),
    [lambda ct, aval, restored: ct],
)


def in_place_of(x: Any, kept: Kept | None) -> Any:
    """Return what was kept of an array, if so, with the derivative of the array."""
    return x if kept is None else _in_place_of(x, restore(kept))
