"""Policies over the modules of a linen model, its source untouched.

Limits: modules are told their dtypes from outside, by their `dtype` or by what they are
handed. flax's attention is told to take its softmax in float32; one that a model writes
itself has the dtype of its logits: give that module a policy, or use `autocast`, which
sees into it. `init` runs the model as written: of what it makes, only parameters and
the caches of flax's attention are cast. Modules of one class and shape under flax's
`nn.jit` share what is traced first, and with it the policy.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

from jmp_lite._src import trees
from jmp_lite._src.autocast.transform import sums_in_float32
from jmp_lite._src.flax.linen.run import Run, ignore
from jmp_lite._src.flax.module_policies import (
    Explanation,
    ModulePolicies,
    nothing_in_half,
)
from jmp_lite._src.policy import Policy, PolicyMap


def with_policy(
    module: nn.Module,
    policy: Policy | PolicyMap | str,
    classes: Mapping[type[nn.Module], Policy | str] | None = None,
) -> "PolicyModule":
    """Return a model that runs under a policy, or one policy per path and class.

    flax's layers compute in the compute dtype of their policy (their `dtype`); another
    module gets its parameters, if it has any, and then its floating inputs in it. One
    where a rule begins to hold gets its inputs in that dtype anyway, and gives its
    outputs in the output dtype of the rule; the model's own outputs have that of the
    default. What has no parameters, and no rule, works on what it is handed.
    Statistics, scales and biases of flax's norms are float32, and so is the softmax of
    flax's attention.

    The default policy leaves a `dtype` that the author of the model set on a module. A
    rule outweighs it, in the module that it names and in those inside.

    Args:
      module: an unbound linen module.
      policy: the policy of all of it; or a `PolicyMap`, whose patterns match whole
        module paths (`"decoder/layer_0/attention"`). A policy holds for all that is
        inside the module, unless another rule does; `""` is the model itself.
      classes: module class (or base class) to policy. Paths come first.

    Returns:
      An object with the `init`, `apply` and `lazy_init` of the module.

    Raises:
      TypeError: `module` is not a linen module, or is bound.
      ValueError: an unknown policy; in a call: a pattern or class names no module.

    Examples:
      >>> import jax.numpy as jnp
      >>> model, x = with_policy(nn.Dense(4), "mixed_bfloat16"), jnp.ones((2, 3))
      >>> variables = model.init(jax.random.key(0), x)
      >>> variables["params"]["kernel"].dtype, model.apply(variables, x).dtype
      (dtype('float32'), dtype('float32'))
      >>> model.explain(variables, x)[""].compute
      'bf16'

    References:
      Haiku's `mixed_precision.set_policy`; Keras' `dtype` of a layer; TensorFlow 1's
      variable getters.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected a linen module, got {module!r}.")
    if module.scope is not None:
        raise TypeError(
            f"Expected an unbound module, got a bound {type(module).__name__}: call "
            "with_policy on the outermost module, outside of init and apply."
        )
    return PolicyModule(module, ModulePolicies(policy, classes or ()))


@dataclasses.dataclass(frozen=True)
class PolicyModule:
    """A linen module and its policies; made by `with_policy`.

    Attributes:
      module: the module as it was.
      policies: which policy each module in it has.
    """

    module: nn.Module
    policies: ModulePolicies

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `module.init(...)`, each parameter in the param dtype of its policy.

        Raises:
          ValueError: a pattern or class of the policies names no module.
        """
        return self._init(self.module.init, rngs, *args, **kwargs)

    def lazy_init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `module.lazy_init(...)`: from shapes instead of inputs."""
        return self._init(self.module.lazy_init, rngs, *args, **kwargs)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `module.apply(...)`, run under the policies.

        Gradients for parameters have the dtype of the parameters, and are summed in
        float32 where the model broadcasts, gathers or repeats half values. Warns where
        the default policy is to be in half, and no matrix product is, since the author
        of the model set a `dtype` on its modules.

        Raises:
          ValueError: a pattern or class of the policies names no module.
        """
        run = Run(self.policies)
        run.collect(lambda: self.module.apply(variables, *args, **kwargs))
        cast = run.cast(variables)
        missed = run.missed_products(
            lambda variables: self.module.apply(variables, *args, **kwargs), cast
        )
        if missed:
            text = nothing_in_half(
                f"the {missed} matrix products of {type(self.module).__name__}",
                run.kept_from_half,
                self.policies.policy.default,
                "`model.clone(dtype=None)`, or in its config",
            )
            warnings.warn(text, stacklevel=2)

        def call(variables, args, kwargs):
            cast = run.cast(variables)
            out = run(self.module.apply, cast, *args, **kwargs)
            if not kwargs.get("mutable"):
                return out
            out, updated = out
            return out, _with_dtypes_of(variables, cast, updated)

        return sums_in_float32(call)(variables, args, kwargs)

    def explain(self, variables: Any, *args: Any, **kwargs: Any) -> Explanation:
        """List what each module does under the policies, in the order of the calls.

        Args:
          variables: as for `apply`; shapes (`jax.eval_shape`) will do.
          *args: as for `apply`.
          **kwargs: as for `apply`.

        Returns:
          The dtypes of each module; `.table()` is for people.

        Raises:
          ValueError: a pattern or class of the policies names no module.
        """
        run = Run(self.policies, is_watched=True)
        run.collect(lambda v: self.module.apply(v, *args, **kwargs), variables)
        cast = jax.eval_shape(run.cast, variables)
        jax.eval_shape(
            lambda v: ignore(run(self.module.apply, v, *args, **kwargs)), cast
        )
        return Explanation(tuple(run.rows(variables)))

    def _init(self, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = Run(self.policies)
        run.collect(lambda: init(*args, **kwargs))
        return run.cast(init(*args, **kwargs), role="param_dtype")


def _with_dtypes_of(given: Any, cast: Any, updated: Any) -> Any:
    """Return updated variables, those that were cast with the dtypes they had."""
    given, cast = (
        {path: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (given, cast)
    )

    def restore(path, leaf):
        if path not in given:
            return leaf
        # What the model left alone comes back bit for bit, not rounded.
        unchanged = leaf is cast[path]
        return given[path] if unchanged else trees.cast_like(leaf, given[path])

    return jax.tree_util.tree_map_with_path(restore, updated)
