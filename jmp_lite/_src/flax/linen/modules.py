"""Policies for the modules of a linen model, without a change to its source.

A module gets its dtypes from outside: by its field `dtype`, or by casts of its
parameters and inputs. Operations inside it follow from these. `init` runs the model
without policies. Then parameters and the caches of flax's attention are cast.
"""

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import FrozenDict
from flax.linen.dtypes import promote_dtype
from jax import lax
from jax.typing import DTypeLike

from jmp_lite._src import dtypes, fp8, trees
from jmp_lite._src.autocast.transform import sums_in_float32
from jmp_lite._src.flax import attention, module_policies, products
from jmp_lite._src.flax.module_policies import Explanation, ModulePolicies, ModulePolicy
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
        """Return `module.init(...)`, parameters in the param dtype of their policy."""
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
        run = _Run(self.policies)
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
        call = sums_in_float32(call, self.policies.reduce_dtype)
        return call(variables, args, kwargs)

    def explain(self, variables: PyTree, *args: Any, **kwargs: Any) -> Explanation:
        """Return the dtypes of each module under the policies, in the order of calls.

        Arguments are as for `apply`; variables may be shapes (`jax.eval_shape`). There
        is one row per module; `print` shows them.
        """
        run = _Run(self.policies, always_trace=True)
        kwargs["method"] = run.flagged(kwargs.get("method"))
        apply = self.module.apply
        run.collect(lambda v: apply(v, *args, **kwargs), variables)
        trace(lambda v: run(apply, run.cast(v), *args, **kwargs), (variables,))
        in_fp8 = [path for path in run.large if run.resolved[path].is_fp8]
        params = variables.get("params", {})
        return module_policies.explain(
            run.modules, run.resolved, params, run.outputs, in_fp8
        )

    def _init(self, init: Callable[..., Any], *args: Any, **kwargs: Any) -> PyTree:
        run = _Run(self.policies)
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
        return given[path] if leaf is cast[path] else trees.cast_like(leaf, given[path])

    return jax.tree.map_with_path(restore, updated)


class _Run:
    """One run of a model under policies.

    1. `collect` runs the model abstractly, to find its modules and their policies.
    2. `cast` casts the variables.
    3. `__call__` runs the model on them, and sets the dtypes of each module.
    """

    def __init__(self, policies: ModulePolicies, always_trace: bool = False):
        self.policies = policies
        # By the path of each module that was called: its class, its policy, the dtypes
        # of its outputs, each once.
        self.modules: dict[str, type] = {}
        self.resolved: dict[str, ModulePolicy] = {}
        self.outputs: dict[str, dict[str, None]] = {}
        self._run_flag = uuid.uuid4().hex if always_trace else hash(policies)
        self._flag: str | int = ""  # that of the run in progress
        self._own_dtypes: dict[str, DTypeLike | None] = {}
        # Modules whose parameters `cast` has cast.
        self._cast_owners: set[str] = set()
        # Layers whose parameters a WeightNorm or SpectralNorm around them replaces.
        self._normalised: set[str] = set()
        # Layers that can multiply in fp8, and those with a product that can.
        self._take_fp8: set[str] = set()
        self.large: set[str] = set()
        self._active: list[str] = []

    def collect(self, fun: Callable[..., PyTree], *args: PyTree) -> None:
        def record(next_fun, args, kwargs, context):
            module = context.module
            path, fields = self._record(module), {}
            if isinstance(module, _ATTENTION):
                cached = module.get_variable("cache", "cached_key")
                if cached is not None:  # to which it can write in this dtype alone
                    fields["dtype"] = cached.dtype
            # A scope that is shared belongs to the outer module: so do the parameters.
            is_owner = type(module) is self.modules[path]
            if is_owner and _takes_fp8(module):
                fields["dot_general"] = self._dot_general_of(path)
            with _set_fields(module, fields):
                out = next_fun(*args, **kwargs)
            if isinstance(module, _WEIGHT_NORMS):
                self._normalised.add("/".join(module.layer_instance.path))
            return out

        self._flag = uuid.uuid4().hex
        # Nothing is cast yet: half-precision parameters or inputs may meet float32.
        promotion = jax.numpy_dtype_promotion("standard")
        with nn.intercept_methods(record), promotion, self.policies.in_float32():
            trace(fun, args)
        self.resolved = self.policies.resolve(self.modules, self._own_dtypes)

    def cast(self, variables: PyTree, role: str = "compute_dtype") -> PyTree:
        """Cast parameters by the policies of modules, and the caches of attention."""

        def cast_cache(path, leaf):
            owner = module_policies.enclosing_module(trees.key_path(path), self.modules)
            if owner is None or not issubclass(self.modules[owner], _ATTENTION):
                return leaf
            return trees.cast_floating(leaf, self.resolved[owner].compute_dtype)

        new = dict(variables)
        if params := new.get("params"):
            owners = {*module_policies.params_by_module(params, self.modules)}
            if role == "compute_dtype":
                owners = {path for path in owners if not self._casts_its_params(path)}
                self._cast_owners = owners
            cast = module_policies.cast_params(params, self.resolved, role, owners)
            new["params"] = cast
        if "cache" in new:
            new["cache"] = jax.tree.map_with_path(cast_cache, new["cache"])
        return new

    def __call__(self, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> PyTree:
        self._flag = self._run_flag
        with nn.intercept_methods(self._intercept):
            return fun(*args, **kwargs)

    def flagged(self, method: Any = None) -> Any:
        """Return a method of a model that flags the model's scope with the run.

        flax's `nn.jit` reuses a trace of a module if shapes and flags are equal. The
        flag keeps it from reusing one that was made under other policies.
        """
        name = "__call__" if method is None else method
        if not isinstance(name, str) and not callable(name):
            return method  # for which flax raises an error

        def call(module, *args, **kwargs):
            scope = module.scope
            scope.flags = FrozenDict({**scope.flags, "policies": self._flag})
            if isinstance(name, str):
                return getattr(module, name)(*args, **kwargs)
            return getattr(name, "__func__", name)(module, *args, **kwargs)

        return call

    def _dot_general_of(self, path: str) -> Callable[..., jax.Array]:
        """Return a `lax.dot_general` that notes whether a product can be in fp8."""
        self._take_fp8.add(path)

        def dot_general(lhs, rhs, dimension_numbers, precision=None, **options):
            avals = jax.typeof(lhs), jax.typeof(rhs)
            if not fp8.why_not(*avals, dimension_numbers, precision):
                self.large.add(path)
            return lax.dot_general(lhs, rhs, dimension_numbers, precision, **options)

        return dot_general

    def _record(self, module: nn.Module) -> str:
        path = "/".join(module.path)
        if path not in self.modules:
            self.modules[path] = type(module)
            self._own_dtypes[path] = module_policies.own_dtype(module)
        return path

    def _casts_its_params(self, path: str) -> bool:
        """Return whether a module itself casts its parameters, where it needs to."""
        is_norm = issubclass(self.modules[path], _NORMS + _WEIGHT_NORMS)
        if self.resolved[path].kept_dtype is not None or is_norm:
            return True
        if self.resolved[path].is_fp8 and path in self._take_fp8:
            return True  # by `_keep_kernel`
        return any(f"{path}/".startswith(f"{outer}/") for outer in self._normalised)

    def _intercept(self, next_fun, args, kwargs, context):
        module = context.module
        path = self._record(module)
        if path not in self.resolved:  # nn.jit did not call it in the abstract run
            self.resolved = self.policies.resolve(self.modules, self._own_dtypes)
        # A method that the module itself calls is part of the call in progress.
        if path in self._active:
            return _keep_carry_dtypes(module, args, next_fun(*args, **kwargs))
        given, resolved = args, self.resolved[path]
        policy, is_rule_start = resolved.policy, resolved.is_rule_start
        fields = {}
        if resolved.kept_dtype is None:
            is_layer = _is_flax_layer(type(module))
            # A property cannot be set.
            has_field = "dtype" in getattr(type(module), "__dataclass_fields__", ())
            if is_layer or (resolved.own_dtype is not None and has_field):
                fields["dtype"] = policy.compute_dtype
            if not is_layer and (is_rule_start or path in self._cast_owners):
                args, kwargs = policy.cast_to_compute((args, kwargs))
        if resolved.is_fp8 and _takes_fp8(module):
            fields["dot_general"] = fp8.large_dot_general
            fields["promote_dtype"] = _keep_kernel
        in_float32 = attention.softmax_in_float32(getattr(module, "attention_fn", None))
        if in_float32 is not None:
            fields["attention_fn"] = in_float32
        self._active.append(path)
        try:
            with _set_fields(module, fields):
                out = next_fun(*args, **kwargs)
        finally:
            self._active.pop()
        if is_rule_start or not path:
            out = policy.cast_to_output(out)
        out = _keep_carry_dtypes(module, given, out)
        made = filter(trees.is_castable, jax.tree.leaves(out))
        names = (dtypes.dtype_name(leaf.dtype) for leaf in made)
        self.outputs.setdefault(path, {}).update(dict.fromkeys(names))
        return out


# Their statistics, scales and biases stay float32: only their output is cast, by the
# `dtype` of the layer.
_NORMS = (nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm)

# The same holds for the weights that they compute.
_WEIGHT_NORMS = (nn.WeightNorm, nn.SpectralNorm)

_ATTENTION = nn.MultiHeadDotProductAttention


def _is_flax_layer(cls: type) -> bool:
    """Return whether this is a layer of flax, which casts to its field `dtype`."""
    return any(
        base.__module__.startswith("flax.linen.")
        and "dtype" in getattr(base, "__dataclass_fields__", ())
        for base in cls.__mro__
    )


def _takes_fp8(module: nn.Module) -> bool:
    """Return whether a layer multiplies by a `dot_general` that its author left."""
    return (
        _is_flax_layer(type(module))
        and getattr(module, "dot_general", ...) is None
        and getattr(module, "dot_general_cls", None) is None
        and getattr(module, "promote_dtype", None) is promote_dtype
    )


def _keep_kernel(inputs, kernel, bias, *, dtype):
    """Cast all but the kernel, so that its gradient is the accumulator of a product."""
    inputs, bias = promote_dtype(inputs, bias, dtype=dtype)
    return inputs, kernel, bias


def _keep_carry_dtypes(module: nn.Module, given: tuple[Any, ...], out: Any) -> PyTree:
    """Return the output of a recurrent cell, its carry in the dtypes of the input."""
    is_step = isinstance(module, nn.RNNCellBase) and given and isinstance(out, tuple)
    if not is_step or jax.tree.structure(out[0]) != jax.tree.structure(given[0]):
        return out
    return trees.cast_like(out[0], given[0]), *out[1:]


@contextlib.contextmanager
def _set_fields(module: nn.Module, fields: Mapping[str, Any]) -> Iterator[None]:
    # A copy would be a second module in the same scope. Setting them here changes
    # nothing that a user holds: flax made this module for this run.
    old = {name: getattr(module, name) for name in fields}
    for name, value in fields.items():
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            object.__setattr__(module, name, value)
