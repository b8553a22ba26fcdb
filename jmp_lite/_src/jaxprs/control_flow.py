"""Primitives that hold jaxprs: map sub-jaxprs to operands, and re-bind the primitive.

One function per primitive returns its `SubJaxpr`s. Another runs the primitive again
around rewritten jaxprs.

Not understood, and so run as they are: `pallas_call`, `custom_linear_solve`, callbacks,
reductions with a function of their own, conditions per platform, and any form of a
primitive that the first function does not know (it returns None).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
from jax import Array

from jmp_lite._src import compat
from jmp_lite._src.compat import AnyJaxpr
from jmp_lite._src.jaxprs import binding, core
from jmp_lite._src.jaxprs.core import ClosedJaxpr, Eqn, Jaxpr, total
from jmp_lite._src.jaxprs.primitives import CHECKPOINTS, FOLLOWED
from jmp_lite._src.trees import PyTree


@dataclasses.dataclass(frozen=True)
class SubJaxpr:
    """One jaxpr of an equation."""

    jaxpr: Jaxpr  # open
    consts: tuple[Array, ...]  # the values of its constvars
    operands: tuple[int, ...]  # per input, the index of the equation's operand
    results: tuple[int | None, ...]  # per output, that of its result; None: it is none
    # Inputs that keep the program's dtype, as loop carries do.
    fixed_in: frozenset[int] = frozenset()
    fixed_out: frozenset[int] = frozenset()  # outputs that do
    casts_before: bool = True  # whether the others may be cast before, not inside

    @property
    def casts_in(self) -> frozenset[int]:
        """The inputs that may be cast before."""
        others = frozenset(range(len(self.operands))) - self.fixed_in
        return others if self.casts_before else frozenset()


@dataclasses.dataclass(frozen=True)
class Body:
    """A rewritten jaxpr, for `build` to put back."""

    fun: Callable[..., list[Array]]  # of the jaxpr's inputs, in the plan's dtypes
    closed: Callable[[], ClosedJaxpr]  # its jaxpr, one object for equal bodies


def sub_jaxprs(eqn: Eqn) -> tuple[SubJaxpr, ...] | None:
    """Return the jaxprs of an equation; None if it holds none that are understood."""
    rule = _RULES.get(eqn.primitive.name)
    return rule[0](eqn) if rule else None


def bodies_of(eqn: Eqn) -> tuple[SubJaxpr, ...] | None:
    """Return the `SubJaxpr`s of an equation whose sites are listed, else None."""
    name = eqn.primitive.name
    if name not in FOLLOWED:
        return None
    if name == "while":
        # Under vmap it has a condition per example, and only JAX can run it.
        (holds,) = compat.open_jaxpr(eqn.params["cond_jaxpr"]).outvars
        if core.shape(holds):
            return None
    return sub_jaxprs(eqn)


def site_eqns(eqns: Iterable[Eqn]) -> Iterator[Eqn]:
    """Yield the equations that are sites, those in sub-jaxprs that are listed too."""
    for eqn in eqns:
        bodies = bodies_of(eqn)
        if bodies is None:
            yield eqn
        for body in bodies or ():
            yield from site_eqns(body.jaxpr.eqns)


def map_scopes(
    closed: ClosedJaxpr, fun: Callable[[Jaxpr, Sequence[Eqn]], list[Eqn]]
) -> ClosedJaxpr:
    """Return a jaxpr with a function of the equations of each jaxpr in it.

    It is returned itself if no equation changes, and equal sub-jaxprs stay one object.
    """

    @functools.cache
    def mapped(jaxpr):
        opened = compat.open_jaxpr(jaxpr)
        inside = [
            eqn if sub_jaxprs(eqn) is None else core.map_jaxprs(eqn, mapped)
            for eqn in opened.eqns
        ]
        made = fun(opened, inside)
        is_same = [*map(id, made)] == [*map(id, opened.eqns)]
        return jaxpr if is_same else compat.with_eqns(jaxpr, made)

    return mapped(closed)


def why_not_opened(eqn: Eqn) -> str:
    """Return why `sub_jaxprs` does not return the jaxprs that an equation holds."""
    name = eqn.primitive.name
    if name == "cond":
        return "branches per platform"
    if name in _RULES:
        return "a form of it that is not understood"
    names = [jaxpr.debug_info.func_name for jaxpr in compat.jaxprs_of(eqn)]
    return f"it runs functions of its own ({', '.join(dict.fromkeys(names))})"


def count_eqns(eqns: Iterable[Eqn], number_of: Callable[[Eqn], int]) -> int:
    """Return the sum of a number over equations and those in their jaxprs.

    A jaxpr that several equations call counts for each, and is visited once.
    """

    @functools.cache
    def count_inside(jaxpr: Jaxpr) -> int:
        return count(jaxpr.eqns)

    def count(eqns: Iterable[Eqn]) -> int:
        inside = (sum(map(count_inside, compat.jaxprs_of(eqn))) for eqn in eqns)
        return sum(map(number_of, eqns)) + sum(inside)

    return count(eqns)


def trips(eqn: Eqn) -> int | None:
    """Return how often the bodies of an equation run: 1 if it is no loop.

    None for a `while`, which only its condition ends.
    """
    if eqn.primitive.name == "scan":
        return total([eqn.params["length"]])
    return None if eqn.primitive.name == "while" else 1


@dataclasses.dataclass(frozen=True)
class RebuildContext:
    """An equation to run again around rewritten jaxprs, and what that takes."""

    eqn: Eqn
    bodies: Sequence[Body]  # one per `SubJaxpr`
    args: list[Array]
    # Takes the operands of a scan; returns its results.
    scan: Callable[[list[Array]], Sequence[Array]]
    # Takes a rule of a `custom_jvp` or a `custom_vjp`; returns what runs instead.
    rewrite_rule: Callable[[Callable[..., PyTree]], Callable[..., PyTree]]


def build(context: RebuildContext) -> Sequence[Array]:
    """Run an equation around rewritten bodies; return its results."""
    return _RULES[context.eqn.primitive.name][1](context)


def as_sub_jaxpr(jaxpr: AnyJaxpr, first: int, **fields: Any) -> SubJaxpr:
    """Return the sub-jaxpr whose inputs are the operands from `first` on, in order."""
    opened = compat.open_jaxpr(jaxpr)
    operands = tuple(range(first, first + len(opened.invars)))
    results = tuple(range(len(opened.outvars)))
    return SubJaxpr(opened, compat.consts_of(jaxpr), operands, results, **fields)


# jit, a closed call, remat: one jaxpr, its inputs and outputs are the equation's.


def _call_sub_jaxprs(eqn: Eqn) -> tuple[SubJaxpr, ...]:
    kept = frozenset(i for i, d in enumerate(eqn.params.get("donated_invars", ())) if d)
    return (as_sub_jaxpr(eqn.params[_key(eqn)], 0, fixed_in=kept),)


def _key(eqn: Eqn) -> str:
    return "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"


def _build_call(context: RebuildContext) -> list[Array]:
    eqn, key = context.eqn, _key(context.eqn)
    jaxpr, consts = compat.match_jaxpr_type(context.bodies[0].closed(), eqn.params[key])
    return binding.bind(eqn, [*consts, *context.args], {**eqn.params, key: jaxpr})


# scan: the carry keeps its dtype; constants and xs may be cast outside of the loop.


def _scan_sub_jaxprs(eqn: Eqn) -> tuple[SubJaxpr, ...] | None:
    counts = compat.scan_counts(eqn.params)
    return counts and (_of_loop(eqn.params["jaxpr"], 0, *counts),)


def _of_loop(jaxpr: AnyJaxpr, first: int, num_consts: int, num_carry: int) -> SubJaxpr:
    """Return the sub-jaxpr of constants, a carry, and what else a loop passes to it."""
    carry = frozenset(range(num_consts, num_consts + num_carry))
    fixed_out = frozenset(range(num_carry))
    return as_sub_jaxpr(jaxpr, first, fixed_in=carry, fixed_out=fixed_out)


def scan_as(eqn: Eqn, body: Callable[..., PyTree], carry: PyTree, xs: PyTree) -> PyTree:
    """Return `lax.scan` of another body, as long and in the order of an equation's."""
    params = eqn.params
    scan = functools.partial(
        jax.lax.scan,
        body,
        # A symbolic length is that of what is scanned, and may not be given.
        length=None if jax.tree.leaves(xs) else params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        _split_transpose=params.get("_split_transpose", False),
    )
    return binding.call(eqn, scan, carry, xs)


# while: as scan; the condition sees the carry, and none of its outputs is a result.


def _while_sub_jaxprs(eqn: Eqn) -> tuple[SubJaxpr, ...]:
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = range(cond_consts + body_consts, len(eqn.invars))
    cond = dataclasses.replace(
        _of_loop(eqn.params["cond_jaxpr"], 0, cond_consts, len(carry)),
        operands=(*range(cond_consts), *carry),
        results=(None,),
        fixed_out=frozenset(),
    )
    body = _of_loop(eqn.params["body_jaxpr"], cond_consts, body_consts, len(carry))
    return cond, body


def _build_while(context: RebuildContext) -> list[Array]:
    # Not through `lax.while_loop`: under vmap the condition has one value per example.
    cond, body = (body.closed() for body in context.bodies)
    jaxprs = {"cond_jaxpr": cond, "body_jaxpr": body}
    return binding.bind(context.eqn, context.args, {**context.eqn.params, **jaxprs})


# cond and switch: a result is half where it is in every branch.


def _cond_sub_jaxprs(eqn: Eqn) -> tuple[SubJaxpr, ...] | None:
    if eqn.params.get("branches_platforms") is not None:
        return None
    return tuple(as_sub_jaxpr(branch, 1) for branch in eqn.params["branches"])


def _build_cond(context: RebuildContext) -> Sequence[Array]:
    index, *operands = context.args
    branches = [body.fun for body in context.bodies]
    return binding.call(context.eqn, jax.lax.switch, index, branches, *operands)


# shard_map: a cast outside would move its transpose's sum over devices into half.


def _shard_map_sub_jaxprs(eqn: Eqn) -> tuple[SubJaxpr, ...] | None:
    if compat.shard_map_axes(eqn.params) is None:
        return None
    return (as_sub_jaxpr(eqn.params["jaxpr"], 0, casts_before=False),)


def _build_shard_map(context: RebuildContext) -> Sequence[Array]:
    params = context.eqn.params
    mapped = jax.shard_map(
        lambda *args: tuple(context.bodies[0].fun(*args)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=compat.shard_map_axes(params),
        check_vma=params["check_vma"],
    )
    return binding.call(context.eqn, mapped, *context.args)


# custom_jvp: the user's rule is traced again and rewritten, with half where the
# function has it. custom_vjp keeps its input and output dtypes, casts go inside.


def _custom_vjp_sub_jaxprs(eqn: Eqn) -> tuple[SubJaxpr, ...]:
    fixed_in = frozenset(range(len(eqn.invars)))
    fixed_out = frozenset(range(len(eqn.outvars)))
    jaxpr = eqn.params["call_jaxpr"]
    return (as_sub_jaxpr(jaxpr, 0, fixed_in=fixed_in, fixed_out=fixed_out),)


def _build_custom(context: RebuildContext) -> list[Array]:
    def wrap(fun, role):
        return context.bodies[0].fun if role == 0 else context.rewrite_rule(fun)

    rebuild, eqn = compat.rebuild_custom_derivative, context.eqn
    return binding.call(eqn, rebuild, eqn, context.args, wrap)


_Rule: TypeAlias = tuple[
    Callable[[Eqn], tuple[SubJaxpr, ...] | None],
    Callable[[RebuildContext], Sequence[Array]],
]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        ("jit", compat.CLOSED_CALL, *CHECKPOINTS), (_call_sub_jaxprs, _build_call)
    ),
    "scan": (_scan_sub_jaxprs, lambda context: context.scan(context.args)),
    "while": (_while_sub_jaxprs, _build_while),
    "cond": (_cond_sub_jaxprs, _build_cond),
    "shard_map": (_shard_map_sub_jaxprs, _build_shard_map),
    "custom_jvp_call": (
        lambda eqn: (as_sub_jaxpr(eqn.params["call_jaxpr"], 0, casts_before=False),),
        _build_custom,
    ),
    "custom_vjp_call": (_custom_vjp_sub_jaxprs, _build_custom),
}
