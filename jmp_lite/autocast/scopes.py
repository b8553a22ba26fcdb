"""Name scopes: where in the model an equation is, and whether it may be lowered there.

JAX notes the scope of each equation (`jax.named_scope`; flax's modules enter one), and
wraps it as it differentiates: `jvp(decoder)`, `transpose(jvp(decoder))`. The path is
what is left without the wrappers: `"decoder/layer_3/attention"`. What `jax.checkpoint`
computes again is where it was computed first.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jmp_lite.policy import Policy, PolicyMap

# Scopes that autocast enters itself; they are marks, not places in the model.
ISLAND = "jmp_lite_full_precision"
REWRITTEN = "jmp_lite_autocast"
MARKS = (ISLAND, REWRITTEN)
# The scope that JAX enters for what `jax.checkpoint` computes again.
REMATTED = "rematted_computation"

_WRAPPED = re.compile(r"\w+\(([^()]*)\)")


@functools.lru_cache(maxsize=4096)
def clean(name_stack: str) -> str:
    """Return a name stack as a path, without the wrappers of transformations.

    Examples:
      >>> clean("transpose(jvp(decoder))/layer_3/jvp()")
      'decoder/layer_3'
      >>> clean("transpose(jvp(decoder))/jvp(decoder)/rematted_computation/layer_3")
      'decoder/layer_3'
    """
    # In the derivative of a checkpoint, scopes are noted again from the outermost on.
    outer, _, inner = name_stack.rpartition("/jvp(")
    again = clean(f"jvp({inner}") if outer else ""
    if again and f"{again}/".startswith(f"{clean(outer)}/"):
        return again
    unwrapped = None
    while unwrapped != name_stack:
        unwrapped, name_stack = name_stack, _WRAPPED.sub(r"\1", name_stack)
    return "/".join(p for p in name_stack.split("/") if p and p != REMATTED)


def join(outer: str, inner: str) -> str:
    """Return the path of a scope within a scope."""
    inner = clean(inner)
    return f"{outer}/{inner}" if outer and inner else outer or inner


@dataclasses.dataclass(frozen=True)
class Region:
    """How equations of one path are treated.

    Attributes:
      is_low: whether they may be lowered.
      f32_results: whether their matrix products give f32.
      reason: why they are not lowered.
    """

    is_low: bool = True
    f32_results: bool = False
    reason: str = ""


class Regions:
    """The regions of a policy, and the paths that were asked for."""

    def __init__(self, policy: Policy | PolicyMap):
        self.policy = policy
        self.paths: set[str] = set()
        self._regions: dict[str, Region] = {}

    def key(self, scope: str) -> str:
        """Return what of a scope matters for what is inside it."""
        return scope if isinstance(self.policy, PolicyMap) else ""

    def at(self, scope: str, name_stack: str) -> Region:
        """Return the region of an equation."""
        path = join(scope, name_stack)
        if path not in self._regions:
            self._regions[path] = self._make(path)
        return self._regions[path]

    def check_unused(self, name: str) -> None:
        """Raise if a pattern of the policy matches no path that was asked for.

        Args:
          name: the name of the function whose paths they are.
        """
        check_unused(self.policy, self.paths, name)

    def _make(self, path: str) -> Region:
        parts = path.split("/")
        if ISLAND in parts:
            return Region(is_low=False, reason="full_precision")
        if REWRITTEN in parts:
            return Region(is_low=False, reason="in an autocast of its own")
        if not isinstance(self.policy, PolicyMap):
            return Region()
        policy = self._rule_of(parts)
        if policy is None:
            return _region_of(self.policy.default, f32_results=False)
        f32_results = policy.output_dtype == jnp.float32
        return _region_of(policy, f32_results=f32_results)

    def _rule_of(self, parts: list[str]) -> Policy | None:
        """Return the policy of the first pattern that matches the path or one above."""
        ancestors = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        self.paths.update(ancestors)
        for pattern, policy in self.policy.rules:  # pyright: ignore[reportAttributeAccessIssue] - a PolicyMap
            if any(re.fullmatch(pattern, path) for path in ancestors):
                return policy
        return None


def check_unused(policy: Policy | PolicyMap, paths: Iterable[str], name: str) -> None:
    """Raise if a pattern matches none of the scopes of a function.

    Raises:
      ValueError: as said, with the nearest, or that there is none.
    """
    if isinstance(policy, PolicyMap):
        none = (
            f"{name} has no name scope: enter one around what is meant with "
            "jax.named_scope; modules of flax.linen enter one each."
        )
        policy.check_unused(sorted(paths), none)


def _region_of(policy: Any, f32_results: bool) -> Region:
    if policy.compute_dtype == jnp.float32:
        return Region(is_low=False, reason="its policy computes in float32")
    return Region(f32_results=f32_results)
