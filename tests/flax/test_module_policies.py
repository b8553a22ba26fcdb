"""Which policy a module has: by path, else by class, else by the enclosing module."""

import warnings

import jax.numpy as jnp
import pytest

from jmp_lite import PolicyMap
from jmp_lite._src.flax.module_policies import ModulePolicies


class _Layer: ...


class _Dense(_Layer): ...


class _Norm(_Layer): ...


MODULES = {
    "": object,
    "encoder": object,
    "encoder/dense": _Dense,
    "encoder/norm": _Norm,
    "encoder/deep/er/dense": _Dense,  # not every part of a path is a module
    "head": _Dense,
}
F16, BF16, F32 = "float16", "bfloat16", "float32"

# The default, rules for paths and for classes; the compute dtypes of `MODULES`.
PRECEDENCE = {
    "a rule holds for all modules inside": (
        ("mixed_bfloat16", {"encoder": "full"}, {}),
        [BF16, F32, F32, F32, F32, BF16],
    ),
    "an inner rule may come before an outer one": (
        ("mixed_bfloat16", {"encoder/dense": "half", "encoder": "full"}, {}),
        [BF16, F32, F16, F32, F32, BF16],
    ),
    "a pattern must match the whole path": (
        ("full", {".*/dense": "half"}, {}),
        [F32, F32, F16, F32, F16, F32],
    ),
    "the first pattern that applies decides": (
        ("full", {"encoder/dense": F32, "encoder/.*": BF16, ".*": "half"}, {}),
        [F16, BF16, F32, BF16, BF16, F16],
    ),
    "a class inside comes before a pattern, however that is spelled": (
        ("full", {"encoder/.*": BF16}, {_Dense: "half"}),
        [F32, BF16, F16, BF16, F16, F16],
    ),
    "a pattern inside comes before a class": (
        ("full", {"encoder/dense": BF16}, {object: "half"}),
        [F16, F16, BF16, F16, F16, F16],
    ),
    "a path comes before a class, a class before the enclosing module": (
        ("full", {"encoder": BF16, "head": F32}, {_Dense: "half"}),
        [F32, BF16, F16, BF16, F16, F32],
    ),
    "a class stands for its subclasses, and the first one decides": (
        ("full", {}, {_Layer: "half", _Norm: BF16}),
        [F32, F32, F16, F16, F16, F16],
    ),
}


@pytest.mark.parametrize("case", PRECEDENCE)
def test_which_rule_a_module_has(case):
    (default, rules, classes), expected = PRECEDENCE[case]
    found = ModulePolicies(PolicyMap(default, rules), classes).resolve(MODULES, {})
    computes = [jnp.dtype(of.policy.compute_dtype).name for of in found.values()]
    assert computes == expected


def test_a_policy_of_which_no_pattern_is_a_path_warns():
    """As of `numerics.advise`, whose names are autocast's scopes."""
    policy = PolicyMap("mixed_float16", {"Model/encoder": "full"}, allow_unused=True)
    with pytest.warns(UserWarning, match="rules do nothing.*'Model/encoder'"):
        ModulePolicies(policy).resolve(MODULES, {})
    some = PolicyMap("full", {"encoder": "full", "no/such": "full"}, allow_unused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModulePolicies(some).resolve(MODULES, {})


def test_a_rule_starts_at_a_module_that_it_matches_if_the_enclosing_one_has_another():
    inner = {"encoder/dense": F32, "encoder.*": BF16}
    deep = "encoder/deep/er/dense"
    for policy, classes, expected in [
        (PolicyMap(BF16, {"encoder": "full"}), {}, ["encoder"]),
        (
            PolicyMap("full", inner),
            {_Dense: "half"},
            ["encoder", "encoder/dense", deep, "head"],
        ),
        (PolicyMap("full"), {object: "half"}, [""]),
    ]:
        found = ModulePolicies(policy, classes).resolve(MODULES, {})
        assert [path for path, of in found.items() if of.is_rule_start] == expected
    assert all(of.is_named for of in found.values())
