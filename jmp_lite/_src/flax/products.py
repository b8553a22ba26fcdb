"""Warnings of calls without products in half, or in fp8; does not import flax."""

import warnings
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from jmp_lite._src import compat, dtypes, fp8
from jmp_lite._src.autocast import products
from jmp_lite._src.flax.module_policies import ModulePolicy
from jmp_lite._src.jaxprs.core import ClosedJaxpr
from jmp_lite._src.jaxprs.walk import walk
from jmp_lite._src.reports import summarize


def warn(
    what: str,
    resolved: Mapping[str, ModulePolicy],
    trace: Callable[[], ClosedJaxpr | None],
) -> None:
    """Warn if no product of a call is in half, or none in fp8, or fp8 is slow here."""
    asked = {path: jnp.dtype(of.policy.compute_dtype) for path, of in resolved.items()}
    halves = {path: dtype for path, dtype in asked.items() if dtypes.is_half(dtype)}
    # Of which the author's `dtype` is another.
    kept = [x for x, half in halves.items() if resolved[x].compute_dtype != half]
    any_fp8 = any(module.policy.matmul_dtype == "fp8" for module in resolved.values())
    if not kept and not any_fp8:
        return
    jaxpr = trace()
    names = (*products.NAMES, fp8.PRIMITIVE)
    eqns = [] if jaxpr is None else walk(jaxpr)
    found = [eqn for eqn in eqns if eqn.primitive.name in names]
    operands = [compat.aval_of(v).dtype for eqn in found for v in eqn.invars[:2]]
    in_fp8 = any(eqn.primitive.name == fp8.PRIMITIVE for eqn in found)
    if kept and found and {*halves.values()}.isdisjoint(operands):
        policy = resolved[""].policy
        text = (
            f"0 of the {len(found)} matrix products of {what} run in "
            f"{jnp.dtype(policy.compute_dtype).name} under the policy {policy}: "
            f"{len(kept)} of its modules set a `dtype`, which only a rule overrides: "
            f"{summarize([path or 'the model itself' for path in kept])}. Add a rule "
            f"(`PolicyMap('full', {{'': '{policy}'}})`), or create the model without a "
            "dtype (`dtype=None`, or in its config), or use jmp_lite.autocast."
        )
    elif any_fp8 and jaxpr is not None and not in_fp8:
        text = (
            f"with_policy put no matrix product of {what} in fp8: it takes those of "
            "layers with a `dot_general`, whose dimensions are multiples of "
            f"{fp8.TILE} from {fp8.MIN_SIZE} on, unless the author set that, a dtype "
            "or a precision. A larger batch has larger products; a rule overrides a "
            "`dtype` (`PolicyMap('mixed_fp8', {'': 'mixed_fp8'})`); jmp_lite.autocast "
            "reaches products outside of layers; mixed_bfloat16 asks for no fp8."
        )
    else:
        if any_fp8:
            fp8.warn_if_slow()
        return
    warnings.warn(text, stacklevel=3)
