"""Policies for the modules of an nnx model, without a change to its source."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax
from jax.typing import DTypeLike

from jmp_lite._src import dtypes, fp8, trees
from jmp_lite._src.autocast.transform import NEEDS_VALUES, sums_in_float32
from jmp_lite._src.flax import attention, module_policies, products
from jmp_lite._src.flax.module_policies import Explanation, ModulePolicies, ModulePolicy
from jmp_lite._src.jaxprs.tracing import trace
from jmp_lite._src.policy import Policy, PolicyMap
from jmp_lite._src.trees import PyTree


def with_policy(
    model: nnx.Module,
    policy: Policy | PolicyMap | str,
    classes: Mapping[type[nnx.Module], Policy | str] | None = None,
) -> "PolicyModule":
    """Return a copy of a model that runs under a policy, or one per path and class.

    - Parameters are stored in the param dtype of their module's policy.
    - A layer of flax computes in the compute dtype of its policy, as its attribute
      `dtype` does. Statistics of norms and the softmax of attention are float32; scales
      and biases of norms stay in their param dtype.
    - If the policy has fp8, the large products of `Linear` and `LinearGeneral` have fp8
      operands; all others stay in the compute dtype.
    - Any other module gets its parameters in the compute dtype.
    - The outputs of the model have the output dtype of the default.

    A model that `with_policy` returned gets the policy in place of the one it has. So
    do its layers in another model.

    The default policy does not override a `dtype` that the author of the model set on a
    module. A rule does, in the module that it matches and in all modules inside.

    Args:
      model: an nnx module; it is not changed.
      policy: one policy for all modules; or a `PolicyMap`, whose patterns are over
        module paths (`"layers/0/attention"`, `""` for the model itself) and apply to
        everything inside. The output dtype of a rule is used only if the rule names the
        model itself.
      classes: module class (or base class) to policy, for everything inside as well. Of
        a pattern and a class, the one that names the inner module decides, and the
        pattern if both name it.

    Returns:
      An nnx module that is called like `model`, and holds the copy as `.model`.

    Raises:
      TypeError: `model` is not an nnx module.
      ValueError: an unknown policy; a pattern or class matches no module.

    Examples:
      >>> import jax.numpy as jnp
      >>> linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> model = with_policy(linear, "p=f32,c=bf16,o=f32")
      >>> model(jnp.ones((2, 3))).dtype, model.model(jnp.ones((2, 3))).dtype
      (dtype('float32'), dtype(bfloat16))
      >>> model.explain()[""].compute
      'bf16'
    """
    if not isinstance(model, nnx.Module):
        raise module_policies.not_a_module("an nnx", model)
    policies = ModulePolicies(policy, classes)
    model = nnx.clone(model.model if isinstance(model, PolicyModule) else model)
    modules = _modules(model)
    for module in modules.values():
        _take_policy_off(module)
    resolved = _resolve(policies, modules)
    params = nnx.state(model, nnx.Param)
    cast = module_policies.cast_params(params, resolved, "param_dtype", resolved)
    nnx.update(model, cast)
    for path, module in modules.items():
        _set_dtypes(module, resolved[path])
    return PolicyModule(model, policies)


class PolicyModule(nnx.Module):
    """An nnx module under policies, as `with_policy` returns it.

    It can be called; use `.model` for other methods and attributes of the model.

    Attributes:
      model: the module, with the dtypes of its layers set. What a call changes, sets or
        removes in it stays so.
      policies: the rules that give each module its policy.
    """

    def __init__(self, model: Any, policies: ModulePolicies) -> None:
        self.model = model
        self.policies = policies

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return the output of the model, in the output dtype of the default policy.

        Warns if the compute dtype of the default policy is half, but no matrix product
        runs in it because the author of the model set a `dtype` on its modules; if the
        policy has fp8, but no matrix product is in it; and if fp8 is slow on this
        device. Raises ValueError if the call makes a module that has variables.
        """
        modules = _modules(self.model)
        resolved = _resolve(self.policies, modules)
        params = nnx.state(self.model, nnx.Param)
        owners = module_policies.params_by_module(params, modules)
        cast_owners = {path for path in owners if not _has_dtype(modules[path])}
        # A copy is called, with parameters and inputs cast; then its changes of state
        # are copied back. Arguments such as random streams change too, and may be
        # shared with the model.
        called = self.model, args, kwargs
        graphdef, params, other_state = nnx.split(called, nnx.Param, ...)

        def call(params, other_state):
            of_model = module_policies.cast_params(
                params.get(0, nnx.State({})), resolved, "compute_dtype", cast_owners
            )
            cast = nnx.State({**params, 0: of_model})
            given = copy, args, kwargs = nnx.merge(graphdef, cast, other_state)
            before = {path: _attributes(m) for path, m in _modules(copy).items()}
            old = {path: jax.tree.leaves(leaf) for path, leaf in _flat_state(given)}
            if "" in cast_owners:
                to_compute = resolved[""].policy.cast_to_compute
                args, kwargs = jax.tree.map(
                    lambda x: x if _is_node(x) else to_compute(x),
                    (args, kwargs),
                    is_leaf=_is_node,
                )
            out = copy(*args, **kwargs)
            # Return only what changed: under a transformation, a variable from outside
            # can be read but not set.
            changed = {
                path: leaf
                for path, leaf in _flat_state(given)
                if path not in old or not _holds(leaf, old[path])
            }
            for path, param in nnx.to_flat_state(params):
                if path[0] == 0 and path in changed:
                    changed[path] = trees.cast_like(changed[path], param)
            return out, nnx.from_flat_state(changed), _changes(copy, before)

        def traced():
            try:
                return trace(call, (params, other_state)).closed
            except NEEDS_VALUES:  # outside of jit, a model may need those of arrays
                return None

        call.__name__ = name = type(self.model).__name__  # for error messages
        products.warn(name, resolved, traced)
        call = sums_in_float32(call, self.policies.reduce_dtype)
        out, changed, changes = call(params, other_state)
        for path, (removed, static) in changes.items():
            for attribute in removed:
                delattr(modules[path], attribute)
            for attribute, value in static.items():
                setattr(modules[path], attribute, value)
        nnx.update(called, changed)
        return resolved[""].policy.cast_to_output(out)

    def explain(self) -> Explanation:
        """Return the dtypes of each module under the policies.

        Output dtypes are known for flax's layers and for the model itself only. `print`
        shows them.
        """
        modules = dict(sorted(_modules(self.model).items()))
        resolved = _resolve(self.policies, modules)
        outputs = {
            path: (dtypes.dtype_name(resolved[path].compute_dtype),)
            for path, module in modules.items()
            if _has_dtype(module)
        }
        outputs[""] = (dtypes.dtype_name(resolved[""].policy.output_dtype),)
        params = nnx.state(self.model, nnx.Param)
        in_fp8 = [path for path, module in modules.items() if _is_in_fp8(module)]
        classes = _classes(modules)
        return module_policies.explain(classes, resolved, params, outputs, in_fp8)


def _is_node(x: object) -> bool:
    """Return whether an argument is a module, a random stream or a variable of nnx."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _flat_state(tree: PyTree) -> Iterable[tuple[PyTree, PyTree]]:
    return nnx.to_flat_state(nnx.state(tree))


def _holds(leaf: PyTree, arrays: list[PyTree]) -> bool:
    return [*map(id, jax.tree.leaves(leaf))] == [*map(id, arrays)]


def _attributes(module: nnx.Module) -> dict[str, Any]:
    """Return the attributes of a module but those in which nnx notes what they are."""
    return {n: x for n, x in vars(module).items() if not n.startswith("_pytree__")}


def _changes(
    model: nnx.Module, before: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Return the attributes of each module that a call removed, and static ones it set.

    A static one in whose place there is a variable now is removed: nnx adds variables.
    """
    changes = {}
    for path, module in _modules(model).items():
        if path in before:
            old, now = before[path], _attributes(module)
            static = {n: x for n, x in now.items() if _is_static(x)}
            lost = old.keys() - now.keys()
            lost |= {n for n in old if _is_static(old[n]) and n not in static}
            new = {n: x for n, x in static.items() if n not in old or x is not old[n]}
            changes[path] = [*lost], new
        elif jax.tree.leaves(nnx.state(module)):
            raise ValueError(
                f"A call of {type(model).__name__} has made the module {path!r}, which "
                "has no policy: make it in __init__, or call the model before "
                "with_policy."
            )
    return changes


def _is_static(x: object) -> bool:
    leaves = jax.tree.leaves(x, is_leaf=_is_node)
    return not any(_is_node(leaf) or trees.is_array(leaf) for leaf in leaves)


def _modules(model: nnx.Module) -> dict[str, Any]:
    """Return the modules of a model by path, each once, including the model itself."""
    return {"/".join(map(str, path)): m for path, m in nnx.iter_modules(model)}


def _classes(modules: Mapping[str, nnx.Module]) -> dict[str, type]:
    return {path: type(module) for path, module in modules.items()}


# Their statistics, also running ones, keep their dtype: only the output is cast, by the
# `dtype` of the layer.
_NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)

# They write to the weights of the layer inside, which casts them itself.
_WEIGHT_NORMS = (nnx.WeightNorm, nnx.SpectralNorm)


@dataclasses.dataclass(frozen=True)
class _PolicyDtype:
    """A `dtype` that a policy has set. It goes where the layer goes."""

    dtype: DTypeLike | None
    own: DTypeLike | None  # that the author set before


def _resolve(
    policies: ModulePolicies, modules: Mapping[str, Any]
) -> dict[str, ModulePolicy]:
    own_dtypes = {path: _own_dtype(module) for path, module in modules.items()}
    return policies.resolve(_classes(modules), own_dtypes)


def _own_dtype(module: Any) -> DTypeLike | None:
    """Return the `dtype` that the author of a model set on a module, None if none."""
    if _is_of_policy(module):
        return module._policy_dtype.own
    dtype = module_policies.own_dtype(module)
    if isinstance(module, nnx.Embed) and dtype == module.embedding.dtype:
        return None  # flax sets it to the dtype of the table if the author set none
    return dtype


def _has_dtype(module: nnx.Module) -> bool:
    """Return whether a module casts by itself, to its attribute `dtype`."""
    return "dtype" in vars(module)


def _is_of_policy(module: Any) -> bool:
    """Return whether the `dtype` of a layer is the one that a policy has set."""
    of_policy = vars(module).get("_policy_dtype")
    return of_policy is not None and of_policy.dtype == module.dtype


def _take_policy_off(module: Any) -> None:
    """Make a module what its author made it, but for param dtypes."""
    if _is_of_policy(module):
        module.dtype = module._policy_dtype.own
    if "_policy_dtype" in vars(module):
        del module._policy_dtype
    if _is_in_fp8(module):
        module.dot_general, module.promote_dtype = lax.dot_general, promote_dtype
    if isinstance(getattr(module, "activation_fn", None), _InFloat32):
        module.activation_fn = module.activation_fn.fun


def _set_dtypes(module: Any, of: ModulePolicy) -> None:
    """Set dtypes and products of a flax layer; other modules are left alone."""
    cls = type(module)
    is_overridden = of.own_dtype is not None and of.rule is not None
    is_free = getattr(module, "dtype", None) is None or issubclass(cls, nnx.Embed)
    if _has_dtype(module) and (is_overridden or (of.own_dtype is None and is_free)):
        is_weight_norm = issubclass(cls, _WEIGHT_NORMS)
        module.dtype = None if is_weight_norm else of.policy.compute_dtype
        module._policy_dtype = _PolicyDtype(module.dtype, of.own_dtype)
    if of.is_fp8 and _takes_fp8(module):
        module.dot_general = fp8.large_dot_general
        module.promote_dtype = _keep_kernel
    if is_overridden and issubclass(cls, nnx.SimpleCell):
        module.activation_fn = _InFloat32(module.activation_fn)
    if issubclass(cls, _NORMS) and module.promote_dtype is promote_dtype:
        module.promote_dtype = _keep_dtypes
    in_float32 = attention.softmax_in_float32(getattr(module, "attention_fn", None))
    if in_float32 is not None:
        module.attention_fn = in_float32


def _is_in_fp8(module: nnx.Module) -> bool:
    return getattr(module, "dot_general", None) is fp8.large_dot_general


def _takes_fp8(module: Any) -> bool:
    """Return whether a large layer multiplies by a `dot_general` its author left."""
    if not isinstance(module, nnx.Linear | nnx.LinearGeneral):
        return False
    sizes = [int(np.prod(x)) for x in (module.in_features, module.out_features)]
    return (
        module.dot_general in (None, lax.dot_general)
        and getattr(module, "dot_general_cls", None) is None
        and module.promote_dtype is promote_dtype
        and not fp8.why_not_sizes(sizes)
    )


def _keep_kernel(arrays: PyTree, /, *, dtype: DTypeLike | None) -> PyTree:
    """Cast all but the kernel, so that its gradient is the accumulator of a product."""
    inputs, kernel, bias = arrays
    inputs, bias = promote_dtype((inputs, bias), dtype=dtype)
    return inputs, kernel, bias


@dataclasses.dataclass(frozen=True)
class _InFloat32:
    """An activation in float32, so that the carry of a recurrent cell is float32."""

    fun: Callable[[jax.Array], jax.Array]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fun(trees.cast_at_least_float32(x))


def _keep_dtypes(arrays: tuple[Any, ...], /, **options: Any) -> tuple[Any, ...]:
    return arrays
