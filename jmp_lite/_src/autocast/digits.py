"""Digits: which readers of a value need more of them than half precision has.

A bfloat16 number has 8 bits, a float16 number 11. Arithmetic that reads a rounded
number has its relative error, with a few exceptions: a difference of two numbers may be
all rounding error, and so may what is decided by order. These readers ask for all
digits, and so does, backward, the arithmetic that passes digits on:

  NEAR   the distance from a number is used: `1 - p`, `log(p)`, a divisor, a factor that
         is multiplied many times. Asked through sums, products, powers and roots.
  TERMS  a difference of two arrays is taken, or a sum with a negative multiple. Asked
         through sums, multiples, and functions of one array.
  ALL    order, linear algebra, an angle, an integer. Asked through any arithmetic.

They end at a matrix product, whose operands are half in any case: its *result* is the
float32 accumulator then. A difference from a statistic of the same products, as
`x - mean(x)` in a norm, asks nothing: what is rounded is small beside what a norm
divides by. Nor does one from a bias. A mean of few arrays is no such statistic. What
an equation around a jaxpr knows of its operands, the jaxpr is given (`Given`).

Limits: whether terms cancel depends on their values, which are not known. `x * cos -
y * sin`, terms with different factors that no product makes, asks nothing; nor does a
sum of many terms, whose roundings cancel; an offset inside of a product (a column of
ones) cannot be seen.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from jmp_lite._src import compat
from jmp_lite._src.autocast import products
from jmp_lite._src.autocast.storage import Given, may_be_far
from jmp_lite._src.autocast.sums import is_lookup
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.core import Eqn, Jaxpr, Var, inner_eqns, variables
from jmp_lite._src.jaxprs.primitives import (
    CALLS,
    CAST,
    LOOPS,
    Fact,
    adds,
    degrees,
    facts,
    has,
    multiplies,
)


class Use:
    """How a value is read, as bits: the union over everything that reads it.

    Attributes:
      HALF: a matrix product reads it.
      FLOAT32: anything else reads it.
      RETURNED: it is returned.
      DTYPE: the mask of these three.
      NEAR, TERMS, ALL: which digits are asked for, see above.
      DIGITS: the mask of these three.
      SUMMED: a sum with the result of a product, as a residual stream, reads it.
      WIDE: a matrix product that runs as it is written, in float32, reads it.
    """

    HALF, FLOAT32, RETURNED = 1, 2, 4
    NEAR, TERMS, ALL = 8, 16, 32
    DTYPE, DIGITS = 7, 56
    SUMMED, WIDE = 64, 128


NEAR, TERMS, ALL = Use.NEAR, Use.TERMS, Use.ALL

# How many terms a sum has whose roundings cancel, and a mean that is near none of them.
_MANY = 16
# A power from here on multiplies a number many times.
_LARGE_POWER = 8


def is_wide(use: int) -> bool:
    """Return whether products read a value, and all of them in float32."""
    return use & (Use.WIDE | Use.HALF) == Use.WIDE


class Structure(NamedTuple):
    """What a jaxpr itself says of its variables."""

    # Per variable, of which inputs, products and other results it is computed: bits.
    origins: dict[Var, int]
    carried: set[Var]  # sums and multiples of what a loop carries
    inputs: frozenset[Var]
    made_by: dict[Var, Eqn]
    roots: dict[Var, Var]  # the array that a value is a part of, or moved from
    products: dict[Var, int]  # of which results of products it is made: bits
    # Made of a smaller array, whose numbers it repeats: along which axes.
    spread: dict[Var, frozenset[int]]
    statistics: set[Var]  # made of sums over axes, and of nothing larger
    negative: set[Var]  # multiples with a negative number, or sums of such
    differences: set[Var]  # sums whose terms may cancel
    limits: set[tuple[Var, complex]]  # what a maximum with a number reads and makes

    def origins_of(self, variables: Iterable[Var]) -> int:
        """Return of what some variables are computed: bits."""
        return core.bit_or(self.origins.get(v, 0) for v in variables)

    def is_full(self, var: Var, eqn: Eqn) -> bool:
        """Return whether an operand is an array as large as the result, and no row."""
        if compat.is_literal(var) or var in self.spread:
            return False
        return core.size(var) >= core.size(eqn.outvars[0])

    def given(self, eqn: Eqn, operands: Iterable[int]) -> tuple[Given, ...]:
        """Return what is known of the operands of an equation, for its jaxpr.

        A loop reads slices of them, of which no size is known. Only sums and products
        ask for it: without these, calls that differ in it share a plan.
        """
        names = (inner.primitive.name for inner in inner_eqns(eqn))
        if not any(adds(name) or multiplies(name) for name in names):
            return ()
        sizes_known = eqn.primitive.name not in LOOPS
        return tuple(
            Given()
            if compat.is_literal(v)
            else Given(
                is_product=v in self.products,
                is_carried=v in self.carried,
                is_negative=v in self.negative,
                is_spread=sizes_known and v in self.spread,
                is_statistic=sizes_known and v in self.statistics,
            )
            for v in (eqn.invars[i] for i in operands)
        )

    def is_moved_input(self, var: Var) -> bool:
        """Return whether a variable is an input, or moved from one: no rows of it."""
        found = _moved_from(var, self.made_by)
        return not compat.is_literal(found) and found in self.inputs


def _moved_from(var: Var, made_by: Mapping[Var, Eqn]) -> Var:
    """Return what a value is moved from, by calls too."""
    while not compat.is_literal(var) and var in made_by:
        eqn = made_by[var]
        bodies = compat.jaxprs_of(eqn) if eqn.primitive.name in CALLS else ()
        if len(bodies) == 1:
            body = compat.open_jaxpr(bodies[0])
            inside: dict[Var, Eqn] = {v: e for e in body.eqns for v in e.outvars}
            found = _moved_from(body.outvars[eqn.outvars.index(var)], inside)
            if found not in body.invars:
                return var
            var = eqn.invars[body.invars.index(found)]
        elif has(eqn.primitive.name, Fact.MOVES) and not is_lookup(eqn):
            var = eqn.invars[0]
        else:
            return var
    return var


def structure(
    jaxpr: Jaxpr,
    is_arithmetic: Iterable[bool],
    carry: Sequence[Var],
    given: Sequence[Given],
) -> Structure:
    """Return the structure of a jaxpr; per equation, whether it is arithmetic or moves.

    `carry` are the inputs that a loop carries; `given` is what is known of each around
    the jaxpr.
    """
    count = itertools.count()
    inputs = *jaxpr.constvars, *jaxpr.invars
    origins: dict[Var, int] = {v: 1 << next(count) for v in inputs}
    carried = set(filter(core.is_f32, carry))
    known = origins, carried, frozenset(inputs)
    found = Structure(*known, {}, {}, {}, {}, set(), set(), set(), set())
    around = 1 << next(count)  # the products there
    for v, of in zip(jaxpr.invars, given, strict=False):  # none of a whole function
        if of.is_product:
            found.products[v] = around
        if of.is_carried:
            carried.add(v)
        if of.is_negative:
            found.negative.add(v)
        if of.is_spread:
            found.spread[v] = frozenset(range(len(core.shape(v))))
        if of.is_statistic:
            found.statistics.add(v)
    for eqn, arithmetic in zip(jaxpr.eqns, is_arithmetic, strict=True):
        found.made_by.update(dict.fromkeys(eqn.outvars, eqn))
        made_of = core.bit_or(found.products.get(v, 0) for v in variables(eqn.invars))
        if any(has(e.primitive.name, Fact.PRODUCT) for e in inner_eqns(eqn)):
            made_of = 1 << next(count)
        if has(eqn.primitive.name, Fact.LIMITS):
            found.limits.update(_with_numbers(eqn, (*eqn.invars, *eqn.outvars)))
        if _makes_negative(eqn, found.negative):
            found.negative.update(eqn.outvars)
        if adds(eqn.primitive.name) and _is_difference(eqn, found):
            found.differences.update(eqn.outvars)
        if made_of:
            found.products.update(dict.fromkeys(eqn.outvars, made_of))
        is_mask = eqn.outvars and all(map(core.is_bool, eqn.outvars))
        if not (arithmetic or is_mask):
            found.origins.update({v: 1 << next(count) for v in eqn.outvars})
            continue
        _note(eqn, found)
    return found


def _note(eqn: Eqn, found: Structure) -> None:
    operands = list(variables(eqn.invars))
    origins = found.origins_of(operands)
    found.origins.update(dict.fromkeys(eqn.outvars, origins))
    name, known = eqn.primitive.name, facts(eqn.primitive.name)
    size = core.size(eqn.outvars[0])
    floats = [v for v in operands if core.is_float(v)]
    if known & Fact.MOVES and floats:
        root = found.roots.get(floats[0], floats[0])
        found.roots.update(dict.fromkeys(eqn.outvars, root))
    axes = [_repeated_axes(v, eqn, found.spread) for v in floats]
    shared = frozenset(range(len(core.shape(eqn.outvars[0])))).intersection(*axes)
    if shared or not floats:
        found.spread.update(dict.fromkeys(eqn.outvars, shared))
    reduces = floats and size < core.size(floats[0])
    others = [v for v in floats if v not in found.statistics]
    is_of_statistics = len(others) < len(floats) and found.spread.keys() >= {*others}
    is_total = reduces and known & (Fact.SUMS | Fact.CHOOSES)
    if len(axes) > 1 and all(axes) and not shared:
        is_of_statistics = False  # rows along different axes make an array
    if is_of_statistics or (is_total and not _is_near_terms(eqn, found.made_by)):
        found.statistics.update(eqn.outvars)
    carried = [v in found.carried for v in floats]
    is_linear = known & (Fact.LINEAR | Fact.MOVES | Fact.JOINS)
    if any(carried) and size > 1 and (is_linear or multiplies(name)):
        found.carried.update(eqn.outvars)


def _repeated_axes(
    var: Var, eqn: Eqn, spread: Mapping[Var, frozenset[int]]
) -> frozenset[int]:
    """Return along which axes of its result an equation repeats numbers of a row."""
    shape, of_operand = core.shape(eqn.outvars[0]), core.shape(var)
    if has(eqn.primitive.name, Fact.MOVES):
        is_larger = core.size(var) < core.total(shape)
        place = eqn.params.get("broadcast_dimensions", ())
    elif var in spread:
        return spread[var]
    else:
        is_larger = len(of_operand) == len(shape)
        place = range(len(shape))
    kept = {i for k, i in enumerate(place) if is_larger and of_operand[k] == shape[i]}
    return frozenset(range(len(shape))) - kept if is_larger else frozenset()


def _is_near_terms(eqn: Eqn, made_by: Mapping[Var, Eqn]) -> bool:
    """Return whether it sums few arrays as they are, and their mean is near each."""
    operand, out = eqn.invars[0], eqn.outvars[0]
    if core.size(operand) >= core.size(out) * _MANY:
        return False
    makers = [made_by.get(v) for v in variables([_moved_from(operand, made_by)])]
    linear = Fact.LINEAR | Fact.JOINS | Fact.PRODUCT
    is_linear = all(e is None or facts(e.primitive.name) & linear for e in makers)
    return has(eqn.primitive.name, Fact.SUMS) and is_linear


def _makes_negative(eqn: Eqn, negative: Set[Var]) -> bool:
    """Return whether a result is a multiple with a negative number, or adds such."""
    name, known = eqn.primitive.name, facts(eqn.primitive.name)
    signs = [_is_negative(v, negative) for v in eqn.invars]
    if name == "neg":
        return not signs[0]
    if adds(name):
        return signs[0] and signs[1] != (name == "sub")
    if multiplies(name) or known & Fact.PRODUCT:
        return signs[0] != signs[1]
    return bool(known & (Fact.MOVES | Fact.SUMS)) and signs[0]


def _is_negative(var: Var, negative: Set[Var]) -> bool:
    if compat.is_literal(var):
        return core.is_float(var) and bool(np.real(var.val) < 0)
    return var in negative


def asked(eqn: Eqn, use: int, of: Structure, is_forward: bool) -> list[int]:
    """Return which digits arithmetic or a move asks of each operand, as bits.

    `use` has those that are asked of its results. Only equations of the forward pass
    ask for some of their own (`is_forward`).
    """
    passed = use & Use.DIGITS
    name, known = eqn.primitive.name, facts(eqn.primitive.name)
    if name == CAST and not core.is_float(eqn.outvars[0]):
        is_rounded = any(map(core.is_float, eqn.invars))
        return [ALL if is_rounded or passed else 0] * len(eqn.invars)
    if name == CAST and core.is_bool(eqn.invars[0]):
        return [ALL]
    if known & Fact.COMPARES:
        return _of_comparison(eqn, use, of)
    if all(map(core.is_bool, eqn.outvars)):  # whether numbers are finite, say
        return [passed * core.is_bool(v) for v in eqn.invars]
    if has(name, Fact.JOINS | Fact.CHOOSES):
        # The backward pass chooses as the forward pass does.
        mask = _of_mask(eqn, of) if is_forward else 0
        return [mask, *[passed] * (len(eqn.invars) - 1)]
    # Of a complex exponential, the imaginary part is an angle.
    is_angle = known & Fact.EXPONENTIAL and products.is_complex(eqn)
    if known & (Fact.FRACTION | Fact.PERIODIC) or is_angle:
        return [ALL] * len(eqn.invars)
    own = _of_own(eqn, use, of) if is_forward else _of_carried(eqn, of)
    if known & (Fact.NEAR_ONE | Fact.MULTIPLIES):
        own = [NEAR] * len(eqn.invars)
    return [x | y for x, y in zip(own, _passed_on(eqn, passed, of), strict=True)]


def summed(eqn: Eqn, use: int, of: Structure) -> list[int]:
    """Return which operands a sum with the result of a product reads, as bits."""
    known = facts(eqn.primitive.name)
    is_array = [of.is_full(v, eqn) for v in eqn.invars]
    if not known & (Fact.LINEAR | Fact.MOVES | Fact.JOINS):
        is_multiple = known & Fact.BROADCASTS and is_array.count(True) == 1
        return [use & Use.SUMMED if is_multiple and x else 0 for x in is_array]
    is_sum = adds(eqn.primitive.name) and all(is_array)
    are_products = [is_sum and v in of.products for v in eqn.invars]
    if any(are_products):
        use = Use.SUMMED
    return [use & Use.SUMMED if x else 0 for x in is_array]


def _of_own(eqn: Eqn, use: int, of: Structure) -> list[int]:
    """Return which digits sums, differences, products and quotients ask for."""
    name, (*operands,) = eqn.primitive.name, eqn.invars
    if adds(name):
        return _of_terms(eqn, use, of)
    if not multiplies(name):
        is_large = max(degrees(name, eqn.params), default=0) >= _LARGE_POWER
        return [NEAR * is_large] * len(operands)
    if min(degrees(name, eqn.params)) < 0:  # a divisor near 0
        return [0, NEAR]
    if _has_literal(eqn):
        return [0, 0]
    if any(own := _of_carried(eqn, of)):
        return own
    roots = {of.roots.get(v, v) for v in operands}
    are_moved = all(v in of.roots for v in operands)
    # Parts of one array, multiplied: a product along an axis, as in a scan.
    return [NEAR, NEAR] if are_moved and len(roots) == 1 else [0, 0]


def _of_carried(eqn: Eqn, of: Structure) -> list[int]:
    """Return what is asked of a factor of what a loop carries, in each iteration."""
    if _has_literal(eqn) or not multiplies(eqn.primitive.name):
        return [0] * len(eqn.invars)
    carried = [v in of.carried for v in eqn.invars]
    return [NEAR * (carried.count(True) == 1 and not c) for c in carried]


def _of_terms(eqn: Eqn, use: int, of: Structure) -> list[int]:
    # A sum with a number is all that a product reads of it: no digit is lost.
    is_read = not _has_literal(eqn) or use & ~Use.HALF
    if not is_read or of.differences.isdisjoint(eqn.outvars):
        return [0, 0]
    if _has_literal(eqn):
        return [0 if compat.is_literal(v) else NEAR for v in eqn.invars]
    # Multiples with one factor cancel as what is multiplied does.
    factors = [_factors(of.made_by.get(v)) for v in eqn.invars]
    asked = TERMS if factors[0].isdisjoint(factors[1]) else TERMS | NEAR
    return [asked, asked]


def _is_difference(eqn: Eqn, of: Structure) -> bool:
    """Return whether terms may cancel: a sum of a difference is one, too."""
    moved = [_moved_from(v, of.made_by) for v in eqn.invars]
    negative = [_is_negative(v, of.negative) for v in moved]
    signs_differ = negative[0] != (negative[1] != (eqn.primitive.name == "sub"))
    if _has_literal(eqn):
        numbers = [v for v in eqn.invars if compat.is_literal(v)]
        is_empty = core.size(eqn.outvars[0]) == 0
        return not is_empty and numbers[0].val != 0 and signs_differ
    if not signs_differ and of.differences.isdisjoint(variables(moved)):
        return False
    weights = [_weights(of.made_by.get(v), of) for v in eqn.invars]
    if all(weights) and weights[0].isdisjoint(weights[1]):
        return False  # they cancel only for some values
    pairs = zip(eqn.invars, reversed(eqn.invars), strict=True)
    return not any(_is_bias(v, other, eqn, of) for v, other in pairs)


def _is_bias(var: Var, other: Var, eqn: Eqn, of: Structure) -> bool:
    """Return whether a term is a bias, or a statistic of the other, as in a norm.

    A largest number, with one of as many others, makes a margin.
    """
    moved_from = [*variables([_moved_from(var, of.made_by)])]
    if any(v in of.made_by and is_lookup(of.made_by[v]) for v in moved_from):
        return False  # rows of a table, however small
    if of.is_full(var, eqn) and of.statistics.isdisjoint(moved_from):
        return False
    made_of = of.products.get(var, 0)
    if var in of.statistics:
        return not made_of or bool(made_of & of.products.get(other, 0))
    return not made_of and of.is_full(other, eqn)


def _factors(maker: Eqn | None) -> set[Var]:
    if maker is None or not multiplies(maker.primitive.name):
        return set()
    return set(variables(maker.invars))


def _weights(maker: Eqn | None, of: Structure) -> set[Var]:
    """Return the arrays that a term is multiplied by and that no product makes."""
    factors = (v for v in _factors(maker) if v not in of.products)
    return {v for v in factors if core.size(v) > 1}


def _of_comparison(eqn: Eqn, use: int, of: Structure) -> list[int]:
    """Return which digits a comparison asks for: if more than a choice of its operands.

    Equality with a largest number of the same array is a choice of that. To compare `x`
    with 0 is what `max(x, 0)` does, and its derivative. A number far from 0 may be that
    of a mask, which half precision cannot hold.
    """
    origins = {of.origins.get(v, 0) for v in variables(eqn.invars)}
    numbers = list(filter(compat.is_literal, eqn.invars))
    if numbers and of.limits.issuperset(_with_numbers(eqn, eqn.invars)):
        return [0] * len(eqn.invars)
    is_more = len(origins) > 1 or len(eqn.invars) == 1 or numbers
    is_of_mask = any(core.is_float(v) and may_be_far(v) for v in numbers)
    asks = is_of_mask or (use & (ALL | Use.RETURNED) and is_more)
    return [ALL if asks else 0] * len(eqn.invars)


def _with_numbers(eqn: Eqn, operands: Iterable[Var]) -> set[tuple[Var, complex]]:
    """Return pairs of some variables and each number that an equation reads."""
    numbers = [complex(v.val) for v in eqn.invars if compat.is_literal(v)]
    return {(v, x) for v in variables(operands) for x in numbers}


def _has_literal(eqn: Eqn) -> bool:
    return any(map(compat.is_literal, eqn.invars))


def _of_mask(eqn: Eqn, of: Structure) -> int:
    """Return which digits a choice asks of its mask, unless it is of what is chosen."""
    mask, *cases = eqn.invars
    chosen = of.origins_of(variables(cases))
    return ALL if of.origins_of(variables([mask])) & ~chosen else 0


def of_call(eqn: Eqn, uses: Sequence[int], of: Structure) -> list[int]:
    """Return how a call reads its operands, given how its jaxpr does.

    A mask of numbers that it reads, too, is one of what is chosen, as in `jnp.where`.
    """
    read = of.origins_of(filter(core.is_float, variables(eqn.invars)))
    return [
        use & ~ALL
        if core.is_bool(v) and not compat.is_literal(v) and not of.origins[v] & ~read
        else use
        for v, use in zip(eqn.invars, uses, strict=True)
    ]


def _passed_on(eqn: Eqn, passed: int, of: Structure) -> list[int]:
    """Return which of the digits that are asked of a result are asked of operands."""
    name, known, operands = eqn.primitive.name, facts(eqn.primitive.name), eqn.invars
    if not passed:
        return [0] * len(operands)
    linear = Fact.MOVES | Fact.JOINS | Fact.LINEAR | Fact.LIMITS
    # A product as the program has it: in a scope in float32, of complex numbers.
    if known & (linear | Fact.PRODUCT) or _is_power(eqn):
        return [passed] * len(operands)
    if known & Fact.SUMS:  # roundings of many terms cancel
        is_of_few = core.size(operands[0]) < _MANY * core.size(eqn.outvars[0])
        return [passed if is_of_few else passed & ALL] * len(operands)
    if not multiplies(name):
        return [passed & (TERMS | ALL)] * len(operands)
    scales = [
        v not in of.products or core.size(v) == 1 or v in of.statistics
        for v in operands
    ]
    # Whether multiples with computed factors cancel depends on these.
    return [
        passed & ~TERMS
        if any(not s for j, s in enumerate(scales) if j != i)
        else passed
        for i in range(len(operands))
    ]


def _is_power(eqn: Eqn) -> bool:
    """Return whether it multiplies one operand with itself, or takes a root."""
    name, powers = eqn.primitive.name, degrees(eqn.primitive.name, eqn.params)
    is_square = multiplies(name) and len(set(variables(eqn.invars))) < len(powers)
    return is_square or (len(powers) == 1 and powers[0] > 0)
