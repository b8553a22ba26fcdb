"""The matrix products of a call, and why none of them is in fp8.

Shared by the `with_policy` of linen and of nnx; does not import flax.
"""

import collections
import warnings
from typing import Any

import jax.numpy as jnp

from jmp_lite._src import dtypes, fp8
from jmp_lite._src.autocast import products
from jmp_lite._src.jaxprs.walk import walk


def find(jaxpr: Any, *names: str) -> list[Any]:
    """Return the matrix products and convolutions of a jaxpr, at any depth."""
    named = (*products.NAMES, *names)
    return [eqn for eqn in walk(jaxpr) if eqn.primitive.name in named]


def warn_about_fp8(what: str, jaxpr: Any) -> None:
    """Warn if no product of a call is in fp8; else if fp8 is slow on this device.

    The jaxpr is None if it is not known, or a product is in fp8.
    """
    found = [] if jaxpr is None else find(jaxpr, fp8.PRIMITIVE)
    reasons = [_why_not_fp8(eqn) for eqn in found]
    if jaxpr is None or not all(reasons):
        fp8.warn_if_slow()
    else:
        warnings.warn(no_fp8_message(what, collections.Counter(reasons)), stacklevel=3)


def _why_not_fp8(eqn: Any) -> str:
    operands = [v.aval.dtype for v in eqn.invars[:2]]
    if eqn.primitive.name == fp8.PRIMITIVE or any(map(dtypes.needs_scale, operands)):
        return ""
    if any(dtype != jnp.bfloat16 for dtype in operands):
        return f"computed in {jnp.promote_types(*operands).name}"
    if not fp8.is_default_precision(eqn.params.get("precision")):
        return "a precision that the model chose"
    other = "not of a layer that takes a dot_general"
    return products.why_not_fp8(eqn, fp8.MIN_SIZE) or other


def no_fp8_message(what: str, reasons: collections.Counter[str]) -> str:
    """Return the warning that a policy puts no product in fp8."""
    notes = [f"{n} × {reason}" for reason, n in reasons.most_common()]
    why = "; ".join(notes) or "it has none"
    return (
        f"with_policy put no matrix product of {what} in fp8: {why}. A larger batch "
        "has larger products; a rule overrides a `dtype` (`PolicyMap('mixed_fp8', {'': "
        "'mixed_fp8'})`); jmp_lite.autocast reaches products outside of layers; "
        "mixed_bfloat16 asks for no fp8."
    )
