"""Primitives that hold jaxprs: whose values theirs are, and how each is built again.

One `frames` and one `build` per primitive. A frame says which operand of the equation
is which input of a jaxpr, which output is which result, and which of them must keep
their dtype (loop carries). `build` runs the primitive again around rewritten bodies.

Left alone, and never looked into: `pallas_call`, `custom_linear_solve`, callbacks,
reductions with a function of their own, conditions per platform, and any form of a
primitive that its `frames` does not know (it returns None).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmp_lite import compat, dtypes
from jmp_lite.autocast import sums


@dataclasses.dataclass(frozen=True)
class Frame:
    """One jaxpr of an equation.

    Attributes:
      jaxpr: the open jaxpr.
      consts: the values of its constvars.
      operands: per input, the index of the equation's operand.
      results: per output, the index of the equation's result, None if it is none.
      pinned_in: inputs that keep the dtype that the program gave them.
      pinned_out: outputs that do.
      casts_in: inputs that may be cast before the equation instead of inside.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    operands: tuple[int, ...]
    results: tuple[int | None, ...]
    pinned_in: frozenset[int] = frozenset()
    pinned_out: frozenset[int] = frozenset()
    casts_in: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Body:
    """A rewritten jaxpr, for `build` to put back.

    Attributes:
      fun: takes the jaxpr's inputs in the dtypes of the plan, returns its outputs.
      closed: returns the closed jaxpr of `fun`, the same object for equal bodies.
    """

    fun: Callable[..., list[Any]]
    closed: Callable[[], Any]


def frames(eqn: Any) -> tuple[Frame, ...] | None:
    """Return the frames of an equation; None if it holds none that are understood."""
    rule = _RULES.get(eqn.primitive.name)
    return rule[0](eqn) if rule else None


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation to be built again, and what is at hand for it.

    Attributes:
      eqn: the equation.
      bodies: its rewritten jaxprs, one per frame.
      args: its operands, in the dtypes of the plan.
      low_in: per operand, whether the plan has it in half.
      low_out: per result, likewise.
      low_dtype: the compute dtype.
      read_f32: the float32 value of an operand, by its index.
      rewrite: `rewrite.Rewriter.rewrite`, for the rules of custom derivatives.
      rewrite_jvp: `rewrite.Rewriter.rewrite_jvp`.
    """

    eqn: Any
    bodies: Sequence[Body]
    args: list[Any]
    low_in: tuple[bool, ...]
    low_out: tuple[bool, ...]
    low_dtype: Any
    read_f32: Callable[[int], Any]
    rewrite: Callable[..., Any]
    rewrite_jvp: Callable[..., Any]


def build(site: Site) -> Sequence[Any]:
    """Run an equation around rewritten bodies; return its results."""
    return _RULES[site.eqn.primitive.name][1](site)


def _frame(jaxpr: Any, first: int, count: int | None = None, **kwargs: Any) -> Frame:
    """Return the frame whose inputs are the operands from `first` on, in order."""
    opened = compat.open_jaxpr(jaxpr)
    inputs, outputs = len(opened.invars), len(opened.outvars)
    return Frame(
        jaxpr=opened,
        consts=compat.consts_of(jaxpr),
        operands=tuple(range(first, first + inputs)),
        results=tuple(range(outputs)) if count is None else (None,) * outputs,
        **kwargs,
    )


# jit, closed_call, remat: one jaxpr, its inputs and outputs are the equation's.


def _call_frames(eqn: Any) -> tuple[Frame, ...] | None:
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if jaxpr is None or len(compat.open_jaxpr(jaxpr).invars) != len(eqn.invars):
        return None
    donated = eqn.params.get("donated_invars", (False,) * len(eqn.invars))
    kept = frozenset(i for i, d in enumerate(donated) if d)
    casts_in = frozenset(range(len(eqn.invars))) - kept
    return (_frame(jaxpr, 0, pinned_in=kept, casts_in=casts_in),)


def _build_call(site: Site):
    eqn = site.eqn
    key = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    jaxpr, consts = compat.like(site.bodies[0].closed(), eqn.params[key])
    return compat.bind(eqn, [*consts, *site.args], {**eqn.params, key: jaxpr})


# scan: the carry keeps its dtype; constants and xs may be cast outside of the loop.


def _scan_frames(eqn: Any) -> tuple[Frame, ...] | None:
    counts = compat.scan_counts(eqn.params)
    if counts is None:
        return None
    num_consts, num_carry = counts
    carry = range(num_consts, num_consts + num_carry)
    return (
        _frame(
            eqn.params["jaxpr"],
            0,
            pinned_in=frozenset(carry),
            pinned_out=frozenset(range(num_carry)),
            casts_in=frozenset(range(len(eqn.invars))) - frozenset(carry),
        ),
    )


def _build_scan(site: Site):
    params = site.eqn.params
    num_consts, num_carry = compat.scan_counts(params) or (0, 0)
    consts, carry = site.args[:num_consts], site.args[num_consts:][:num_carry]
    # The gradient of a constant is summed over the iterations, in the dtype that the
    # constant has: a half one is differentiated as a cast inside of the loop.
    in_f32 = {
        i: site.read_f32(i)
        for i, x in enumerate(consts)
        if dtypes.is_half(jax.typeof(x).dtype)
    }

    def body(carry, xs):
        cast = [
            sums.differentiate_as(x, in_f32[i]) if i in in_f32 else x
            for i, x in enumerate(consts)
        ]
        outs = site.bodies[0].fun(*cast, *carry, *xs)
        return outs[:num_carry], outs[num_carry:]

    scan = functools.partial(
        jax.lax.scan,
        body,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        _split_transpose=params.get("_split_transpose", False),
    )
    xs = site.args[num_consts + num_carry :]
    carry, ys = compat.call(site.eqn, scan, carry, xs)
    return [*carry, *ys]


# while: as scan; the condition sees the carry, and none of its outputs is a result.


def _while_frames(eqn: Any) -> tuple[Frame, ...]:
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    num_carry = len(eqn.outvars)
    carry = tuple(range(cond_consts + body_consts, len(eqn.invars)))
    cond = _frame(
        eqn.params["cond_jaxpr"],
        0,
        count=0,
        pinned_in=frozenset(range(cond_consts, cond_consts + num_carry)),
        casts_in=frozenset(range(cond_consts)),
    )
    body = _frame(
        eqn.params["body_jaxpr"],
        cond_consts,
        pinned_in=frozenset(range(body_consts, body_consts + num_carry)),
        pinned_out=frozenset(range(num_carry)),
        casts_in=frozenset(range(body_consts)),
    )
    cond = dataclasses.replace(cond, operands=(*range(cond_consts), *carry))
    return cond, body


def _build_while(site: Site):
    # Not through `lax.while_loop`: under vmap the condition has one value per example.
    cond, body = (body.closed() for body in site.bodies)
    jaxprs = {"cond_jaxpr": cond, "body_jaxpr": body}
    return compat.bind(site.eqn, site.args, {**site.eqn.params, **jaxprs})


# cond and switch: a result is half where it is in every branch.


def _cond_frames(eqn: Any) -> tuple[Frame, ...] | None:
    is_per_platform = eqn.params.get("branches_platforms") is not None
    if is_per_platform or eqn.invars[0].aval.shape or "branches" not in eqn.params:
        return None
    casts_in = frozenset(range(len(eqn.invars) - 1))
    return tuple(_frame(b, 1, casts_in=casts_in) for b in eqn.params["branches"])


def _build_cond(site: Site):
    index, *operands = site.args
    branches = [body.fun for body in site.bodies]
    return compat.call(site.eqn, jax.lax.switch, index, branches, *operands)


# shard_map: a cast outside would move its transpose's sum over devices into half.


def _shard_map_frames(eqn: Any) -> tuple[Frame, ...] | None:
    if compat.shard_map_axes(eqn.params) is None:
        return None
    return (_frame(eqn.params["jaxpr"], 0),)


def _build_shard_map(site: Site):
    params = site.eqn.params
    mapped = jax.shard_map(
        lambda *args: tuple(site.bodies[0].fun(*args)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=compat.shard_map_axes(params),
        check_vma=params["check_vma"],
    )
    return compat.call(site.eqn, mapped, *site.args)


# custom_jvp: the user's rule is traced again and rewritten, with half where the
# function has it. custom_vjp: the boundary keeps its dtypes, casts go inside.


def _custom_jvp_frames(eqn: Any) -> tuple[Frame, ...]:
    return (_frame(eqn.params["call_jaxpr"], 0),)


def _custom_vjp_frames(eqn: Any) -> tuple[Frame, ...]:
    pinned_in = frozenset(range(len(eqn.invars)))
    pinned_out = frozenset(range(len(eqn.outvars)))
    jaxpr = eqn.params["call_jaxpr"]
    return (_frame(jaxpr, 0, pinned_in=pinned_in, pinned_out=pinned_out),)


def _build_custom_jvp(site: Site):
    def wrap(fun, role):
        if role == 0:
            return site.bodies[0].fun

        def jvp(*primals_and_tangents):
            # The rule was written for the dtypes of the program: it is traced in them.
            outs = site.rewrite_jvp(fun, primals_and_tangents, site.low_in * 2)
            dtypes = [
                site.low_dtype if low else v.aval.dtype
                for v, low in zip(site.eqn.outvars, site.low_out, strict=True)
            ]
            return [
                out.astype(dtype)
                if isinstance(out, jax.Array) and out.dtype != dtype
                else out
                for out, dtype in zip(outs, dtypes * 2, strict=True)
            ]

        return jvp

    return compat.rebuild_custom_derivative(site.eqn, site.args, wrap)


def _build_custom_vjp(site: Site):
    def wrap(fun, role):
        if role == 0:
            return site.bodies[0].fun
        return lambda *args: site.rewrite(fun, args)

    return compat.rebuild_custom_derivative(site.eqn, site.args, wrap)


_RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "jit": (_call_frames, _build_call),
    "closed_call": (_call_frames, _build_call),
    "remat2": (_call_frames, _build_call),
    "checkpoint": (_call_frames, _build_call),
    "scan": (_scan_frames, _build_scan),
    "while": (_while_frames, _build_while),
    "cond": (_cond_frames, _build_cond),
    "shard_map": (_shard_map_frames, _build_shard_map),
    "custom_jvp_call": (_custom_jvp_frames, _build_custom_jvp),
    "custom_vjp_call": (_custom_vjp_frames, _build_custom_vjp),
}
