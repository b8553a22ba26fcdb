"""Regions: whether the operations in a name scope may be lowered, by the policy."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jmp_lite._src.jaxprs.name_scopes import AUTOCAST, FULL_PRECISION, join
from jmp_lite._src.policy import Policy, PolicyMap, paths_around


@dataclasses.dataclass(frozen=True)
class Region:
    """How equations of one path are treated.

    Attributes:
      is_low: whether they may be lowered.
      is_closed: whether what they hold (the body of a loop) may not be lowered either.
      half_results: whether the results of their matrix products are half wherever they
        are used, or never; None if the uses of each decide, as `OpRules` says.
      fp8: whether large matrix products have fp8 operands.
      reduces_in_float32: whether gradients of parameters are accumulators of products.
      reason: why they are not lowered.
    """

    is_low: bool = True
    is_closed: bool = False
    half_results: bool | None = None
    fp8: bool = False
    reduces_in_float32: bool = False
    reason: str = ""


class Regions:
    """The regions of a policy, and the paths that were asked for.

    Attributes:
      policy: the policy.
      any_fp8: whether it has matrix products in fp8 in some region.
      keeps_inputs: whether products of some region read inputs in float32.
      paths: the paths.
    """

    def __init__(self, policy: Policy | PolicyMap):
        self.policy = policy
        self.paths: set[str] = set()
        self._regions: dict[str, Region] = {}
        policies = policies_of(policy)
        self.any_fp8 = any(map(_has_fp8, policies))
        self.keeps_inputs = self.any_fp8 or any(
            p.reduce_dtype is not None for p in policies
        )

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
        if FULL_PRECISION in parts:
            return Region(is_low=False, is_closed=True, reason="full_precision")
        if AUTOCAST in parts:
            reason = "in an autocast of its own"
            return Region(is_low=False, is_closed=True, reason=reason)
        if not isinstance(self.policy, PolicyMap):
            return _region_of(self.policy)
        self.paths.update(paths_around(path))
        policy = self.policy.rule_for(path)
        if policy is None:
            return _region_of(self.policy.default)
        results = {jnp.float32: False, policy.compute_dtype: True}
        return _region_of(policy, results.get(policy.output_dtype))


def policies_of(policy: Policy | PolicyMap) -> list[Policy]:
    """Return the policies of a map, or the one policy."""
    if not isinstance(policy, PolicyMap):
        return [policy]
    return [policy.default, *(of_rule for _, of_rule in policy.rules)]


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


def _region_of(policy: Any, half_results: bool | None = None) -> Region:
    if policy.compute_dtype == jnp.float32:
        return Region(is_low=False, reason="its policy computes in float32")
    return Region(
        half_results=half_results,
        fp8=_has_fp8(policy),
        reduces_in_float32=policy.reduce_dtype == jnp.float32,
    )


def _has_fp8(policy: Policy) -> bool:
    return policy.matmul_dtype == "fp8"
