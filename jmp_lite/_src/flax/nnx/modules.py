"""Policies over the modules of an nnx model, its source untouched.

Limits: a layer of flax is told its compute dtype by its `dtype`. A module of your own
is handed its parameters in it; what it is given by others it takes as it is, and only
the model itself has its output cast. flax's attention is told to take its softmax in
float32; one that a model writes itself has the dtype of its logits.
"""

import dataclasses
import itertools
import operator
import warnings
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from jmp_lite._src import dtypes, trees
from jmp_lite._src.autocast.transform import sums_in_float32
from jmp_lite._src.flax import attention
from jmp_lite._src.flax.module_policies import (
    Explanation,
    ModuleDtypes,
    ModulePolicies,
    ModulePolicy,
    given_dtype,
    kept_from_half,
    nearest,
    nothing_in_half,
    why,
)
from jmp_lite._src.policy import Policy, PolicyMap


def with_policy(
    model: nnx.Module,
    policy: Policy | PolicyMap | str,
    classes: Mapping[type[nnx.Module], Policy | str] | None = None,
) -> "PolicyModule":
    """Return a copy of a model that runs under a policy, or one per path and class.

    Parameters are kept in the param dtype of their module. flax's layers compute in
    its compute dtype (their `dtype`), other modules get their parameters in it; the
    model's outputs have the default's output dtype. Statistics of flax's norms are
    float32, and so is the softmax of flax's attention.

    The default policy leaves a `dtype` that the author of the model set on a module. A
    rule outweighs it, in the module that it names and in those inside. Warns where the
    default policy is to be in half, and no layer is, for that reason.

    Args:
      model: an nnx module; it stays as it is.
      policy: the policy of all of it; or a `PolicyMap`, whose patterns match whole
        module paths (`"layers/0/attention"`). A policy holds for all that is inside
        the module, unless another rule does. Of a rule's output dtype only that for the
        model itself (`""`) is used.
      classes: module class (or base class) to policy. Paths come first.

    Returns:
      An nnx module that is called as `model` is, and holds the copy as `.model`.

    Raises:
      TypeError: `model` is not an nnx module.
      ValueError: an unknown policy; a pattern or class names no module.

    Examples:
      >>> import jax.numpy as jnp
      >>> linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> model = with_policy(linear, "p=f32,c=bf16,o=f32")
      >>> model(jnp.ones((2, 3))).dtype, model.model(jnp.ones((2, 3))).dtype
      (dtype('float32'), dtype(bfloat16))
      >>> model.explain()[""].compute
      'bf16'

    References:
      Keras' `dtype` of a layer.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"Expected an nnx module, got {model!r}.")
    policies = ModulePolicies(policy, classes or ())
    model = nnx.clone(model)
    modules = _modules(model)
    of = _resolve(policies, modules)
    own_dtypes = {path: _own_dtype(module) for path, module in modules.items()}
    nnx.update(model, _cast(nnx.state(model, nnx.Param), of, "param_dtype", of))
    for path, module in modules.items():
        _tell(module, of[path], own_dtypes[path])
    text = _nothing_in_half(model, modules, of, own_dtypes)
    if text is not None:
        warnings.warn(text, stacklevel=2)
    return PolicyModule(model, policies, own_dtypes)


class PolicyModule(nnx.Module):
    """An nnx module under policies; made by `with_policy`.

    It passes calls on and nothing else: other methods and attributes of the model are
    those of `.model`.

    Attributes:
      model: the module, its layers told their dtypes.
      policies: which policy each module in it has.
    """

    def __init__(self, model: Any, policies: ModulePolicies, own_dtypes: Any):
        self.model = model
        self.policies = policies
        self.own_dtypes = tuple(sorted(own_dtypes.items()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, in the default policy's output dtype."""
        modules = _modules(self.model)
        of = _resolve(self.policies, modules)
        leaves = jax.tree_util.tree_leaves_with_path(nnx.state(self.model, nnx.Param))
        owners = {_owner(path, modules) for path, _ in leaves}
        handed = {path for path in owners if not _is_told(modules[path])}

        def cast(params, inputs):
            if "" in handed:
                inputs = of[""].policy.cast_to_compute(inputs)
            return _cast(params, of, "compute_dtype", handed), inputs

        out = self._call_copy(cast, args, kwargs)
        return of[""].policy.cast_to_output(out)

    def explain(self) -> Explanation:
        """List what each module does under the policies; `.table()` is for people.

        The output dtypes are those of flax's layers and of the model itself; what
        other modules return is not known before they are called.
        """
        modules = _modules(self.model)
        of, own_dtypes = _resolve(self.policies, modules), dict(self.own_dtypes)
        params: dict[str, set[str]] = {path: set() for path in modules}
        leaves = jax.tree_util.tree_leaves_with_path(nnx.state(self.model, nnx.Param))
        for path, leaf in leaves:
            params[_owner(path, modules)].add(dtypes.dtype_name(leaf.dtype))
        rows = []
        for path, module in sorted(modules.items()):
            own, policy = own_dtypes.get(path), of[path].policy
            kept = None if of[path].rule is not None else own
            compute = dtypes.dtype_name(policy.compute_dtype if kept is None else kept)
            output = (compute,) if _is_told(module) else ()
            row = ModuleDtypes(
                path=path,
                module=type(module).__name__,
                params=tuple(sorted(params[path])),
                compute=compute,
                output=output if path else (dtypes.dtype_name(policy.output_dtype),),
                why=why(of[path], path, own),
            )
            rows.append(row)
        return Explanation(tuple(rows))

    def _call_copy(self, cast: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a copy with parameters and inputs cast; take back what it changes."""
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        is_node = list(map(_is_node, leaves))
        # Random streams among the arguments change too; and they may be the model's.
        nodes = list(itertools.compress(leaves, is_node))
        inputs = [None if node else x for node, x in zip(is_node, leaves, strict=True)]
        graphdef, params, rest = nnx.split((self.model, nodes), nnx.Param, ...)
        settings: dict[str, dict[str, Any]] = {}

        def call(params, rest, inputs):
            of_model, inputs = cast(params.get(0, nnx.State({})), inputs)
            both = nnx.merge(graphdef, nnx.State({**params, 0: of_model}), rest)
            copy, given = both[0], iter(both[1])
            args, kwargs = tree.unflatten(
                next(given) if node else x
                for node, x in zip(is_node, inputs, strict=True)
            )
            old = {path: _arrays(leaf) for path, leaf in _flat_state(both).items()}
            out = copy(*args, **kwargs)
            settings.update({path: _settings(m) for path, m in _modules(copy).items()})
            # Nothing else: under a transformation, a variable from outside can be read
            # but not set.
            changed = {
                path: leaf
                for path, leaf in _flat_state(both).items()
                if path not in old or not _is_same(_arrays(leaf), old[path])
            }
            for path, param in nnx.to_flat_state(params):
                if path in changed:
                    changed[path] = trees.cast_like(changed[path], param)
            return out, nnx.from_flat_state(changed)

        call.__name__ = type(self.model).__name__  # for messages
        out, changed = sums_in_float32(call)(params, rest, inputs)
        nnx.update((self.model, nodes), changed)
        for path, module in _modules(self.model).items():
            for name, value in settings[path].items():
                if vars(module).get(name) != value:
                    setattr(module, name, value)
        return out


def _is_node(x: Any) -> bool:
    """Return whether an argument is nnx' own: a module, a random stream, a variable."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _flat_state(nodes: Any) -> dict[Any, Any]:
    return dict(nnx.to_flat_state(nnx.state(nodes)))


def _settings(module: nnx.Module) -> dict[str, Any]:
    """Return the attributes of a module that are plain Python: no array has them."""
    plain = bool, int, float, str, type(None)
    return {k: v for k, v in vars(module).items() if isinstance(v, plain)}


def _modules(model: nnx.Module) -> dict[str, Any]:
    """Return the modules of a model by path, each of them once, itself included."""
    return {"/".join(map(str, path)): m for path, m in nnx.iter_modules(model)}


def _arrays(leaf: Any) -> list[Any]:
    """Return the very arrays that a variable holds; an array is its own."""
    is_variable = isinstance(leaf, nnx.Variable)
    return jax.tree.leaves(leaf.get_raw_value() if is_variable else leaf)


def _is_same(arrays: list[Any], others: list[Any]) -> bool:
    return len(arrays) == len(others) and all(map(operator.is_, arrays, others))


def _resolve(policies: ModulePolicies, modules: Mapping[str, Any]) -> Any:
    return policies.resolve({path: type(m) for path, m in modules.items()})


def _owner(path: Any, modules: Mapping[str, Any]) -> str:
    """Return the path of the module that holds the parameter at a key path."""
    return nearest(trees.key_path(path), modules) or ""


def _cast(
    params: Any, of: Mapping[str, ModulePolicy], role: str, owners: Container[str]
) -> Any:
    """Return parameters, those of some modules in a dtype of the module's policy."""

    def cast(path, leaf):
        owner = _owner(path, of)
        if owner not in owners:
            return leaf
        return trees.cast_floating(leaf, getattr(of[owner].policy, role))

    return jax.tree_util.tree_map_with_path(cast, params)


# Their statistics, running ones too, stay in the dtype they have: only the result is
# cast, by the `dtype` of the layer.
_NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)

# They write to the weights of the layer inside, which casts for itself.
_RENORMS = (nnx.WeightNorm, nnx.SpectralNorm)


def _own_dtype(module: nnx.Module) -> Any:
    """Return the `dtype` that the author gave a layer, None if none."""
    dtype = given_dtype(module)
    if isinstance(module, nnx.Embed) and dtype == module.embedding.dtype:
        return None  # an embedding whose author said nothing takes its table's
    return dtype


def _is_told(module: nnx.Module) -> bool:
    """Return whether a module casts as its `dtype` says."""
    return "dtype" in vars(module)


def _tell(module: Any, of: ModulePolicy, own_dtype: Any) -> None:
    """Set the dtypes of a flax layer; other modules are left alone."""
    cls = type(module)
    is_outweighed = own_dtype is not None and of.rule is not None
    is_free = getattr(module, "dtype", None) is None or issubclass(cls, nnx.Embed)
    if _is_told(module) and (is_outweighed or (own_dtype is None and is_free)):
        module.dtype = None if issubclass(cls, _RENORMS) else of.policy.compute_dtype
    if is_outweighed and issubclass(cls, nnx.SimpleCell):
        module.activation_fn = _InFloat32(module.activation_fn)
    if issubclass(cls, _NORMS) and module.promote_dtype is promote_dtype:
        module.promote_dtype = _keep_dtypes
    in_float32 = attention.softmax_in_float32(getattr(module, "attention_fn", None))
    if in_float32 is not None:
        module.attention_fn = in_float32


@dataclasses.dataclass(frozen=True)
class _InFloat32:
    """An activation that is float32: what a cell hands on in a loop keeps its dtype."""

    fun: Callable[[jax.Array], jax.Array]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fun(trees.cast_at_least_float32(x))


def _nothing_in_half(
    model: nnx.Module,
    modules: Mapping[str, Any],
    of: Mapping[str, ModulePolicy],
    own_dtypes: Mapping[str, Any],
) -> str | None:
    """Return the warning that no layer is in half as it should be; None if one is."""
    layers = [
        path
        for path, module in modules.items()
        if _is_told(module) and not isinstance(module, (*_NORMS, nnx.Embed))
    ]
    kept = [path for path in kept_from_half(of, own_dtypes) if _is_told(modules[path])]
    if not layers or set(layers) - set(kept):
        return None
    # What a module of one's own does with its parameters is not known before a call:
    # weights are multiplied, a table of positions is added. Tables are smaller.
    of_layers = in_half = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param)):
        owner = _owner(path, modules)
        of_layers += leaf.size if owner in layers else 0
        in_half += 0 if _is_told(modules[owner]) else leaf.size
    if in_half >= of_layers:
        return None
    return nothing_in_half(
        f"the {len(layers)} layers of {type(model).__name__}",
        kept,
        of[layers[0]].policy,
        "`dtype=None`",
    )


def _keep_dtypes(arrays: tuple[Any, ...], /, **options: Any) -> tuple[Any, ...]:
    del options
    return arrays
