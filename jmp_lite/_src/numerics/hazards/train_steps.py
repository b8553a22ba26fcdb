"""Train steps whose loss scale is not used as it must be.

Limits: what cannot be decided is no finding, as where gradients are arguments, or a
constant scale is not of a loss scale of ours.
"""

from collections.abc import Iterable

import jax.numpy as jnp

from jmp_lite._src.jaxprs.primitives import Fact
from jmp_lite._src.numerics.hazards import graph
from jmp_lite._src.numerics.hazards.graph import Value
from jmp_lite._src.numerics.hazards.rule import Find, Program, rule
from jmp_lite._src.numerics.hazards.scaling import CLIPPED, MIXED, UNSCALED

_INSIDE = "Put it inside: scale_aware(optax.chain(..., optimizer))."


def _has(*faults: str) -> Find:
    return lambda value, _: next((x for x in faults if value.scaling.fault == x), None)


_unscaled = rule(
    "unscaled-gradients",
    "error",
    "Updates are too small by the loss scale, also those of Adam, whose eps is "
    "then larger than the gradients.",
    "Use scaled_value_and_grad(loss_fn, loss_scale=opt_state), or differentiate "
    "loss_scale.scale(loss), of each loss. Unscale once, as scale_aware does, and "
    "normalise gradients inside of it.",
)(_has(UNSCALED, MIXED))
_clipped = rule(
    "clipped-while-scaled",
    "error",
    "The limit is compared with gradients times the loss scale, and an overflow "
    "may be hidden.",
    _INSIDE,
)(_has(CLIPPED))


@rule(
    "no-loss-scale",
    "error",
    "Gradients below 6e-8 become 0.",
    "Use scale_aware(optimizer) and scaled_value_and_grad(loss_fn, "
    "loss_scale=opt_state), or bfloat16.",
    is_once=True,
)
def _float16_without_scale(value: Value, program: Program) -> str | None:
    # Casts of the updates to the dtype of the parameters are none of gradients.
    if not (value.facts & Fact.PRODUCT or value.is_cast and value.is_backward):
        return None
    half = [x.scaling for x in (*value.ins, value) if x.dtype == jnp.float16]
    is_lost = any(x.is_gradient and x.is_known and not x.is_scaled for x in half)
    if is_lost and program.updated and not program.is_scaled:
        return "gradients are float16, and no loss scale reaches them"


@rule(
    "decay-outside",
    "error",
    "Outside of scale_aware it is applied in skipped steps, or divided by the loss "
    "scale.",
    _INSIDE,
)
def _decay(value: Value, program: Program) -> str | None:
    if value in program.results:
        terms = graph.terms_of(value)
        rest = {(x, scaled) for x, scaled in terms if not x.scaling.is_update}
        of = {x for x, _ in rest}
        if len(of) == 1 and rest < terms and _is_moment(rest, value):
            what = "parameters" if of.pop().is_param else "moments of updates"
            return f"{what} decay outside of scale_aware"
    if value.facts & Fact.LINEAR and not value.is_backward and len(value.ins) == 2:
        for x, other in (value.ins, value.ins[::-1]):
            is_scaled = x.scaling.is_gradient and x.scaling.is_scaled
            if not is_scaled or other.scaling.is_scaled:
                continue
            terms = graph.terms_of(other)
            if terms and all(scaled and term.is_param for term, scaled in terms):
                return "weight decay is added to gradients while they are scaled"


def _is_moment(terms: Iterable[tuple[Value, bool]], value: Value) -> bool:
    """Return whether an input, multiplied by a factor, is a term of its next value."""
    return any(scaled and not x.name and x.shape == value.shape for x, scaled in terms)


@rule(
    "loss-scale-lost",
    "error",
    "It never falls: after an overflow, every step is skipped.",
    "Call tx.update of scale_aware, or loss_scale.adjust, in each step, and return the "
    "new state: updates, opt_state = tx.update(...). Choose neither by gradients; the "
    "loss in value= must hold none.",
    is_once=True,
)
def _lost(value: Value, program: Program) -> str | None:
    cases = value.cases if value.scaling.is_choice else ()
    is_adjusted = any(x.scaling.is_kept and x.scaling.is_scaled for x in cases)
    is_kept = is_adjusted and any(graph.origin(x).is_loss_scale for x in cases)
    if is_kept and _is_of_scaled_gradients(value.mask):
        return "the loss scale is kept where gradients are not finite"
    scales = [x.scaling.power for x in value.ins if x.is_loss_scale]
    if not scales or not program.updated or program.is_still_scaled:
        return None
    results = [x.scaling for x in program.values if x.is_result]
    others = [x for x in results if not x.is_gradient]
    is_known = all(x.is_known for x in others)
    if is_known and any(power not in {x.power for x in others} for power in scales):
        return "the step does not return its new loss scale"


def _is_of_scaled_gradients(mask: Value | None) -> bool:
    """Return whether scaled gradients decide: not those that a loss itself takes."""

    def decide(value: Value) -> list[Value]:
        before = value.ins[:1] if value.is_carry else value.ins
        return [x for x in before if x.scaling.decides]

    found = (x.scaling for x in graph.behind([mask] if mask else [], decide))
    return any(x.is_gradient and x.is_scaled for x in found)


@rule(
    "not-skipped",
    "error",
    "The first overflow makes them NaN for good.",
    "Use scale_aware(optimizer), or keep parameters and state: "
    "select_tree(grads_finite, new, old).",
)
def _not_skipped(value: Value, program: Program) -> str | None:
    if value not in program.results or value.scaling.is_kept:
        return None
    if not program.updated or not program.is_dynamic or program.is_still_scaled:
        return None
    what = "parameters" if value in program.updated else "moments"
    if value in program.updated or _is_moment(graph.terms_of(value), value):
        return f"{what} are updated, whether gradients are finite or not"


@rule(
    "scaled-update",
    "error",
    "Updates grow with the loss scale, and no step is skipped.",
    "Scale the loss once; wrap the optimizer, scale_aware(optimizer), or call "
    "loss_scale.unscale(grads) before it.",
)
def _scaled_update(value: Value, program: Program) -> str | None:
    if value in program.updated and value.scaling.is_still_scaled:
        return "parameters are updated from gradients that are scaled"


@rule(
    "summed-twice",
    "error",
    "Where shard_map checks axes, gradients of replicated parameters are sums over the "
    "devices already, and a mean of these is the same sum.",
    "Differentiate the mean of the loss, jax.lax.pmean(loss, axis_name), and leave the "
    "gradients as they are.",
    of=Fact.SUMS,
)
def _summed_twice(value: Value, program: Program) -> str | None:
    copy, params = value.ins[0], value.eqn.params
    axes = params.get("axes", params.get("axis_name", ()))
    if value.is_backward or copy.name != "pvary":  # it is equal on each device
        return None
    if not any(term.is_backward for term, _ in graph.terms_of(copy.ins[0])):
        return None
    # The derivative of a mean of losses begins with a copy to each device.
    copies = filter(_is_of_a_mean, program.values)
    averaged = {axis for x in copies for axis in x.eqn.params["axes"]}
    uses = [use for use, _ in graph.readers(value, graph.moves)]
    is_mean = bool(uses) and all(use.degrees == (1.0, -1.0) for use in uses)
    if not is_mean or not averaged.intersection(axes):
        kind = "mean" if is_mean else "sum"
        return f"a {kind} over {axes} of gradients that are summed over them"


def _is_of_a_mean(value: Value) -> bool:
    """Return whether it copies the gradient of a loss to each device.

    That is 1 or computed. Other numbers are of what the backward pass computes again.
    """
    if value.name != "pvary" or value.shape != () or not value.is_backward:
        return False
    is_added = any(len(x.ins) == 2 and x.facts & Fact.LINEAR for x in value.uses)
    operand = value.ins[0]
    return operand.array is None or (operand.number == 1.0 and not is_added)
