"""What autocast's rules are: the interface of a class of equations, and its questions.

`rules` has a rule for each class.
"""

import abc
import collections
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jmp_lite._src import compat, dtypes
from jmp_lite._src.autocast import precision
from jmp_lite._src.autocast.precision import (
    BROADCAST,
    CAST_INPUT,
    FLOAT32,
    FUSED,
    HALF,
    IGNORED,
    INPUT,
    NUMBER,
    CastPlan,
    Direction,
    EqnPlan,
    Precision,
    Use,
)
from jmp_lite._src.autocast.rewrite import Values
from jmp_lite._src.autocast.sums import is_lookup, union
from jmp_lite._src.jaxprs import core
from jmp_lite._src.jaxprs.control_flow import SubJaxpr
from jmp_lite._src.jaxprs.core import Eqn, Var
from jmp_lite._src.jaxprs.primitives import CAST, Fact, adds, degree, degrees, facts

Decision = tuple[EqnPlan, Sequence[Precision]]


class EqnInfo(NamedTuple):
    """An equation of a jaxpr, and what the analysis reads off the program once."""

    eqn: Eqn
    rule: "Rule"  # that of its class in the table
    region: precision.Region  # whether the policy lowers what is in its name scope
    bodies: tuple[SubJaxpr, ...]  # where they are understood
    softmax: precision.Softmax | None  # whose last equation it is
    order: Any  # the `products.Order` of a product that is transposed, or None
    fixed: tuple[Precision | None, ...]  # of literals and what is not float32
    is_smaller: tuple[bool, ...]  # per operand, than an elementwise result
    is_f32: tuple[bool, ...]  # per result
    why_unchanged: str  # why it runs as it is written, if its rule is `UNCHANGED`
    is_filled_in: bool  # whether it is a product whose `precision` the caller set
    why_not_fp8: str  # why a product that the policy has in fp8 is not, or ""

    def returns_sum(self, uses: Sequence[int]) -> bool:
        """Return whether an equation adds gradients, and the sum is only returned."""
        is_returned = union(uses) & Use.DTYPE == Use.OUTPUT
        return self.eqn.primitive.name == "add_any" and is_returned

    def broadcasts(self) -> bool:
        return any(
            is_smaller and not compat.is_literal(v) and core.is_f32(v)
            for v, is_smaller in zip(self.eqn.invars, self.is_smaller, strict=True)
        )

    def adds_number(self) -> bool:
        is_sum = adds(self.eqn.primitive.name)
        return is_sum and any(map(compat.is_literal, self.eqn.invars))


class Analysis(abc.ABC):
    """What a rule may ask of the analysis of the jaxpr of its equation."""

    compute_dtype: Any
    direction: Direction
    keeps_inputs: bool  # whether products may read inputs in float32
    recomputes: bool  # whether the backward pass keeps as little as it can
    has_half_results: bool  # where the policy of a scope does not say
    infos: Sequence[EqnInfo]  # of the equations of the jaxpr

    def __init__(self):
        self.precision: dict[Var, Precision] = {}
        # Results that are half because an input is cast before it is moved.
        self.cast_moves: set[Var] = set()
        # Per variable, the one stored half value that it is computed from, if so.
        self.stored: dict[Var, frozenset[Var] | None] = {}
        # Of variables, the equations that read and made them.
        self.readers: dict[Any, list[int]] = collections.defaultdict(list)
        self.made_by: dict[Any, int] = {}
        self.returned: frozenset[Var] = frozenset()

    @abc.abstractmethod
    def plan_body(
        self, eqn: Eqn, body: SubJaxpr, ins: Sequence[Precision], uses: Sequence[int]
    ) -> CastPlan:
        """Return the plan of a sub-jaxpr of an equation."""

    def half_results(self, info: EqnInfo) -> bool:
        """Return whether results of products are half where half is not asked for."""
        by_scope = info.region.half_results
        return self.has_half_results if by_scope is None else by_scope

    def only_reader(self, var: Var) -> Eqn | None:
        """Return what alone reads a variable, None if several do or it is returned."""
        readers = set() if var in self.returned else {*self.readers[var]}
        return self.infos[readers.pop()].eqn if len(readers) == 1 else None

    def is_convolution(self, var: Var) -> bool:
        maker = None if compat.is_literal(var) else self.made_by.get(var)
        name = "" if maker is None else self.infos[maker].eqn.primitive.name
        return name == "conv_general_dilated"

    @property
    def is_recomputed(self) -> bool:
        """Whether the program may compute the same again, with other uses."""
        return self.direction is Direction.RECOMPUTED

    def is_moved_input(self, var: Var) -> bool:
        """Return whether an operand is an input, moved or broadcast at most."""
        if compat.is_literal(var):
            return False
        return var in self.cast_moves or self.precision[var] in (INPUT, BROADCAST)

    def is_cast_input(self, var: Var) -> bool:
        """Return whether an operand is an input that was cast and looked up."""
        return not compat.is_literal(var) and self.precision[var] == CAST_INPUT

    def made_of(self, var: Var) -> frozenset[Var]:
        """Return the stored half values of which a half value is computed."""
        return self.stored.get(var) or frozenset([var])

    def looks_up_input(self, eqn: Eqn) -> bool:
        """Return whether this looks rows up in an input, which may have moved."""
        return is_lookup(eqn) and self.is_moved_input(eqn.invars[0])

    def is_bias_of_convolution(self, info: EqnInfo) -> bool:
        """Return whether cuDNN can add this as a part of a convolution, in half alone.

        In bfloat16, whose range no bias is out of, or where half results are asked for.
        """
        is_in_range = precision.has_range_of_f32(self.compute_dtype)
        return (
            info.eqn.primitive.name == "add"
            and (is_in_range or self.half_results(info))
            and any(map(self.is_convolution, info.eqn.invars))
        )

    def may_underflow(self, ins: Sequence[Precision], uses: Sequence[int]) -> bool:
        """Return whether half may lose what keeps a result off zero: an argument."""
        if precision.has_range_of_f32(self.compute_dtype):
            return False
        return bool(union(uses) & Use.NEAR_ONE) and (INPUT in ins or BROADCAST in ins)

    def stored_operands(self, eqn: Eqn, ins: Sequence[Precision]) -> frozenset[Any]:
        """Return the stored half values of which operands are computed."""
        pairs = zip(eqn.invars, ins, strict=True)
        return frozenset().union(
            *(self.made_of(v) for v, p in pairs if p in (HALF, FUSED))
        )

    def is_kept(self, eqn: Eqn, ins: Sequence[Precision]) -> bool:
        """Return whether the half result of arithmetic is stored, whatever reads it.

        It is if it is made of several arrays, or if the backward pass reads it. Other
        arithmetic is computed again by what reads it, as a part of that: a sum of
        several arrays, too, that one sum or multiple alone reads.
        """
        if facts(eqn.primitive.name) & Fact.SATURATES:
            return True
        if len(self.stored_operands(eqn, ins)) < 2:
            return False
        reader = self.only_reader(eqn.outvars[0])
        return not (_is_linear(eqn) and reader is not None and _is_linear(reader))

    def is_offset(self, info: EqnInfo, use: int) -> bool:
        """Return whether half may lose digits that more arithmetic asks for.

        A sum with a number has those of the larger of both, and a large or small
        multiple may be out of the range of float16, until what reads it undoes that. A
        bias is rounded: the backward pass would keep float32 of what is made of it.
        """
        if use & (Use.PRODUCT | Use.KEPT) or self.is_recomputed:
            return False
        if precision.has_range_of_f32(self.compute_dtype) or degree(info.eqn) != 1:
            return info.adds_number()
        numbers = (np.abs(v.val) for v in info.eqn.invars if compat.is_literal(v))
        return any(np.any((x < 1 / 16) | (x > 16)) for x in numbers)

    def is_part(self, info: EqnInfo, ins: Sequence[Precision], use: int) -> bool:
        """Return whether what reads a result computes it again, in float32.

        Float32 operations do, and so do sums that are stored. But a sum with a cast
        input is stored if several read it: each of them would read two arrays.
        """
        in_f32_alone = bool(use & Use.DTYPE) and not use & (Use.AS_HALF | Use.FACTOR)
        if not use & Use.TERM:
            return in_f32_alone
        if self.is_bias_of_convolution(info):
            return False
        reader = self.only_reader(info.eqn.outvars[0])
        is_read_once = reader is not None and _is_linear(reader)
        return is_read_once or (in_f32_alone and CAST_INPUT not in ins)


class Rule:
    """What is done with the equations of one class: here, nothing."""

    name: ClassVar[str] = "unchanged"  # the class, as the table and `explain` have it
    is_elementwise: ClassVar[bool] = False  # computed element by element, or moved
    is_move: ClassVar[bool] = False
    is_product: ClassVar[bool] = False
    is_fp8: ClassVar[bool] = False  # whose derivative keeps its operands in fp8
    keeps_inputs: ClassVar[bool] = False  # products that read f32 inputs and cast them
    # Whether the equations may run in float32, from half operands that are stored.
    computes_in_float32: ClassVar[bool] = False

    def propagate(
        self,
        info: EqnInfo,
        ins: Sequence[Precision],
        uses: Sequence[int],
        analysis: Analysis,
    ) -> Decision:
        """Return the plan of an equation, and the precision of each result.

        It follows from the precision of each operand, and from how each result is used,
        as far as that is known.
        """
        if info.is_f32 == (True,) and len(ins) == 1 and ins[0] in _CONVERTED:
            return self.keep(info, "")[0], [_CONVERTED[ins[0]]]
        return self.keep(info, info.why_unchanged)

    def keep(self, info: EqnInfo, reason: str) -> Decision:
        """Return the decision that an equation runs in float32, as it is written."""
        eqn = info.eqn
        plan = _kept(self, len(eqn.invars), len(eqn.outvars), reason)
        return plan, [FLOAT32] * len(eqn.outvars)

    def depends_on_uses(self, info: EqnInfo) -> bool:
        """Return whether the decision on an equation depends on what reads it."""
        return True

    def made_of(
        self, info: EqnInfo, ins: Sequence[Precision], plan: EqnPlan, analysis: Analysis
    ) -> frozenset[Any] | None:
        """Return the one stored half value that a result can be computed from again.

        If there is none, a half result is such a value itself.
        """

    def cast_moves(
        self, info: EqnInfo, ins: Sequence[Precision], plan: EqnPlan, analysis: Analysis
    ) -> Sequence[Any]:
        """Return the half results that are inputs, cast before they were moved.

        Asked for equations that have half results.
        """
        return ()

    def operand_uses(
        self, info: EqnInfo, plan: EqnPlan, uses: Sequence[int], analysis: Analysis
    ) -> Sequence[int]:
        """Return how an equation uses its operands, by the plan of this rule."""
        is_returned = info.returns_sum(uses)
        use = Use.OUTPUT if is_returned else Use.AS_FLOAT32 | Use.EXACT
        return [use] * len(info.eqn.invars)

    def digits_used(
        self, info: EqnInfo, ins: Sequence[Precision], uses: Sequence[int]
    ) -> Sequence[int]:
        """Return which digits of its operands an equation uses, as bits of `Use`."""
        eqn, name, use = info.eqn, info.eqn.primitive.name, union(uses)
        known = facts(name)
        used = Use.NEAR_ONE * bool(known & Fact.NEAR_ONE)
        used |= Use.FRACTION * bool(known & Fact.FRACTION)
        if (self.is_move or known & Fact.ARITHMETIC) and any(info.is_f32):
            used |= use & (Use.NEAR_ONE | Use.FRACTION)
        rounds = Use.AS_HALF | Use.PRODUCT | Use.KEPT
        if adds(name) and NUMBER in ins and use & ~rounds:
            used |= Use.NEAR_ONE
        if name == CAST and not core.is_float(eqn.outvars[0]):
            used |= Use.NEAR_ONE | Use.FRACTION
        # A divisor near 0 needs its digits; a root halves its relative error.
        powers = itertools.chain(degrees(name, eqn.params), itertools.repeat(0))
        return [used | Use.NEAR_ONE * (next(powers) <= -1) for _ in ins]

    def run(self, eqn: Eqn, plan: EqnPlan, values: Values) -> Sequence[Any]:
        """Return the results of an equation, in the precision of its plan."""
        results = values.apply(eqn, plan.reads_half)
        if any(plan.reads_half):
            return results
        return values.cast_to_half(results, plan.half_out)


# The precision of what is converted to float32 -> that of the result.
_CONVERTED = {precision.INTEGER: NUMBER, precision.STORED: INPUT}


@functools.cache  # most equations of a program have one of few plans
def _kept(rule: Rule, ins: int, outs: int, reason: str) -> EqnPlan:
    return EqnPlan(rule, (False,) * ins, (False,) * outs, reason=reason)


def casts_before(eqn: Eqn) -> bool:
    """Return whether a cast of this move's result may happen before the move.

    It moves half the bytes then. A move that drops numbers would cast more than it has
    to; one that repeats them sums in its transpose, which must be in float32.
    """
    return bool(facts(eqn.primitive.name) & Fact.PERMUTES)


def is_retyping(eqn: Eqn) -> bool:
    """Return whether an equation only makes a dtype weak or strong."""
    is_cast = eqn.primitive.name == CAST
    return is_cast and eqn.invars[0].aval.dtype == eqn.params["new_dtype"]


def is_move_or_cast(eqn: Eqn) -> bool:
    """Return whether an equation only moves numbers, or casts them to half."""
    if eqn.primitive.name == CAST:
        return dtypes.is_half(eqn.params["new_dtype"])
    return casts_before(eqn)


def is_sum_or_multiple(eqn: Eqn, is_cast: Sequence[bool]) -> bool:
    """Return whether to round some operands is no worse than to round the result.

    A difference of two rounded numbers may be wrong in each digit.
    """
    name = eqn.primitive.name
    if facts(name) & (Fact.MOVES | Fact.JOINS) or name == "add":
        return True
    powers = itertools.compress(degrees(name, eqn.params), is_cast)
    return list(powers) == [1.0]


def _is_linear(eqn: Eqn) -> bool:
    """Return whether this adds, or multiplies by a number."""
    return bool(facts(eqn.primitive.name) & Fact.LINEAR) or degree(eqn) == 1


def joins_half(eqn: Eqn, ins: Sequence[Precision]) -> bool:
    """Return whether elementwise arithmetic runs in half, by its operands."""
    if not any(p.is_half for p in ins):
        return False
    sizes = list(map(core.size, eqn.invars))
    return all(
        p.is_half
        or p in (NUMBER, BROADCAST, *IGNORED)
        or (p == INPUT and n < max(sizes))
        for p, n in zip(ins, sizes, strict=True)
    )
