"""Train steps whose loss scale is not used as it must be.

Limits: what cannot be decided is no finding, as where gradients are arguments, or a
constant scale is not of a loss scale of ours.
"""

import itertools
import math
from collections.abc import Iterable

import jax.numpy as jnp

from jmp_lite._src.jaxprs.primitives import LOOPS, Fact
from jmp_lite._src.numerics.hazards import dataflow
from jmp_lite._src.numerics.hazards.dataflow import JOIN, Op, Value
from jmp_lite._src.numerics.hazards.ranges import scalar
from jmp_lite._src.numerics.hazards.rule import Hits, LintedProgram, Rules

# A loss that is multiplied by less is weighted, not scaled.
_LEAST_SCALE = 8.0

_INSIDE = "Put it inside: scale_aware(optax.chain(..., optimizer))."

RULES = Rules()


@RULES.error(
    "unscaled-gradients",
    "Updates are too small by the loss scale, also those of Adam, whose eps is "
    "then larger than the gradients.",
    "Use scaled_value_and_grad(loss_fn, loss_scale=opt_state), or differentiate "
    "loss_scale.scale(loss). Unscale once: scale_aware does.",
)
def _unscaled(program: LintedProgram) -> Hits:
    for op in program.ops:
        if program.scalings.power_of_unscaled(op) == 0.0:
            yield op, "gradients that the loss scale never reached are divided by it"


@RULES.error(
    "no-loss-scale",
    "Gradients below 6e-8 become 0.",
    "Use scale_aware(optimizer) and scaled_value_and_grad(loss_fn, "
    "loss_scale=opt_state), or bfloat16.",
)
def _float16_without_scale(program: LintedProgram) -> Hits:
    if not updated_params(program) or any(_may_scale(program, x) for x in program.ops):
        return
    if any(_unscaled(program)):  # which says it already
        return
    for op in program.ops:
        # Casts of the updates to the dtype of the parameters are none of gradients.
        is_cast = op.is_cast and op.is_backward
        if not (is_cast or op.facts & Fact.PRODUCT):
            continue
        half = [v for v in (*op.ins, *op.outs) if v.dtype == jnp.float16]
        gradients = [x for x in map(program.scalings.of, half) if x.is_gradient]
        if any(not any(map(any, x.powers or ())) for x in gradients):
            yield op, "gradients are float16, and no loss scale reaches them"
            return


def _may_scale(program: LintedProgram, op: Op) -> bool:
    """Return whether a gradient is multiplied by what may be a loss scale.

    That is one of `scale_aware`, a large constant, or a number from outside of the loss
    function.
    """
    factors = [v for v, _, _ in op.factors]
    # A number that follows from a shape is no gradient, as where a norm is remade.
    is_constant = not factors and all(scalar(v) is not None for v in op.ins)
    if not op.is_backward or is_constant:
        return False
    for value in factors or op.ins:
        x, known = scalar(value), program.scalings.of(value)
        if any(known.power or ()) and not known.is_gradient:  # mapped, it is no scalar
            return True
        if x is not None:
            if op.outs[0].shape == () and abs(x) >= _LEAST_SCALE:
                return True
        elif value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
            maker = dataflow.uncast(value).maker
            if maker is None or not maker.is_differentiated:
                return True
    return False


@RULES.error(
    "clipped-while-scaled",
    "The limit is compared with gradients times the loss scale, and an overflow "
    "may be hidden.",
    _INSIDE,
)
def _clipped(program: LintedProgram) -> Hits:
    for op in filter(program.scalings.is_clip, program.ops):
        yield op, "gradients are clipped while they are scaled"


@RULES.error("decay-outside", "They change in skipped steps.", _INSIDE)
def _decayed_outside(program: LintedProgram) -> Hits:
    for op, value in _results_of_gradients(program):
        terms = _terms(program, value)
        rest = [(v, scaled) for v, scaled in terms if not _is_guarded(v)]
        is_one = len({id(v) for v, _ in rest}) == 1
        if is_one and len(rest) < len(terms) and _is_moment(rest, value):
            what = "parameters" if _is_param(rest[0][0]) else "moments of updates"
            yield op, f"{what} decay outside of scale_aware"


def _is_moment(terms: Iterable[tuple[Value, bool]], value: Value) -> bool:
    """Return whether an input, multiplied by a factor, is a term of its next value."""
    return any(
        scaled and v.maker is None and v.shape == value.shape for v, scaled in terms
    )


def _is_guarded(value: Value) -> bool:
    """Return whether a value is an update of `scale_aware`, or a multiple or a power.

    These are -0.0 in skipped steps.
    """

    def multiplied(op: Op) -> list[Value]:
        of = zip(op.ins, op.degrees, strict=False)
        return [v for v, degree in of if degree > 0.0 and not op.is_backward]

    cases = [v for op in dataflow.makers([value], multiplied) for v in op.cases]
    numbers = [x for x in map(scalar, cases) if x is not None]
    return any(x == 0.0 and math.copysign(1.0, x) < 0 for x in numbers)


@RULES.error("decay-outside", "The decay is then divided by the loss scale.", _INSIDE)
def _decayed_while_scaled(program: LintedProgram) -> Hits:
    of = program.scalings.of
    for op in program.having(Fact.LINEAR):
        for value, other in itertools.permutations(op.ins, 2):
            known, powers = of(value), of(other).powers
            if op.is_backward or not (known.is_gradient and any(known.power or ())):
                continue
            terms = _terms(program, other) if powers is not None else []
            is_decay = terms and all(scaled and _is_param(v) for v, scaled in terms)
            if is_decay and not any(map(any, powers or ())):
                yield op, "weight decay is added to gradients while they are scaled"


@RULES.error(
    "loss-scale-lost",
    "It never falls: after an overflow, every step is skipped.",
    "Return the new state of the optimiser: updates, opt_state = tx.update(...).",
)
def _never_adjusted(program: LintedProgram) -> Hits:
    """Find a loss scale that no result has, but for the scale that was given."""
    if not updated_params(program) or any(_scaled_updates(program)):
        return
    results = [v for op in program.ops for v in op.outs if v.is_result]
    known = [x for x in map(program.scalings.of, results) if not x.is_gradient]
    if any(x.powers is None for x in known):
        return
    found = {x.power for x in known}
    for op in program.ops:
        for value in op.ins:
            if value.is_loss_scale and program.scalings.of(value).power not in found:
                yield op, "the step does not return its new loss scale"
                return


@RULES.error(
    "loss-scale-lost",
    "It never falls: after an overflow, every step is skipped.",
    "Call tx.update of scale_aware, or loss_scale.adjust, in each step, and keep "
    "what it returns. The loss in value= must hold no gradients.",
)
def _kept_in_skipped_steps(program: LintedProgram) -> Hits:
    choices, chosen = _choices(program)
    for op in choices:
        adjusted = [program.scalings.of(v) for v in _cases(op) if id(v) in chosen]
        is_scale = any(any(known.power or ()) for known in adjusted)
        if is_scale and any(dataflow.origin(v).is_loss_scale for v in _cases(op)):
            yield op, "the loss scale is kept where gradients are not finite"


@RULES.error(
    "not-skipped",
    "The first overflow makes them NaN for good.",
    "Use scale_aware(optimizer), or keep parameters and state: "
    "select_tree(grads_finite, new, old).",
)
def _not_skipped(program: LintedProgram) -> Hits:
    is_dynamic = any(v.is_loss_scale for op in program.ops for v in op.ins)
    if not is_dynamic or any(_scaled_updates(program)):
        return
    _, chosen = _choices(program)
    updated = {id(v) for _, v in updated_params(program)}
    for op, value in _results_of_gradients(program):
        if id(value) in chosen:
            continue
        if id(value) in updated:
            yield op, "parameters are updated, whether gradients are finite or not"
        elif updated and _is_moment(_terms(program, value), value):
            yield op, "moments are updated, whether gradients are finite or not"


@RULES.error(
    "scaled-update",
    "Updates grow with the loss scale, and no step is skipped.",
    "Scale the loss once; wrap the optimizer, scale_aware(optimizer), or call "
    "loss_scale.unscale(grads) before it.",
)
def _scaled_updates(program: LintedProgram) -> Hits:
    for op, value in updated_params(program):
        if program.scalings.of(value).scaled_by:
            yield op, "parameters are updated from gradients that are scaled"


@RULES.error(
    "summed-twice",
    "Where shard_map checks axes, gradients of replicated parameters are sums over the "
    "devices already, and a mean of these is the same sum.",
    "Differentiate the mean of the loss, jax.lax.pmean(loss, axis_name), and leave the "
    "gradients as they are.",
)
def _summed_twice(program: LintedProgram) -> Hits:
    """Find sums over devices of gradients that are equal there."""
    copies = list(program.named("pvary"))
    # The derivative of a mean of losses begins with a copy to each device.
    averaged = [op for op in copies if op.is_backward and op.ins[0].shape == ()]
    for op in program.named("psum_invariant", "psum"):
        axes = op.eqn.params["axes"]
        for value, total in zip(op.ins, op.outs, strict=True):
            copy, uses = value.maker, dataflow.readers(total)
            if op.is_backward or copy not in copies:
                continue
            is_mean = all(use and use.degrees == (1.0, -1.0) for use, _ in uses)
            if is_mean and any({*axes} & {*x.eqn.params["axes"]} for x in averaged):
                continue
            terms = _terms(program, copy.ins[copy.outs.index(value)])
            if any(v.maker is not None and v.maker.is_backward for v, _ in terms):
                kind = "mean" if is_mean else "sum"
                yield op, f"a {kind} over {axes} of gradients that are summed over them"


def _choices(program: LintedProgram) -> tuple[list[Op], set[int]]:
    """Return what chooses by gradients, and the ids of what is computed from that.

    One of its cases is not computed from gradients, unlike those of a clip.
    """
    choices: list[Op] = []
    of_gradients, of_choices = set(), set()
    for op in program.ops:
        if op.chosen_by is not None and id(op.chosen_by) in of_gradients:
            if not all(id(v) in of_gradients for v in _cases(op)):
                choices.append(op)
                of_choices.update(map(id, op.outs))
                continue  # what it keeps is finite
        for i, value in enumerate(op.outs):
            # A sum over devices of several arrays has one result for each.
            is_each = len(op.ins) == len(op.outs)
            ins = {id(v) for v in (op.ins[i : i + 1] if is_each else op.ins)}
            if op.is_backward or not of_gradients.isdisjoint(ins):
                of_gradients.add(id(value))
            if not of_choices.isdisjoint(ins):
                of_choices.add(id(value))
    return choices, of_choices


def _cases(op: Op) -> list[Value]:
    return op.cases or op.ins


def _results_of_gradients(program: LintedProgram) -> list[tuple[Op, Value]]:
    results = [(op, v) for op in program.ops for v in op.outs if v.is_result]
    return [(op, v) for op, v in results if program.scalings.of(v).is_gradient]


def updated_params(program: LintedProgram) -> list[tuple[Op, Value]]:
    """Return the results that are parameters after an update, with their makers."""
    return [
        (op, v)
        for op, v in _results_of_gradients(program)
        if any(
            _is_param(x) and x.shape == v.shape
            for x, _ in _terms(program, v, through_select=True)
        )
    ]


def _is_param(value: Value) -> bool:
    """Return whether a value is an input that gradients are taken of."""

    def stands_for(op: Op, value: Value) -> list[Value]:
        return op.outs if op.name == JOIN else dataflow.cast_or_moved(op, value)

    if value.maker is not None or value.known is not None or value.dtype is None:
        return False
    is_float = jnp.issubdtype(value.dtype, jnp.inexact)
    found = dataflow.readers(value, stands_for)
    return is_float and any(op is not None and op.is_differentiated for op, _ in found)


def _terms(
    program: LintedProgram, value: Value, through_select: bool = False
) -> list[tuple[Value, bool]]:
    """Return what a value is a sum of, constants left out: `wd * p + u` is p and u.

    Each term comes with whether it is multiplied by a factor; `through_select` makes
    both values of a choice terms.
    """
    terms, waiting, seen = [], [(value, False)], set()
    while waiting:
        value, scaled = waiting.pop()
        op = value.maker
        if (id(value), scaled) in seen or scalar(value) is not None:
            continue
        seen.add((id(value), scaled))
        inner: list[Value] = []
        if op is not None and not op.is_backward:
            if len(sources := dataflow.sources_of(value)) == 1:
                inner = list(sources)
            elif op.name == JOIN:
                # What a loop carries is what it began with, after some steps.
                inner = op.ins[:1] if op.eqn.primitive.name in LOOPS else op.ins
            elif op.is_cast or op.facts & Fact.LINEAR:
                inner = op.ins
            elif op.cases and through_select:
                inner = op.cases
            elif op.factors:
                found = [(v, by) for v, by, _ in op.factors if _is_factor(by)]
                inner = [v for v, _ in found]
                # By its norm, a parameter is projected, which a skipped step repeats.
                of = program.scalings.of
                scaled |= any(not of(by).is_gradient for _, by in found)
        waiting += [(v, scaled) for v in inner]
        terms += [] if inner else [(value, scaled)]
    return terms


def _is_factor(value: Value) -> bool:
    """Return whether a value is one number, possibly broadcast."""
    while value.shape != () and len(sources := dataflow.sources_of(value)) == 1:
        (value,) = sources
    return value.shape == ()
