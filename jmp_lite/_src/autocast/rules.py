"""What autocast does with an equation: a rule for each kind.

A rule answers three questions. How does the equation read its operands, given how its
results are read (`reads`, asked from the last equation to the first)? How are its
results held, given how its operands are (`stores`, asked from the first to the last)?
And how does it run (`run`)?
"""

import dataclasses
from collections.abc import Hashable, Sequence, Set
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_lite._src import compat, dtypes, fp8
from jmp_lite._src.autocast import digits, half_calls, products, sums
from jmp_lite._src.autocast.digits import Structure, Use
from jmp_lite._src.autocast.emit import Values
from jmp_lite._src.autocast.storage import (
    FLOAT32,
    FREE,
    HALF,
    INPUT,
    OTHER,
    Direction,
    Ends,
    EqnPlan,
    Held,
    Place,
    Region,
    may_be_far,
)
from jmp_lite._src.jaxprs import binding, core
from jmp_lite._src.jaxprs.control_flow import SubJaxpr
from jmp_lite._src.jaxprs.core import Eqn, Var
from jmp_lite._src.jaxprs.primitives import CALLS, CAST, CLASSES, LOOPS, Fact, facts

# What is smaller is a scalar or a few of them, and no array that pays to round.
_FEW = 64
# How a lookup reads what rounded rows are taken of: a table, or a float32 result.
_OF_TABLE = Use.HALF | Use.SUMMED


class Op(NamedTuple):
    """An equation of a jaxpr, and what is read off the program once."""

    eqn: Eqn
    rule: "Rule"
    region: Region
    direction: Direction
    bodies: tuple[SubJaxpr, ...] = ()
    reason: str = ""  # why it runs as it is written


class Body(NamedTuple):
    """What a rule may ask of the jaxpr that its equation is in."""

    analyzer: Any  # `analysis.Analyzer`
    place: Place
    structure: Structure
    ends: Ends
    held: dict[Var, Held]
    linear: set[Var]  # sums and multiples of what is stored in half
    computed: set[Var]  # from products, and not from parameters alone

    @property
    def compute_dtype(self) -> DTypeLike:
        return self.analyzer.compute_dtype

    def inside(self, op: Op, sub: SubJaxpr) -> Place:
        """Return where a jaxpr of an equation is."""
        given = self.structure.given(op.eqn, sub.operands)
        return self.place.inside(op.eqn, sub, self.ends, given)


Decision = tuple[EqnPlan, Sequence[Held]]


class Rule:
    """An equation that runs as it is written."""

    name: ClassVar[str] = "unchanged"  # the class, as the table and `explain` have it
    is_product: ClassVar[bool] = False
    is_fp8: ClassVar[bool] = False  # whose derivative keeps its operands in fp8
    casts_inputs: ClassVar[bool] = False  # whether it reads f32 inputs and casts them
    is_source: ClassVar[bool] = False  # whether its results are computed by products
    is_arithmetic: ClassVar[bool] = False  # whether segments are made of it
    moves: ClassVar[bool] = False

    @property
    def decides(self) -> Hashable:
        """What of the rule, beside its class, decides what an equation computes."""

    def operands(self, eqn: Eqn) -> Sequence[Var]:
        """Return the variables that the equation reads as it runs."""
        return eqn.invars

    def reads(self, op: Op, uses: Sequence[int], body: Body) -> Sequence[int]:
        """Return how the equation reads each operand, given how its results are read.

        Asked if something reads one of them.
        """
        is_forward = op.direction is not Direction.BACKWARD
        asked = digits.asked(op.eqn, core.bit_or(uses), body.structure, is_forward)
        if op.eqn.primitive.name == "add_any" and core.bit_or(uses) == Use.RETURNED:
            return [Use.RETURNED] * len(asked)  # a sum of gradients
        if op.eqn.effects:  # as of a callback
            pairs = zip(asked, op.eqn.invars, strict=True)
            asked = [x if core.is_float(v) else Use.ALL for x, v in pairs]
        known, read = facts(op.eqn.primitive.name), Use.FLOAT32
        if known & Fact.PRODUCT:
            read |= Use.WIDE
        elif known & Fact.MOVES:
            read |= core.bit_or(uses) & Use.WIDE
        return [read | x for x in asked]

    def stores(
        self, op: Op, ins: Sequence[Held], uses: Sequence[int], body: Body
    ) -> Decision:
        """Return the plan of an equation, and how each of its results is held."""
        return self.as_written(op, op.reason)

    def as_written(self, op: Op, reason: str) -> Decision:
        """Return the decision that an equation runs as it is written."""
        eqn = op.eqn
        none = (False,) * len(eqn.invars), (False,) * len(eqn.outvars)
        outs = [FLOAT32 if core.is_f32(v) else OTHER for v in eqn.outvars]
        return EqnPlan(self, *none, reason=reason), outs

    def run(self, eqn: Eqn, plan: EqnPlan, values: Values) -> Sequence[jax.Array]:
        """Return the results of an equation."""
        return values.apply(eqn, plan.half_in)


UNSAFE = "unsafe in half"
"""Why an equation of the class "float32" is in float32."""


class Written(Rule):
    """Operations that run in float32: sums by index or along an axis, for example."""

    def __init__(self, name: str):
        self.name = name  # pyright: ignore[reportAttributeAccessIssue]

    def stores(self, op, ins, uses, body):
        return self.as_written(op, UNSAFE if self.name == "float32" else "")


class Product(Rule):
    """Matrix products: half operands, a result in half or the float32 accumulator."""

    name, is_product, is_source = "half", True, True

    def __init__(self, order: products.Order | None = None, why_not_fp8: str = ""):
        self.order, self.why_not_fp8 = order, why_not_fp8

    @property
    def decides(self) -> Hashable:
        return self.order

    def reads(self, op, uses, body):
        return [Use.HALF] * len(op.eqn.invars)

    def stores(self, op, ins, uses, body):
        if all(held == OTHER for held in ins):
            return WRITTEN.as_written(op, "no f32 operand")
        is_half = has_half_result(op, uses[0], body)
        reasons = [
            f"not in fp8: {self.why_not_fp8}" if self.why_not_fp8 else "",
            "" if is_half else _why_f32_result(op.eqn),
        ]
        half_in = tuple(held != OTHER for held in ins)
        reason = "; ".join(filter(None, reasons))
        plan = EqnPlan(self, half_in, (is_half,), reason=reason)
        return plan, [HALF if is_half else FLOAT32]

    def run(self, eqn, plan, values):
        operands = values.read(eqn.invars, plan.half_in)
        args = eqn, operands, values.half_dtype, plan.half_out[0]
        return [products.run_in_order(self.order, *args)]


def _why_f32_result(eqn: Eqn) -> str:
    if products.is_convolution(eqn):
        return "f32 result: on GPUs, cuDNN computes it in f32"
    return "f32 result from the accumulator"


class Accumulated(Product):
    """Matrix products whose weight gradients are the float32 accumulator."""

    casts_inputs = True

    def reads(self, op, uses, body):
        # What may be a parameter is cast by the product, and not before it.
        moved = map(body.structure.is_moved_input, op.eqn.invars)
        return [Use.FLOAT32 if is_moved else Use.HALF for is_moved in moved]

    def stores(self, op, ins, uses, body):
        plan, outs = super().stores(op, ins, uses, body)
        if plan.rule is not self:
            return plan, outs
        half_in = tuple(held not in (OTHER, INPUT) for held in ins)
        return dataclasses.replace(plan, half_in=half_in), outs


class Fp8(Accumulated):
    """Large matrix products whose operands are rounded to fp8."""

    name, is_fp8 = "fp8", True

    def __init__(self, lhs_dtype: DTypeLike):
        super().__init__()
        self.dtypes = lhs_dtype, fp8.FORWARD  # of the two operands

    @property
    def decides(self) -> Hashable:
        return self.dtypes

    def run(self, eqn, plan, values):
        lhs, rhs = values.read(eqn.invars, plan.half_in)
        dimensions = eqn.params["dimension_numbers"]
        dtype = values.half_dtype if plan.half_out[0] else jnp.float32
        return [fp8.dot_general(lhs, rhs, dimensions, dtype, self.dtypes[0])]


class CastByHand(Rule):
    """Matrix products in half of inputs that the program casts itself."""

    is_product, casts_inputs = True, True

    def run(self, eqn, plan, values):
        half = compat.aval_of(eqn.invars[0]).dtype
        is_half = core.is_half(eqn.outvars[0])
        operands = values.read(eqn.invars, plan.half_in)
        for i, var in enumerate(eqn.invars[:2]):
            operands[i] = values.before_cast(var, operands[i])
        return [products.run(eqn, operands, half, is_half)]


def has_half_result(op: Op, use: int, body: Body) -> bool:
    """Return whether the result of a product is stored in half, by what reads it."""
    by_scope = op.region.half_results
    needs_float32 = use & Use.DIGITS or digits.is_wide(use)
    if products.is_convolution(op.eqn):  # which costs GPUs a product in float32
        needs_float32 = use & Use.DIGITS & ~Use.TERMS
    if by_scope is False or needs_float32:
        return False
    if body.place.direction is Direction.RECOMPUTED:  # nothing may depend on the uses
        return by_scope is True
    if _may_have_half_results(op, body):
        return bool(use & (Use.HALF | Use.FLOAT32))
    return use == Use.HALF


def _may_have_half_results(op: Op, body: Body) -> bool:
    by_scope = op.region.half_results
    return body.analyzer.table.half_results if by_scope is None else by_scope


class Arithmetic(Rule):
    """Elementwise arithmetic and sums over axes, which run in float32.

    What is not an operand of more arithmetic beside it is stored in half, if the class
    of the primitive is safe in half and the operands were stored so. `segments` decides
    what is beside it.
    """

    is_arithmetic = True

    def __init__(self, name: str):
        self.name = name  # pyright: ignore[reportAttributeAccessIssue]
        self.is_safe = name in ("promote", "passthrough")

    def reads(self, op, uses, body):
        found = super().reads(op, uses, body)
        lowers = body.analyzer.table.lowers_anything
        if not (lowers and _may_have_half_results(op, body)):
            return found
        of_sums = digits.summed(op.eqn, core.bit_or(uses), body.structure)
        return [x | y for x, y in zip(found, of_sums, strict=True)]

    def stores(self, op, ins, uses, body):
        plan, outs = self.as_written(op, UNSAFE if self.name == "float32" else "")
        if self.is_safe and self._adds_to_data(op, ins, body):
            return plan, [INPUT if held == FLOAT32 else held for held in outs]
        if self.is_safe and self._is_half(op, ins, body):
            outs = [HALF if held == FLOAT32 else held for held in outs]
        return plan, outs

    def _adds_to_data(self, op: Op, ins: Sequence[Held], body: Body) -> bool:
        """Return whether a sum adds what is stored in half to an argument or a number.

        That may be far from zero, as no product or norm is, and a norm may read the
        sum, which is as the argument is: not stored in half.
        """
        is_sum = facts(op.eqn.primitive.name) & Fact.LINEAR and HALF in ins
        if not is_sum or core.size(op.eqn.outvars[0]) <= _FEW:
            return False
        pairs = zip(op.eqn.invars, ins, strict=True)
        return any(
            x == INPUT and (may_be_far(v) or body.structure.is_full(v, op.eqn))
            for v, x in pairs
        )

    def _is_half(self, op: Op, ins: Sequence[Held], body: Body) -> bool:
        """Return whether a result may be stored in half, by how operands are held."""
        operands = list(zip(op.eqn.invars, ins, strict=True))
        halves = [v for v, held in operands if held == HALF]
        wide = [v for v, held in operands if held == FLOAT32]
        if not halves or any(map(compat.is_literal, wide)):
            return False
        # What is smaller may be the statistics of a norm.
        if not any(body.structure.is_full(v, op.eqn) for v in wide):
            return True
        # A residual stream is half, whatever it began as.
        adds = facts(op.eqn.primitive.name) & Fact.LINEAR
        is_large = core.size(op.eqn.outvars[0]) > _FEW
        return bool(adds) and is_large and not body.linear.isdisjoint(halves)

    def run(self, eqn, plan, values):
        return binding.bind_here(eqn, values.operands(eqn, plan))


class Move(Rule):
    """Moves and choices of numbers: what is stored in half is moved in half."""

    name, moves = "passthrough", True

    def reads(self, op, uses, body):
        use, name = core.bit_or(uses), op.eqn.primitive.name
        if sums.is_lookup(op.eqn):
            may_be_cast = _is_rounded(use) and not op.region.reduces_in_float32
            of_table = _OF_TABLE if may_be_cast else use & ~Use.HALF | Use.FLOAT32
            return [of_table, *[Use.FLOAT32] * (len(op.eqn.invars) - 1)]
        if len(op.eqn.outvars) == len(op.eqn.invars):  # a barrier
            return uses
        asked = super().reads(op, uses, body)
        if facts(name) & Fact.CHOOSES:  # by size
            return [x | use for x in asked]
        return [
            use if core.is_float(v) else x
            for v, x in zip(op.eqn.invars, asked, strict=True)
        ]

    def stores(self, op, ins, uses, body):
        eqn = op.eqn
        if len(eqn.outvars) == len(ins) > 1:
            half = tuple(held == HALF for held in ins)
            return EqnPlan(self, half, half), ins
        plan, outs = self.as_written(op, "")
        floats = [held for held in ins if held != OTHER]
        if self._is_half(op, ins, core.bit_or(uses), body):
            half_in = tuple(held != OTHER for held in ins)
            half_out = tuple(held == FLOAT32 for held in outs)
            outs = [HALF if held == FLOAT32 else held for held in outs]
            return EqnPlan(self, half_in, half_out), outs
        if all(held == INPUT for held in floats):
            outs = [INPUT if held == FLOAT32 else held for held in outs]
        return plan, outs

    def _is_half(self, op: Op, ins: Sequence[Held], use: int, body: Body) -> bool:
        """Return whether a result is stored in half."""
        eqn, floats = op.eqn, [held for held in ins if held != OTHER]
        if use & Use.DIGITS or digits.is_wide(use):
            return False
        if HALF in floats:
            size = core.size(eqn.outvars[0])
            return all(
                held in (HALF, OTHER) or (held == INPUT and core.size(v) < size)
                for v, held in zip(eqn.invars, ins, strict=True)
            )
        if sums.is_lookup(eqn) and ins[0] == INPUT:
            return _is_rounded(use)
        # It moves half the bytes if it is cast before. What drops numbers would cast
        # more than it has to, and what repeats them sums in its transpose. A weight of
        # another shape moves no bytes. It is cast where a product reads it: the
        # gradients of all that read it are summed in float32.
        known = facts(eqn.primitive.name)
        if known & Fact.IN_ORDER and ins[0] == INPUT:
            return False
        return bool(known & Fact.PERMUTES) and _casts_before(use, ins[0])


def _casts_before(use: int, held: Held) -> bool:
    """Return whether a value is cast once, before what reads it, in half alone."""
    if held == INPUT and use == _OF_TABLE:
        return True
    return held in (INPUT, FLOAT32) and use == Use.HALF


def _is_rounded(use: int) -> bool:
    """Return whether rows of a table are rounded to half, whatever reads them too."""
    return bool(use & (Use.HALF | Use.SUMMED)) and not use & (Use.RETURNED | Use.DIGITS)


class Called(Arithmetic):
    """Arithmetic with a rule for its derivative: it runs as it is."""

    def __init__(self):
        super().__init__("promote")

    def reads(self, op, uses, body):
        (sub,) = op.bodies
        found = body.analyzer.uses_of(sub, body.inside(op, sub), uses)
        found = digits.of_call(op.eqn, found, body.structure)
        return [Use.FLOAT32 | use & ~Use.DTYPE for use in found]

    def stores(self, op, ins, uses, body):
        (sub,) = op.bodies
        inside = body.analyzer.plan(sub, body.inside(op, sub), ins, uses)
        plan, outs = self.as_written(op, "")
        pairs = zip(outs, inside.outs, strict=True)
        return plan, [HALF if HALF in pair else pair[0] for pair in pairs]


class SubJaxprs(Rule):
    """Control flow and calls: each of their jaxprs has a plan of its own."""

    name = "sub"

    def reads(self, op, uses, body):
        found = [0] * len(op.eqn.invars)
        # A loop carries float32: to store the first value in half would save nothing.
        fixed = Use.RETURNED if op.eqn.primitive.name in LOOPS else Use.FLOAT32
        if op.eqn.primitive.name == "cond":
            found[0] = Use.FLOAT32 | Use.ALL
        for sub in op.bodies:
            place = body.inside(op, sub)
            read = body.analyzer.uses_of(sub, place, _of_outputs(op, sub, uses))
            for k, i in enumerate(sub.operands):
                is_fixed = k in sub.fixed_in
                found[i] |= read[k] & Use.DIGITS | fixed if is_fixed else read[k]
        if op.eqn.primitive.name in CALLS:
            found = digits.of_call(op.eqn, found, body.structure)
        return [use or Use.RETURNED for use in found]  # it is passed in any case

    def stores(self, op, ins, uses, body):
        eqn, ins = op.eqn, list(ins)
        if not op.region.is_half:  # its jaxprs may have scopes with other policies
            ins = [FLOAT32 if held == HALF else held for held in ins]
        # An operand that the jaxprs read in half alone is cast before: out of the loop,
        # or once for all the calls.
        read = self.reads(op, uses, body)
        castable = {sub.operands[k] for sub in op.bodies for k in sub.casts_in}
        for i, (v, held) in enumerate(zip(eqn.invars, [*ins], strict=True)):
            if held == HALF and (read[i] & Use.DIGITS or v in body.ends.kept):
                ins[i] = FLOAT32
            elif i in castable and _casts_before(read[i], held):
                ins[i] = HALF
            elif held == FLOAT32 and (compat.is_literal(v) or v not in body.computed):
                ins[i] = FREE
        fixed = {sub.operands[k] for sub in op.bodies for k in sub.fixed_in}
        plans = tuple(
            body.analyzer.plan(
                sub,
                body.inside(op, sub),
                [
                    _fixed(ins[i]) if k in sub.fixed_in else ins[i]
                    for k, i in enumerate(sub.operands)
                ],
                _of_outputs(op, sub, uses),
            )
            for sub in op.bodies
        )
        outs = [
            _join(
                [
                    _fixed(plan.outs[k]) if k in sub.fixed_out else plan.outs[k]
                    for sub, plan in zip(op.bodies, plans, strict=True)
                    for k, j in enumerate(sub.results)
                    if j == i
                ]
            )
            for i in range(len(eqn.outvars))
        ]
        half_in = tuple(x == HALF and i not in fixed for i, x in enumerate(ins))
        half_out = tuple(held == HALF for held in outs)
        return EqnPlan(self, half_in, half_out, plans), outs


def _of_outputs(op: Op, sub: SubJaxpr, uses: Sequence[int]) -> list[int]:
    """Return how the outputs of a jaxpr of an equation are read."""
    return [
        Use.RETURNED | Use.ALL
        if i is None  # the condition of a `while` loop
        else uses[i] & Use.DIGITS | Use.RETURNED
        if k in sub.fixed_out
        else uses[i]
        for k, i in enumerate(sub.results)
    ]


def _fixed(held: Held) -> Held:
    """Return how a value is held whose dtype is that of the program."""
    return OTHER if held == OTHER else FLOAT32


def _join(held: Sequence[Held]) -> Held:
    """Return how the result of several branches is held."""
    first, *others = dict.fromkeys(held)
    return FLOAT32 if others else first


class Softmax(Rule):
    """The division of a softmax that only matrix products read."""

    name = "softmax"

    def __init__(
        self, softmax: products.Softmax, may_repeat: bool, of_stored: bool = False
    ):
        self.softmax, self.may_repeat = softmax, may_repeat
        self.of_stored = of_stored  # whether a segment has made the logits

    @property
    def decides(self):
        return self.softmax.axes, self.may_repeat, self.of_stored

    def of_logits(self, in_segments: Set[Var]) -> "Softmax":
        """Return the rule with what is known of the logits: how they are made."""
        of_stored = self.softmax.logits in in_segments
        return Softmax(self.softmax, self.may_repeat, of_stored)

    def operands(self, eqn):
        return [self.softmax.logits]

    def reads(self, op, uses, body):
        return [0, 0]  # the logits are read in their place

    def stores(self, op, ins, uses, body):
        return EqnPlan(self, (False, False), (True,)), [HALF]

    def run(self, eqn, plan, values):
        read = values.stored if self.of_stored else values.inner
        logits = read(self.softmax.logits)
        options = {"axes": self.softmax.axes, "may_repeat": self.may_repeat}
        return [products.softmax(logits, dtype=values.half_dtype, **options)]


class Boundary(Rule):
    """Casts around a call of an `in_half` function: a half value is passed as it is.

    Its results are like those of matrix products: half where these would be.
    """

    name, is_source = half_calls.REASON, True

    def reads(self, op, uses, body):
        return [Use.HALF]

    def stores(self, op, ins, uses, body):
        if not core.is_f32(op.eqn.outvars[0]):
            return EqnPlan(self, (True,), (False,)), [OTHER]
        is_half = has_half_result(op, uses[0], body)
        return EqnPlan(self, (False,), (is_half,)), [HALF if is_half else FLOAT32]

    def run(self, eqn, plan, values):
        if any(plan.half_in):
            return [values.read_bounded(eqn.invars[0])]
        (value,) = values.read(eqn.invars, (False,))
        return [value] if any(plan.half_out) else binding.bind_here(eqn, [value])


WRITTEN, SUB_JAXPRS, MOVE, BOUNDARY = Rule(), SubJaxprs(), Move(), Boundary()
CAST_BY_HAND, CALLED = CastByHand(), Called()
MOVE_IN_SEGMENT = Arithmetic("passthrough")
FP8, FP8_BACKWARD = Fp8(fp8.FORWARD), Fp8(fp8.GRADIENT)

_ARITHMETIC = {name: Arithmetic(name) for name in CLASSES}
_WRITTEN = {name: Written(name) for name in CLASSES} | {"unchanged": WRITTEN}


def rule_for(eqn: Eqn, op_class: str, is_arithmetic: bool) -> Rule:
    """Return the rule of an equation that is no product and holds no jaxprs."""
    known = facts(eqn.primitive.name)
    if is_retyping(eqn):  # float32 to float32, as jnp.where does to numbers
        return MOVE
    moves = known & (Fact.MOVES | Fact.JOINS) and not known & Fact.ELEMENTWISE
    is_stopped = eqn.primitive.name == "stop_gradient"
    if op_class == "passthrough" and (is_stopped or moves):
        is_reduction = known & Fact.CHOOSES and is_arithmetic
        return _ARITHMETIC[op_class] if is_reduction else MOVE
    return (_ARITHMETIC if is_arithmetic else _WRITTEN)[op_class]


def is_retyping(eqn: Eqn) -> bool:
    """Return whether an equation only makes a dtype weak or strong."""
    is_cast = eqn.primitive.name == CAST
    return is_cast and core.dtype_of(eqn.invars[0]) == eqn.params["new_dtype"]


def is_move_or_cast(eqn: Eqn) -> bool:
    """Return whether an equation only permutes numbers, or casts them to half."""
    if eqn.primitive.name == CAST:
        return dtypes.is_half(eqn.params["new_dtype"])
    return bool(facts(eqn.primitive.name) & Fact.PERMUTES)
