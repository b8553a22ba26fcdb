"""Policies for the modules of a linen model, without a change to its source.

Limits:

- A module gets its dtypes from outside: by its field `dtype`, or by casts of its
  parameters and inputs. Operations inside it follow from these. The softmax of flax's
  attention is float32; a softmax that a model computes itself has the dtype of its
  logits. Give that module a policy, or use `autocast`, which works by operation.
- `init` runs the model without policies. Then parameters and the caches of flax's
  attention are cast.
- Modules of one class and shape under flax's `nn.jit` share the first trace, and with
  it the policy.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

from jmp_lite._src import trees
from jmp_lite._src.autocast.transform import sums_in_float32
from jmp_lite._src.flax import module_policies, products
from jmp_lite._src.flax.linen.interceptor import PolicyInterceptor
from jmp_lite._src.flax.module_policies import Explanation, ModulePolicies
from jmp_lite._src.jaxprs.tracing import trace
from jmp_lite._src.policy import Policy, PolicyMap
from jmp_lite._src.trees import PyTree


def with_policy(
    module: "nn.Module | PolicyModule",
    policy: Policy | PolicyMap | str,
    classes: Mapping[type[nn.Module], Policy | str] | None = None,
) -> "PolicyModule":
    """Return a model that runs under a policy, or one policy per path and class.

    - A layer of flax computes in the compute dtype of its policy, as its field `dtype`
      does. Statistics of norms and the softmax of attention are float32; scales and
      biases of norms stay in their param dtype.
    - If the policy has fp8, the large products of layers that take a `dot_general`
      (`Dense`, `DenseGeneral`, and those made of them) have fp8 operands; all others
      stay in the compute dtype.
    - Any other module with parameters gets these, and its floating inputs, in the
      compute dtype.
    - A module that a rule matches gets its floating inputs in the compute dtype, and
      returns its outputs in the output dtype of the rule. The outputs of the model have
      the output dtype of the default.
    - A module without parameters and without a rule is left alone.

    A model that `with_policy` returned gets the policy in place of the one it has.

    The default policy does not override a `dtype` that the author of the model set on a
    module. A rule does, in the module that it matches and in all modules inside.

    Args:
      module: an unbound linen module, or what `with_policy` returned.
      policy: one policy for all modules; or a `PolicyMap`, whose patterns are over
        module paths (`"decoder/layer_0/attention"`, `""` for the model itself) and
        apply to everything inside.
      classes: module class (or base class) to policy, for everything inside as well. Of
        a pattern and a class, the one that names the inner module decides, and the
        pattern if both name it.

    Returns:
      An object with the `init`, `apply` and `lazy_init` of the module.

    Raises:
      TypeError: `module` is not a linen module, or is bound.
      ValueError: an unknown policy; in a call: a pattern or class matches no module.

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
    if isinstance(module, PolicyModule):
        module = module.module
    if not isinstance(module, nn.Module):
        raise module_policies.not_a_module("a linen", module)
    if module.scope is not None:
        raise TypeError(
            f"Expected an unbound module, got a bound {type(module).__name__}: call "
            "with_policy on the outermost module, outside of init and apply."
        )
    return PolicyModule(module, ModulePolicies(policy, classes))


@dataclasses.dataclass(frozen=True)
class PolicyModule:
    """A linen module and its policies, as `with_policy` returns it.

    Attributes:
      module: the module, unchanged.
      policies: the rules that give each module its policy.
    """

    module: nn.Module
    policies: ModulePolicies

    def init(self, rngs: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return `module.init(...)`, each parameter in the param dtype of its policy.

        Raises:
          ValueError: a pattern or class of the policies matches no module.
        """
        return self._init(self.module.init, rngs, *args, **kwargs)

    def lazy_init(self, rngs: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return `module.lazy_init(...)`, which takes shapes instead of inputs."""
        return self._init(self.module.lazy_init, rngs, *args, **kwargs)

    def apply(self, variables: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return `module.apply(...)`, run under the policies.

        Gradients for parameters have the dtype of the parameters, and are summed in
        float32 where the model broadcasts, gathers or repeats half values. Warns if the
        compute dtype of the default policy is half, but no matrix product runs in it
        because the author of the model set a `dtype` on its modules; if the policy has
        fp8, but no matrix product is in it; and if fp8 is slow on this device.

        Raises:
          ValueError: a pattern or class of the policies matches no module.
        """
        run = PolicyInterceptor(self.policies)
        kwargs["method"] = run.flagged(kwargs.get("method"))
        run.collect(lambda: self.module.apply(variables, *args, **kwargs))

        def call(variables, args, kwargs):
            cast = run.cast(variables)
            out = run(self.module.apply, cast, *args, **kwargs)
            if not kwargs.get("mutable"):
                return out
            out, updated = out
            return out, _with_dtypes_of(variables, cast, updated)

        def traced():
            return trace(lambda v: call(v, args, kwargs), (variables,)).closed

        products.warn(type(self.module).__name__, run.resolved, traced)
        reduce_dtype = self.policies.reduce_dtype
        return sums_in_float32(call, reduce_dtype)(variables, args, kwargs)

    def explain(self, variables: PyTree, *args: Any, **kwargs: Any) -> Explanation:
        """Return the dtypes of each module under the policies, in the order of calls.

        Arguments are as for `apply`; variables may be shapes (`jax.eval_shape`). There
        is one row per module; `print` shows them.

        Raises:
          ValueError: a pattern or class of the policies matches no module.
        """
        run = PolicyInterceptor(self.policies, always_trace=True)
        kwargs["method"] = run.flagged(kwargs.get("method"))
        apply = self.module.apply
        run.collect(lambda v: apply(v, *args, **kwargs), variables)
        trace(lambda v: run(apply, run.cast(v), *args, **kwargs), (variables,))
        return run.explain(variables)

    def _init(self, init: Callable[..., Any], *args: Any, **kwargs: Any) -> PyTree:
        run = PolicyInterceptor(self.policies)
        method = run.flagged(kwargs.get("method"))
        run.collect(lambda: init(*args, **{**kwargs, "method": method}))
        with self.policies.in_float32():
            variables = init(*args, **kwargs)
        return run.cast(variables, role="param_dtype")


def _with_dtypes_of(given: PyTree, cast: PyTree, updated: PyTree) -> PyTree:
    """Return updated variables, in the dtypes they had before they were cast."""
    given, cast = map(dict, map(jax.tree.leaves_with_path, (given, cast)))

    def restore(path, leaf):
        if path not in given:
            return leaf
        # A variable that the model did not change keeps its bits, not rounded ones.
        unchanged = leaf is cast[path]
        return given[path] if unchanged else trees.cast_like(leaf, given[path])

    return jax.tree.map_with_path(restore, updated)
