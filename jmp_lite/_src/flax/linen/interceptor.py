"""Run a linen model under policies by intercepting the calls of its modules."""

import contextlib
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
from jmp_lite._src.flax import attention, module_policies
from jmp_lite._src.flax.module_policies import ModulePolicies, ModulePolicy
from jmp_lite._src.jaxprs.tracing import trace
from jmp_lite._src.trees import PyTree


class PolicyInterceptor:
    """One run of a model under policies.

    1. `collect` runs the model abstractly, to find its modules and their policies.
    2. `cast` casts the variables.
    3. `__call__` runs the model on them, and sets the dtypes of each module.
    """

    def __init__(self, policies: ModulePolicies, always_trace: bool = False):
        self.policies = policies
        # By the path of each module that was called: its class, its policy.
        self.modules: dict[str, type] = {}
        self.resolved: dict[str, ModulePolicy] = {}
        self._run_flag = uuid.uuid4().hex if always_trace else hash(policies)
        self._flag: str | int = ""  # that of the run in progress
        self._own_dtypes: dict[str, DTypeLike | None] = {}
        self._outputs: dict[str, tuple[str, ...]] = {}
        # Modules whose parameters `cast` has cast.
        self._cast_owners: set[str] = set()
        # Layers whose parameters a WeightNorm or SpectralNorm around them replaces.
        self._normalised: set[str] = set()
        # Layers that can multiply in fp8, and those with a product that can.
        self._take_fp8: set[str] = set()
        self._large: set[str] = set()
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
            if self.policies.any_fp8 and is_owner and _takes_fp8(module):
                fields["dot_general"] = self._dot_general_of(path)
            with _set_fields(module, fields):
                out = next_fun(*args, **kwargs)
            if isinstance(module, nn.WeightNorm | nn.SpectralNorm):
                self._normalised.add("/".join(module.layer_instance.path))
            return out

        self._flag = uuid.uuid4().hex
        # Nothing is cast yet: half-precision parameters or inputs may meet float32.
        promotion = jax.numpy_dtype_promotion("standard")
        with nn.intercept_methods(record), promotion, self.policies.in_float32():
            trace(fun, args)
        self.resolved = self.policies.resolve(self.modules, self._own_dtypes)

    def cast(self, variables: PyTree, role: str = "compute_dtype") -> PyTree:
        """Return variables with the parameters in a dtype of their module's policy.

        The decoding caches of flax's attention get its compute dtype.
        """
        owners = set(self.modules)
        if role == "compute_dtype":
            owners = {path for path in owners if not self._casts_its_params(path)}
            params = variables.get("params", {})
            self._cast_owners = owners.intersection(
                module_policies.params_by_module(params, self.modules)
            )

        def cast_cache(path, leaf):
            owner = module_policies.enclosing_module(trees.key_path(path), self.modules)
            if owner is None or not issubclass(self.modules[owner], _ATTENTION):
                return leaf
            return trees.cast_floating(leaf, self.resolved[owner].compute_dtype)

        new = dict(variables)
        if "params" in new:
            new["params"] = module_policies.cast_params(
                new["params"], self.resolved, role, owners
            )
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

    def explain(self, variables: PyTree) -> module_policies.Explanation:
        """Return the dtypes of each module in the last call."""
        params = variables.get("params", {})
        in_fp8 = [path for path in self._large if self.resolved[path].is_fp8]
        return module_policies.explain(
            self.modules, self.resolved, params, self._outputs, in_fp8
        )

    def _dot_general_of(self, path: str) -> Callable[..., jax.Array]:
        """Return a `lax.dot_general` that notes whether a product can be in fp8."""
        self._take_fp8.add(path)

        def dot_general(lhs, rhs, dimension_numbers, precision=None, **options):
            avals = jax.typeof(lhs), jax.typeof(rhs)
            if not fp8.why_not(*avals, dimension_numbers, precision):
                self._large.add(path)
            return lax.dot_general(lhs, rhs, dimension_numbers, precision, **options)

        return dot_general

    def _record(self, module: nn.Module) -> str:
        path = "/".join(module.path)
        if path not in self.modules:
            self.modules[path] = type(module)
            dtype = getattr(module, "dtype", None)
            self._own_dtypes[path] = module_policies.own_dtype(dtype)
        return path

    def _casts_its_params(self, path: str) -> bool:
        """Return whether a module itself casts its parameters, where it needs to."""
        is_norm = issubclass(self.modules[path], _NORMS)
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
        seen = dict.fromkeys((*self._outputs.get(path, ()), *names))
        self._outputs[path] = tuple(seen)
        return out


# Their statistics, scales and biases stay float32: only their output is cast, by the
# `dtype` of the layer. The same holds for the weights that the last two compute.
_NORMS = (
    nn.BatchNorm,
    nn.GroupNorm,
    nn.InstanceNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.SpectralNorm,
    nn.WeightNorm,
)

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
    if not (isinstance(module, nn.RNNCellBase) and given and isinstance(out, tuple)):
        return out
    if jax.tree.structure(out[0]) != jax.tree.structure(given[0]):
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
