"""Loops: the gradients of what all iterations share.

JAX sums the gradient of a weight over the iterations, in the dtype that the loop has it
in: so a half one is differentiated as a cast inside of the loop. The sum of a weight
that one product reads is read and written by every iteration. It is one product after
the loop, of all operands with all gradients, where those are smaller.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jmp_lite._src import compat, dtypes
from jmp_lite._src.autocast import products, sums
from jmp_lite._src.autocast.storage import Direction, EqnPlan, Part, Plan
from jmp_lite._src.jaxprs import binding, control_flow, core
from jmp_lite._src.jaxprs.core import Eqn, Var


class Shared(NamedTuple):
    """A product of a weight that all iterations share.

    Attributes:
      weight: the index of the weight among the constants of the loop.
      side: which operand of the product it is.
      zeros: what is added to the result, to be differentiated in place of the weight.
    """

    weight: int
    side: int
    zeros: Any = None


# Runs the body: its arguments and the shared products that have zeros; returns its
# results, and what these products multiply their weights by. Products are by index.
RunBody = Callable[[Sequence[Any], Mapping[int, Shared]], tuple[list[Any], dict]]


def find_shared(eqn: Eqn, body: Plan) -> dict[int, Shared]:
    """Return the products of a scan whose weights have their gradients after it.

    They are the only readers of a weight, and have less to keep of an iteration than
    its float32 gradient is to read and write. There is none if the loop has effects, as
    on a ref: JAX has no derivative rules for what has.
    """
    if eqn.effects or body.place.direction is not Direction.FORWARD:
        return {}
    num_consts, _ = compat.scan_counts(eqn.params) or (0, 0)
    consts = body.jaxpr.invars[:num_consts]
    positions: dict[Var, int] = {v: i for i, v in enumerate(consts)}
    kept = set(core.variables(body.jaxpr.outvars))  # and what others read, too
    runs = {x.product if isinstance(x, Part) else x for x in body.steps}
    found = {}
    for index, reader in enumerate(body.jaxpr.eqns):
        for side, var in enumerate(reader.invars):
            if compat.is_literal(var) or var not in positions:
                continue
            if not _is_shared(var, reader, body.eqn_plans[index]):
                kept.add(var)
            elif index in runs:
                found[index] = Shared(positions[var], side)
    others = {positions[v] for v in kept if v in positions}
    return {i: of for i, of in found.items() if of.weight not in others}


def _is_shared(weight: Var, eqn: Eqn, plan: EqnPlan) -> bool:
    if eqn.primitive.name != "dot_general" or not plan.is_half_product:
        return False
    (out,), others = eqn.outvars, [v for v in eqn.invars if v is not weight]
    if plan.rule.is_fp8 or len(others) != 1 or compat.is_literal(others[0]):
        return False
    is_smaller = core.size(others[0]) + core.size(out) < 2 * core.size(weight)
    return is_smaller and not compat.is_placed(compat.aval_of(out))


def multiply(
    eqn: Eqn,
    plan: EqnPlan,
    operands: Sequence[jax.Array],
    shared: Shared,
    half_dtype: DTypeLike,
) -> jax.Array:
    """Return a shared product, whose derivative is that of the zeros beside it."""
    is_half = plan.half_out[0] or core.is_half(eqn.outvars[0])
    run = functools.partial(products.run_in_order, plan.rule.order)
    out = binding.call(eqn, run, eqn, operands, half_dtype, is_half)
    return sums.differentiate_as(out, out + shared.zeros.astype(out.dtype))


def scan(
    eqn: Eqn,
    body: Plan,
    run_body: RunBody,
    operands: Sequence[jax.Array],
    in_f32: Callable[[int], jax.Array],
    half_dtype: DTypeLike,
) -> Sequence[jax.Array]:
    """Run a scan; `in_f32` returns an operand in float32."""
    num_consts, num_carry = compat.scan_counts(eqn.params) or (0, 0)
    consts, rest = list(operands[:num_consts]), operands[num_consts:]
    shared = find_shared(eqn, body)
    wide = {
        i: in_f32(i)
        for i, x in enumerate(consts)
        if dtypes.is_half(jax.typeof(x).dtype)
    }
    weights = {i: wide.pop(i, consts[i]) for i in {of.weight for of in shared.values()}}
    for i in weights:
        consts[i] = sums.cast(consts[i], half_dtype)
    others = consts, wide, rest[:num_carry], rest[num_carry:]

    def loop(weights, others, zeros):
        consts, wide, carry, xs = others
        wide = weights | wide

        def step(carry, xs):
            xs, zeros = xs
            read = [
                sums.differentiate_as(x, wide[i]) if i in wide else x
                for i, x in enumerate(consts)
            ]
            moved = {i: shared[i]._replace(zeros=zeros[i]) for i in zeros}
            outs, factors = run_body([*read, *carry, *xs], moved)
            return outs[:num_carry], (outs[num_carry:], factors)

        carry, (ys, factors) = control_flow.scan_as(eqn, step, carry, (xs, zeros))
        return [*carry, *ys], factors

    if not shared:
        return loop({}, others, {})[0]

    # JAX transposes all of a function with a rule, of a checkpoint what is linear.
    @jax.custom_jvp
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run(weights, others):
        return loop(weights, others, {})[0]

    def jvp(primals, tangents):
        weights, others = primals
        moves = {
            i: (tangents[0][of.weight], of.side)
            for i, of in shared.items()
            if not isinstance(tangents[0][of.weight], SymbolicZero)
        }
        fill, moved, dots = _with_tangents(others, tangents[1])
        if not moves:  # forward mode then keeps nothing of an iteration
            return jax.jvp(lambda x: loop(weights, fill(x), {})[0], (moved,), (dots,))
        length, eqns = eqn.params["length"], body.jaxpr.eqns
        zeros = {
            i: jnp.zeros((length, *core.shape(eqns[i].outvars[0])), half_dtype)
            for i in moves
        }
        (outs, factors), linear = jax.linearize(
            lambda moved, zeros: loop(weights, fill(moved), zeros), moved, zeros
        )
        terms = {}
        for i, (x, side) in moves.items():
            args = eqns[i], side, x, factors[i], half_dtype
            in_body = binding.call, eqns[i], products.of_each
            terms[i] = binding.call(eqn, *in_body, *args)
        return outs, linear(dots, terms)[0]

    run.defjvp(jvp, symbolic_zeros=True)
    return run(weights, others)


def _with_tangents(primals: Any, tangents: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return a function that fills in the leaves that have a tangent; these; those."""
    leaves, tree = jax.tree.flatten(primals)
    dots = tree.flatten_up_to(tangents)
    moved = [i for i, d in enumerate(dots) if not isinstance(d, SymbolicZero)]

    def fill(values):
        filled = dict(zip(moved, values, strict=True))
        return tree.unflatten([filled.get(i, x) for i, x in enumerate(leaves)])

    return fill, [leaves[i] for i in moved], [dots[i] for i in moved]
