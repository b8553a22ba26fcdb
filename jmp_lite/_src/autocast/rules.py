"""One rule object per class of the table: all that autocast does with an equation.

`Rule` is what they have in common. The classes are those in `BY_CLASS`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jmp_lite._src import dtypes, fp8
from jmp_lite._src.autocast import half_calls, precision, products, sums
from jmp_lite._src.autocast.precision import (
    BROADCAST,
    CAST_INPUT,
    FLOAT32,
    FUSED,
    HALF,
    IGNORED,
    INPUT,
    NORMALIZED,
    NUMBER,
    OTHER,
    STATISTIC,
    CastPlan,
    Direction,
    EqnPlan,
    Precision,
    Use,
)
from jmp_lite._src.autocast.rule import (
    Analysis,
    Decision,
    EqnInfo,
    Rule,
    casts_before,
    is_retyping,
    is_sum_or_multiple,
    joins_half,
)
from jmp_lite._src.autocast.sums import is_lookup, union
from jmp_lite._src.jaxprs import binding, control_flow, core
from jmp_lite._src.jaxprs.core import Eqn
from jmp_lite._src.jaxprs.primitives import Fact, facts


class _Unsafe(Rule):
    """Operations that overflow, underflow or lose digits in half."""

    name, computes_in_float32 = "float32", True

    def propagate(self, info, ins, uses, analysis):
        return self.keep(info, "unsafe in half")

    def depends_on_uses(self, info):
        return info.softmax is not None


class _Product(Rule):
    """Matrix products: half operands, and a result from the float32 accumulator."""

    name, is_product = "half", True

    def propagate(self, info, ins, uses, analysis):
        why_not = products.why_not_half(
            info.eqn, info.is_filled_in, analysis.compute_dtype
        ) or ("" if any(p not in IGNORED for p in ins) else "no f32 operand")
        if why_not:
            return UNCHANGED.keep(info, why_not)
        is_half = _is_result_half(info, uses[0], analysis)
        half_in = tuple(p not in IGNORED for p in ins)
        reasons = [
            f"not in fp8: {info.why_not_fp8}" if info.why_not_fp8 else "",
            "" if is_half else _why_f32_result(info.eqn),
        ]
        reason = "; ".join(filter(None, reasons))
        plan = EqnPlan(self, half_in, (is_half,), reason=reason, order=info.order)
        return plan, [HALF if is_half else FLOAT32]

    def operand_uses(self, info, plan, uses, analysis):
        return [Use.AS_HALF | Use.PRODUCT] * len(info.eqn.invars)

    def run(self, eqn, plan, values):
        operands = values.read(eqn.invars, plan.half_in)
        args = eqn, operands, values.half_dtype, plan.half_out[0]
        return [products.run_in_order(plan.order, *args)]


def _why_f32_result(eqn: Eqn) -> str:
    if eqn.primitive.name == "conv_general_dilated":
        return "f32 result: on GPUs, cuDNN computes it in f32"
    return "f32 result from the accumulator"


class _Accumulated(_Product):
    """Matrix products whose weight gradients are the float32 accumulator."""

    keeps_inputs = True

    def propagate(self, info, ins, uses, analysis):
        plan, outs = super().propagate(info, ins, uses, analysis)
        if plan.rule is not self:
            return plan, outs
        pairs = zip(info.eqn.invars, plan.half_in, strict=True)
        half_in = (half and not analysis.is_moved_input(v) for v, half in pairs)
        return dataclasses.replace(plan, half_in=tuple(half_in)), outs

    def operand_uses(self, info, plan, uses, analysis):
        as_half = Use.AS_HALF | Use.PRODUCT
        return [as_half if is_half else Use.AS_FLOAT32 for is_half in plan.half_in]


class _CastByHand(Rule):
    """Matrix products in half of inputs that the program casts itself."""

    name, is_product, keeps_inputs = "unchanged", True, True

    def run(self, eqn, plan, values):
        half = eqn.invars[0].aval.dtype
        is_half = dtypes.is_half(eqn.outvars[0].aval.dtype)
        operands = values.read(eqn.invars, plan.half_in)
        for i, var in enumerate(eqn.invars[:2]):
            operands[i] = values.before_cast(var, operands[i])
        return [products.run(eqn, operands, half, is_half)]


class Fp8(_Accumulated):
    """Large matrix products whose operands are rounded to fp8."""

    name, is_fp8 = "fp8", True

    def __init__(self, lhs_dtype: Any):
        self.dtypes = lhs_dtype, fp8.FORWARD  # of the two operands

    def run(self, eqn, plan, values):
        lhs, rhs = values.read(eqn.invars, plan.half_in)
        dimensions = eqn.params["dimension_numbers"]
        dtype = values.half_dtype if plan.half_out[0] else jnp.float32
        return [fp8.dot_general(lhs, rhs, dimensions, dtype, self.dtypes[0])]


# What may become a part of float32 operations.
_FUSES = {HALF, CAST_INPUT, FUSED, NUMBER, BROADCAST}


class _Elementwise(Rule):
    """Arithmetic and moves: half where every operand is, else float32."""

    is_elementwise = computes_in_float32 = True

    def propagate(self, info, ins, uses, analysis):
        eqn = info.eqn
        if facts(eqn.primitive.name) & Fact.SATURATES and uses[0] & Use.NEAR_ONE:
            return UNSAFE.keep(info, "its distance from 1 is used")
        if len(eqn.outvars) == len(ins) > 1:  # a barrier: result i is operand i
            half = tuple(p.is_half for p in ins)
            return EqnPlan(self, half, half), ins
        if analysis.looks_up_input(eqn):
            ins = [INPUT, *ins[1:]]  # cast or not: this casts it, if it is to be
        operands = [p for p in ins if p not in IGNORED]
        is_cast_before = operands == [INPUT] and self._casts_before(eqn, uses, analysis)
        joins = joins_half(eqn, ins)
        if joins and analysis.may_underflow(ins, uses):
            return UNSAFE.keep(info, "a divisor or a logarithm reads it")
        is_sum = bool(facts(eqn.primitive.name) & Fact.LINEAR)
        sums_parts = is_sum and FUSED in operands and _FUSES.issuperset(operands)
        is_stored = (joins or sums_parts) and analysis.is_kept(eqn, ins)
        keeps = is_stored and not self.is_move
        # A choice between one half array and numbers is arithmetic, too: of a cast in
        # one of two reads, XLA may leave out the one and not the other.
        may_fuse = not self.is_move or eqn.primitive.name == "select_n"
        may_fuse = may_fuse and joins and not is_stored
        is_part = may_fuse and analysis.is_part(info, ins, union(uses))
        is_fused = is_part or (may_fuse and analysis.is_offset(info, union(uses)))
        if is_cast_before or keeps or (joins and not is_fused):
            in_f32 = operands.count(FUSED) > 1  # the offsets of both may cancel
            as_written = (*IGNORED, FUSED) if in_f32 else IGNORED
            half_in = tuple(p not in as_written for p in ins)
            reads_f32 = union(uses) & (Use.AS_FLOAT32 | Use.OUTPUT) != 0
            plan = EqnPlan(
                self,
                half_in,
                info.is_f32,
                keeps_half=keeps,
                in_float32=not self.is_move
                and (in_f32 or info.broadcasts() or (info.adds_number() and reads_f32))
                and not analysis.is_bias_of_convolution(info),
            )
            is_input = {HALF, FUSED}.isdisjoint(operands)
            is_input = is_input and (is_lookup(eqn) or not is_cast_before)
            return plan, [CAST_INPUT if is_input else HALF] * len(eqn.outvars)
        reason = "an operand is f32"
        if is_fused:
            reason = "f32 alone reads it" if is_part else "arithmetic may undo it"
        has_half = any(p.is_half for p in operands)
        plan, _ = self.keep(info, reason if has_half else "")
        result = FUSED if is_fused else self._in_float32(info, ins)
        return plan, [result] * len(eqn.outvars)

    def _casts_before(self, eqn: Eqn, uses: Sequence[int], analysis: Analysis) -> bool:
        """Return whether an input is cast before it is moved or looked up."""
        use = union(uses)
        if not is_lookup(eqn):
            return use & Use.DTYPE == Use.AS_HALF and casts_before(eqn)
        if analysis.is_recomputed:
            return False
        # What is KEPT is rounded, whatever reads it beside.
        is_rounded = use & Use.KEPT and not use & (Use.OUTPUT | Use.FRACTION)
        return use & Use.DTYPE == Use.AS_HALF or bool(is_rounded)

    def _in_float32(self, info: EqnInfo, ins: Sequence[Precision]) -> Precision:
        """Return the precision of a result that is computed in float32."""
        name = info.eqn.primitive.name
        # Is an operand broadcast, explicitly, or by arithmetic?
        may_broadcast = not self.is_move or name == "broadcast_in_dim"
        is_broadcast = [may_broadcast and smaller for smaller in info.is_smaller]
        after = {FLOAT32: STATISTIC, INPUT: INPUT if self.is_move else BROADCAST}
        operands = {
            after.get(p, p) if broadcast else p
            for p, broadcast in zip(ins, is_broadcast, strict=True)
            if p not in IGNORED
        }
        if not operands or FLOAT32 in operands:
            return FLOAT32
        if INPUT not in operands:
            if FUSED in operands and operands <= _FUSES:
                return FUSED
            if not operands.isdisjoint((HALF, CAST_INPUT, FUSED, NORMALIZED)):
                return NORMALIZED
            return next(p for p in (STATISTIC, BROADCAST, NUMBER) if p in operands)
        if not self.is_move or not operands <= {INPUT, BROADCAST, NUMBER}:
            return FLOAT32
        return BROADCAST if is_broadcast[0] or is_lookup(info.eqn) else INPUT

    def operand_uses(self, info, plan, uses, analysis):
        if info.returns_sum(uses):
            return super().operand_uses(info, plan, uses, analysis)
        eqn, operands = info.eqn, info.eqn.invars
        if any(plan.half_in) and analysis.looks_up_input(eqn):
            of_table = Use.AS_HALF | Use.LOOKED_UP
            use = Use.AS_FLOAT32 if analysis.keeps_inputs else of_table
            return [use] * len(operands)
        passed = self._passed_on(eqn, plan, union(uses))
        is_input = [
            analysis.is_moved_input(v) or analysis.is_cast_input(v) for v in operands
        ]
        is_exact = is_sum_or_multiple(eqn, is_input)
        joins = facts(eqn.primitive.name) & Fact.JOINS
        # A bias is cast where it is added, once it is broadcast, also if it was
        # reshaped before: so its gradient is summed in float32.
        return [
            Use.AS_FLOAT32
            if of_input and ((is_smaller and not joins) or not is_exact)
            else passed
            for of_input, is_smaller in zip(is_input, info.is_smaller, strict=True)
        ]

    def made_of(self, info, ins, plan, analysis):
        if plan.keeps_half:
            return None
        found = analysis.stored_operands(info.eqn, ins)
        return found if len(found) == 1 else None

    def cast_moves(self, info, ins, plan, analysis):
        results = info.eqn.outvars
        pairs = zip(info.eqn.invars, ins, strict=True)
        halves = {v for v, p in pairs if p.is_half}
        if not halves:
            return results if casts_before(info.eqn) else ()
        is_moved = self.is_move and analysis.keeps_inputs
        return results if is_moved and halves <= analysis.cast_moves else ()

    def _passed_on(self, eqn: Eqn, plan: EqnPlan, use: int) -> int:
        rounds_before = self.is_move or facts(eqn.primitive.name) & Fact.EXACT
        passed = ~Use.DTYPE if rounds_before else Use.KEPT
        beside, use = use & passed, use & Use.DTYPE
        if use & Use.OUTPUT:
            beside |= Use.EXACT
        if use == Use.OUTPUT and self.is_move:
            return Use.OUTPUT | beside
        if not (any(plan.half_in) or casts_before(eqn)):
            return Use.AS_FLOAT32 | beside
        if plan.keeps_half:
            is_sum = facts(eqn.primitive.name) & Fact.LINEAR
            beside |= Use.TERM if is_sum else Use.FACTOR
        in_f32 = Use.AS_FLOAT32 if use & (Use.AS_FLOAT32 | Use.OUTPUT) else 0
        return use & Use.AS_HALF | in_f32 | beside

    def run(self, eqn, plan, values):
        if any(plan.half_in) and is_retyping(eqn):  # the result is the operand
            return values.read(eqn.invars, plan.half_in)
        if any(plan.reads_half):
            return values.apply(eqn, plan.reads_half)
        results = values.apply_in_f32(eqn, plan.half_in)
        if plan.in_float32 and not plan.keeps_half:
            values.note_casts(eqn.outvars, results)
            return results
        if plan.in_float32:
            return [sums.stored(x, values.half_dtype) for x in results]
        return values.cast_to_half(results, plan.half_out)


class _Promote(_Elementwise):
    name, is_move = "promote", False


class _PassThrough(_Elementwise):
    """Moves and choices of numbers: an input that was only moved is still an input."""

    name, is_move = "passthrough", True


class _SubJaxprs(Rule):
    """Control flow and calls: each sub-jaxpr has a plan of its own."""

    name = "sub"

    def propagate(self, info, ins, uses, analysis):
        eqn, bodies, ins = info.eqn, info.bodies, list(ins)
        if analysis.keeps_inputs:  # a body says itself whether it wants them in half
            ins = [
                INPUT if p.is_half and analysis.is_moved_input(v) else p
                for v, p in zip(eqn.invars, ins, strict=True)
            ]
        plans = self._plan_bodies(info, ins, uses, analysis)
        # An operand that the bodies use in half alone is cast before the equation: out
        # of the loop, or once for all the calls.
        used = _uses_by_bodies(info, plans)
        castable = {b.operands[k] for b in bodies for k in b.casts_in}
        moved_out = [
            i
            for i, p in enumerate(ins)
            if used[i] & (Use.DTYPE | Use.LOOKED_UP) == Use.AS_HALF
            and i in castable
            and p in (INPUT, BROADCAST, FLOAT32)
        ]
        if moved_out:
            for i in moved_out:
                ins[i] = HALF
            plans = self._plan_bodies(info, ins, uses, analysis)
        fixed = {b.operands[k] for b in bodies for k in b.fixed_in}
        outs = [
            precision.join(
                [
                    FLOAT32 if k in body.fixed_out else plan.outs[k]
                    for body, plan in zip(bodies, plans, strict=True)
                    for k, j in enumerate(body.results)
                    if j == i
                ]
            )
            for i in range(len(eqn.outvars))
        ]
        half_in = tuple(p.is_half and i not in fixed for i, p in enumerate(ins))
        pairs = zip(outs, info.is_f32, strict=True)
        half_out = tuple(p.is_half and is_f32 for p, is_f32 in pairs)
        return EqnPlan(self, half_in, half_out, tuple(plans)), outs

    def _plan_bodies(self, info, ins, uses, analysis) -> list[CastPlan]:
        of_bodies = [
            [
                (OTHER if ins[i] in IGNORED else FLOAT32)  # a loop may change it
                if k in body.fixed_in
                else ins[i]
                for k, i in enumerate(body.operands)
            ]
            for body in info.bodies
        ]
        return self._plan_bodies_for(info, of_bodies, uses, analysis)

    def _plan_bodies_for(self, info, ins, uses, analysis) -> list[CastPlan]:
        """Return the plans of bodies, given the precision of the inputs of each."""
        return [
            analysis.plan_body(
                info.eqn,
                body,
                of_body,
                [
                    Use.OUTPUT if i is None or k in body.fixed_out else uses[i]
                    for k, i in enumerate(body.results)
                ],
            )
            for body, of_body in zip(info.bodies, ins, strict=True)
        ]

    def cast_moves(self, info, ins, plan, analysis):
        pairs = list(zip(info.bodies, plan.bodies, strict=True))
        return [
            var
            for i, var in enumerate(info.eqn.outvars)
            if analysis.keeps_inputs
            and all(of_body.is_cast_move(body, i) for body, of_body in pairs)
        ]

    def operand_uses(self, info, plan, uses, analysis):
        # The plan was made for the uses that were known before.
        ins = [body_plan.ins for body_plan in plan.bodies]
        return _uses_by_bodies(info, self._plan_bodies_for(info, ins, uses, analysis))


def _uses_by_bodies(info: EqnInfo, plans: Sequence[CastPlan]) -> list[int]:
    uses = [0] * len(info.eqn.invars)
    for body, plan in zip(info.bodies, plans, strict=True):
        for k, i in enumerate(body.operands):
            is_fixed = k in body.fixed_in
            uses[i] |= Use.AS_FLOAT32 | Use.EXACT if is_fixed else plan.in_uses[k]
    return uses


class _Softmax(Rule):
    """The division of a softmax that only half operations read."""

    name = "softmax"

    def propagate(self, info, ins, uses, analysis):
        found: Any = info.softmax
        of_logits = analysis.precision[found.logits]
        is_from_half = of_logits.is_half or of_logits == FUSED
        may_repeat = is_from_half and not analysis.recomputes
        found = dataclasses.replace(found, may_repeat=may_repeat)
        return EqnPlan(self, (False, False), (True,), softmax=found), [HALF]

    def run(self, eqn, plan, values):
        found: Any = plan.softmax
        logits = values.read_as_made(found.logits)
        options = {"axes": found.axes, "may_repeat": found.may_repeat}
        return [products.softmax(logits, dtype=values.half_dtype, **options)]


class _Boundary(Rule):
    """Casts around a call of an `in_half` function: a half value is passed as it is.

    Its results are like those of matrix products: half where these would be.
    """

    name = half_calls.REASON

    def propagate(self, info, ins, uses, analysis):
        if info.is_f32 == (False,):
            return EqnPlan(self, (True,), (False,)), [OTHER]
        is_half = _is_result_half(info, uses[0], analysis)
        return EqnPlan(self, (False,), (is_half,)), [HALF if is_half else FLOAT32]

    def operand_uses(self, info, plan, uses, analysis):
        return [Use.AS_HALF | Use.PRODUCT]

    def run(self, eqn, plan, values):
        if any(plan.half_in):
            return [values.read_bounded(eqn.invars[0])]
        (value,) = values.read(eqn.invars, (False,))
        return [value] if any(plan.half_out) else binding.bind_here(eqn, [value])


UNCHANGED, UNSAFE, PRODUCT = Rule(), _Unsafe(), _Product()
ACCUMULATED, CAST_BY_HAND = _Accumulated(), _CastByHand()
FP8, FP8_BACKWARD = Fp8(fp8.FORWARD), Fp8(fp8.GRADIENT)
PROMOTE, PASSTHROUGH = _Promote(), _PassThrough()
SUB_JAXPRS, SOFTMAX, BOUNDARY = _SubJaxprs(), _Softmax(), _Boundary()

# The class of a primitive in the table -> its rule.
BY_CLASS: dict[str, Rule] = {
    "half": PRODUCT,
    "float32": UNSAFE,
    "promote": PROMOTE,
    "passthrough": PASSTHROUGH,
    "unchanged": UNCHANGED,
}


def rule_for(eqn: Eqn, op_class: str) -> Rule:
    if is_retyping(eqn):  # float32 to float32, as jnp.where does to numbers
        return PASSTHROUGH
    rule = BY_CLASS[op_class]
    is_opened = rule is UNCHANGED and control_flow.sub_jaxprs(eqn)
    return SUB_JAXPRS if is_opened else rule


def product_rule(
    eqn: Eqn, region: precision.Region, direction: Direction, fp8_min_size: int
) -> tuple[Rule, str]:
    """Return the rule of a product by the policy; and why it is not in fp8, or ""."""
    if direction.has_derivative_rule:
        reason = "a function with a rule for its derivatives"
        return PRODUCT, reason if region.fp8 else ""
    why_not = products.why_not_fp8(eqn, fp8_min_size) if region.fp8 else ""
    if region.fp8 and not why_not:
        return (FP8_BACKWARD if direction is Direction.BACKWARD else FP8), ""
    return ACCUMULATED if region.reduces_in_float32 else PRODUCT, why_not


def decide(
    info: EqnInfo, ins: Sequence[Precision], uses: Sequence[int], analysis: Analysis
) -> Decision:
    """Return the plan of an equation, and the precision of each result."""
    rule = info.rule
    if not info.region.is_low:
        if info.region.is_closed or not info.bodies:
            return UNCHANGED.keep(info, info.region.reason)
        # The bodies may have scopes with other policies.
        ins = [FLOAT32 if p.is_half else p for p in ins]
    is_softmax = info.softmax is not None
    if is_softmax and [use & Use.DTYPE for use in uses] == [Use.AS_HALF]:
        rule = SOFTMAX
    plan, outs = rule.propagate(info, ins, uses, analysis)
    if not all(info.is_f32):
        pairs = zip(outs, info.is_f32, strict=True)
        outs = [p if is_f32 else OTHER for p, is_f32 in pairs]
    if {FUSED, NORMALIZED} & {*outs} and analysis.half_results(info):
        return _round_norms(plan, outs, uses)
    return plan, outs


def _round_norms(
    plan: EqnPlan, outs: Sequence[Precision], uses: Sequence[int]
) -> Decision:
    """Round the output of a norm to half for everything that reads it.

    That is done if a product reads it, which needs it in half anyway, and nothing uses
    it exactly.
    """
    wanted = Use.AS_FLOAT32 | Use.PRODUCT
    unwanted = Use.OUTPUT | Use.EXACT | Use.NEAR_ONE | Use.FRACTION
    rounds = [
        out in (FUSED, NORMALIZED) and use & (wanted | unwanted) == wanted
        for out, use in zip(outs, uses, strict=True)
    ]
    half_out = tuple(map(max, plan.half_out, rounds))
    rounded = [HALF if r else out for r, out in zip(rounds, outs, strict=True)]
    return dataclasses.replace(plan, half_out=half_out), rounded


def operand_uses(
    info: EqnInfo,
    plan: EqnPlan,
    ins: Sequence[Precision],
    uses: Sequence[int],
    analysis: Analysis,
) -> list[int]:
    """Return how an equation uses each of its operands, and which of their digits.

    A bool is not rounded, and what chooses by it does not ask for the digits of what
    was compared: `where(x > 0, x, 0)` uses `x` as its result is used.
    """
    eqn, results = info.eqn, info.eqn.outvars
    used = plan.rule.operand_uses(info, plan, uses, analysis)
    bool_use = None  # that of bool operands, if they are used unlike others
    if not plan.bodies and results:
        if all(map(core.is_bool, results)):
            bool_use = union(uses)
            if not any(uses):  # a comparison, or logic, that only chooses
                used = [0] * len(used)
        elif all(map(core.is_float, results)):
            bool_use = 0
    digits = info.rule.digits_used(info, ins, uses)
    return [
        (use if bool_use is None or not core.is_bool(v) else bool_use) | of_digits
        for v, use, of_digits in zip(eqn.invars, used, digits, strict=True)
    ]


def _is_result_half(info: EqnInfo, use: int, analysis: Analysis) -> bool:
    if info.region.half_results is False or use & Use.FRACTION:
        return False
    if analysis.is_recomputed:  # then nothing may depend on the uses
        return info.region.half_results is True
    use &= Use.DTYPE
    return use != Use.OUTPUT if analysis.half_results(info) else use == Use.AS_HALF
