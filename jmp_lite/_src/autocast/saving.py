"""What is saved for the backward pass, and what is computed again.

Policies for `jax.checkpoint`, and what decides whether arithmetic is worth it.
"""

import functools
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.autocast import products
from jmp_lite._src.autocast.precision import EqnPlan
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.core import F32, Eqn, Var
from jmp_lite._src.jaxprs.primitives import (
    CALLS,
    CAST,
    PRIMITIVES,
    Fact,
    degree,
    degrees,
    facts,
)

# The total of fewer terms is computed again.
_FEW = 8


def save_products(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Save the results of products, sums and softmax; compute the rest again.

    A policy for `jax.checkpoint` and `nn.remat`, for one layer or a whole function. No
    product is computed twice, and no activation is kept. The result of a softmax takes
    the place of its logits. Under `autocast`, what it has in half is kept in half.

    Args:
      primitive: the primitive of an operation, as `jax.checkpoint` passes it.
      *avals: the shapes and dtypes of its operands.
      **params: its parameters.

    Returns:
      Whether its results are kept for the backward pass.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jmp_lite import autocast, memory
      >>> def f(w, x):
      ...     return (jax.nn.gelu(x @ w[0]) @ w[1]).sum()
      >>> lean = autocast(jax.checkpoint(f, policy=memory.save_products))
      >>> w, x = jnp.ones((2, 8, 8)), jnp.ones((4, 8))
      >>> for fun in (autocast(f), lean, autocast(jax.checkpoint(f))):
      ...     str(jax.make_jaxpr(jax.grad(fun))(w, x)).count("= dot_general")
      5
      5
      6

    References:
      `jax.checkpoint_policies.dots_saveable`, which computes sums again.
    """
    is_of_autocast = primitive.name in (products.HALF_PRODUCT, products.SOFTMAX)
    is_product = bool(facts(primitive.name) & Fact.PRODUCT)
    return is_of_autocast or is_product or saves_sums(primitive, *avals, **params)


def saves_totals(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether the result of an operation is a statistic, which is kept."""
    if not is_reduction(primitive.name, params):
        return False
    return core.total(avals[0].shape[i] for i in params["axes"]) >= _FEW


def saves_sums(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether the result is a statistic that is a sum, not a largest number.

    The gradient of a largest number goes to what equals it. Computed again in another
    kernel, nothing need equal the one that was saved.
    """
    is_chosen = facts(primitive.name) & Fact.CHOOSES
    return not is_chosen and saves_totals(primitive, *avals, **params)


def saves_casts(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return whether the result is what a product has cast of a float32 weight."""
    return primitive.name == "name" and params["name"] == products.CAST_OPERAND


def compares(eqn: Eqn, differentiated: Set[Var]) -> bool:
    """Return whether numbers must be equal to the last bit: then `saves_sums`."""
    known = facts(eqn.primitive.name)
    if known & Fact.COMPARES:
        return all(core.is_float(v) and not compat.is_literal(v) for v in eqn.invars)
    is_chosen = known & Fact.CHOOSES and is_reduction(eqn.primitive.name, eqn.params)
    return bool(is_chosen) and not differentiated.isdisjoint(eqn.outvars)


def is_reduction(name: str, params: Any) -> bool:
    """Return whether a primitive reduces an array over axes."""
    reduces = facts(name) & (Fact.SUMS | Fact.CHOOSES | Fact.ARITHMETIC)
    return bool(reduces) and all(isinstance(a, int) for a in params.get("axes", "?"))


def moved_operand(eqn: Eqn, plan: EqnPlan) -> int | None:
    """Return which half operand an equation moves, if that is all that it does."""
    kind = facts(eqn.primitive.name) & (Fact.MOVES | Fact.CHOOSES)
    is_moved = [kind == Fact.MOVES and core.is_float(v) for v in eqn.invars]
    if eqn.primitive.name in CALLS and plan.bodies and eqn.outvars:
        (body,) = plan.bodies
        made_by = {v: i for i, e in enumerate(body.jaxpr.eqns) for v in e.outvars}
        moved = body.jaxpr.outvars[0]
        while not compat.is_literal(moved) and moved in made_by:
            i = made_by[moved]
            operand = moved_operand(body.jaxpr.eqns[i], body.eqn_plans[i])
            if operand is None:
                return None
            moved = body.jaxpr.eqns[i].invars[operand]
        is_moved = [v is moved for v in body.jaxpr.invars]
    if is_moved.count(True) != 1 or len(eqn.outvars) != 1:
        return None
    operand = is_moved.index(True)
    is_half = plan.half_in[operand] and not compat.is_literal(eqn.invars[operand])
    return operand if is_half else None


_CHOOSES = Fact.LIMITS | Fact.COMPARES | Fact.CHOOSES


class Work(NamedTuple):
    """What arithmetic does."""

    size: int  # of the largest array
    transcendental: int = 0  # the largest result of a function that is no polynomial
    chooses: int = 0  # that of a choice or a comparison, or of what is chosen by
    multiplies: bool = False  # whether variables are multiplied
    is_exponential: bool = False
    divides: int = 0  # the largest divisor, or operand of a root or a logarithm
    loses_digits: int = 0  # that of other functions that need float32
    compares: bool = False  # what must be equal to the last bit: see `saving.compares`
    called: Any = None  # the `waiting.Called` of a call

    @property
    def is_worth_it(self) -> bool:
        """Whether its derivative keeps arrays of its own.

        That of a linear operation keeps none, and that of a choice a mask of one byte,
        beside which recomputation buys little.
        """
        is_nonlinear = self.multiplies and self.chooses * 2 < self.size
        return self.is_transcendental or is_nonlinear

    @property
    def needs_digits(self) -> bool:
        """Whether its derivative is another one if operands are rounded.

        That of an exponential needs the digits behind the point, and a choice may
        become another choice.
        """
        return self.is_exponential or self.chooses > 0

    @property
    def is_transcendental(self) -> bool:
        """Whether it is an activation."""
        return self.transcendental * 2 >= self.size


def together(works: Iterable[Work], called: Any = None) -> Work:
    """Return what pieces of arithmetic do together."""
    *numbers, _ = zip(Work(0), *works, strict=True)
    return Work(*map(max, numbers), called=called)


def work_of(eqn: Eqn, differentiated: Set[Var]) -> Work | None:
    """Return what an equation does, None if it is no arithmetic in float32."""
    dtypes = map(core.dtype_of, (*eqn.invars, *eqn.outvars))
    if not all(map(_is_f32_or_exact, dtypes)) or not _is_arithmetic(eqn):
        return None
    name, known = eqn.primitive.name, facts(eqn.primitive.name)
    size, is_f32 = core.size(eqn.outvars[0]), core.is_f32(eqn.outvars[0])
    return Work(
        size=max(map(core.size, (*eqn.invars, *eqn.outvars))),
        transcendental=size if is_f32 and _is_transcendental(name) else 0,
        chooses=size if known & _CHOOSES else 0,
        multiplies=bool(known & Fact.ARITHMETIC) and degree(eqn) not in (None, 1),
        is_exponential=bool(known & Fact.EXPONENTIAL),
        divides=_divides(eqn),
        loses_digits=size if _loses_digits(name) else 0,
        compares=compares(eqn, differentiated),
    )


@functools.cache
def _is_f32_or_exact(dtype: Any) -> bool:
    return dtype in (F32, np.dtype(bool)) or jnp.issubdtype(dtype, jnp.integer)


def _is_arithmetic(eqn: Eqn) -> bool:
    """Return whether this is elementwise, a reduction, or a move in order."""
    name = eqn.primitive.name
    if name == CAST or is_reduction(name, eqn.params):
        return True
    known = facts(name)
    is_in_order = known & Fact.IN_ORDER and known & (Fact.REPEATS | Fact.PERMUTES)
    return bool(known & Fact.ELEMENTWISE or is_in_order) or known == Fact.MOVES


@functools.cache
def _is_transcendental(name: str) -> bool:
    polynomial = Fact.ARITHMETIC | Fact.EXACT | Fact.MOVES | Fact.JOINS | Fact.COMPARES
    known = facts(name)
    return bool(known & Fact.ELEMENTWISE) and not known & polynomial


def _divides(eqn: Eqn) -> int:
    """Return the size of an operand near whose zero the derivative has no bound."""
    name = eqn.primitive.name
    powers = (0,) if facts(name) & Fact.LOGARITHM else degrees(name, eqn.params)
    pairs = zip(eqn.invars, powers, strict=False)
    return max((core.size(v) for v, power in pairs if power < 1), default=0)


@functools.cache
def _loses_digits(name: str) -> bool:
    """Return whether this is no sum, power or logarithm, and needs float32."""
    known, is_plain = facts(name), Fact.LINEAR | Fact.LOGARITHM
    if not known & Fact.ELEMENTWISE or known & is_plain:
        return False
    is_of_pair = known & (Fact.BROADCASTS | Fact.ARITHMETIC) == Fact.BROADCASTS
    in_f32 = PRIMITIVES[name].op_class == "float32"
    return bool(is_of_pair) or (in_f32 and not degrees(name, {}))


def without_gradients(eqns: Iterable[Eqn]) -> Iterable[Var]:
    """Yield what is computed of nothing, or behind a `stop_gradient`."""
    found: set[Var] = set()
    for eqn in eqns:
        is_stopped = eqn.primitive.name == "stop_gradient"
        if is_stopped or found.issuperset(core.variables(eqn.invars)):
            found.update(eqn.outvars)
            yield from eqn.outvars


def is_activation(eqn: Eqn, work: Work | None) -> bool:
    """Return whether this is no polynomial, and its derivative has a bound.

    That of a logarithm has none, nor that of a root.
    """
    name = eqn.primitive.name
    is_root = min(degrees(name, eqn.params), default=1) < 1
    is_bounded = not (is_root or facts(name) & Fact.LOGARITHM)
    return work is not None and work.is_transcendental and is_bounded
