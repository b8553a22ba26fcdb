"""One run of a linen model under policies, its modules told their dtypes from outside.

First abstractly, to see which modules there are; then with each of them intercepted.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from jmp_lite._src import compat, dtypes, trees
from jmp_lite._src.autocast import products
from jmp_lite._src.flax import attention
from jmp_lite._src.flax.module_policies import (
    ModuleDtypes,
    ModulePolicies,
    ModulePolicy,
    given_dtype,
    kept_from_half,
    nearest,
    why,
)


class Run:
    """One run of a model: first abstractly, to see its modules, then under them."""

    def __init__(self, policies: ModulePolicies, is_watched: bool = False):
        self.policies = policies
        # Flags are what flax's nn.jit asks, besides shapes, before it calls a module
        # again; otherwise it takes what it has traced, perhaps under other policies.
        self._flag = uuid.uuid4().hex if is_watched else hash(policies)
        self.modules: dict[str, type] = {}
        self.own_dtypes: dict[str, Any] = {}
        self.outputs: dict[str, tuple[str, ...]] = {}
        self.of: dict[str, ModulePolicy] = {}
        self.handed_params: set[str] = set()
        self._renormed: set[str] = set()
        self._active: list[str] = []

    def collect(self, fun: Callable[..., Any], *args: Any) -> None:
        """Note the modules that a function calls."""
        flag = uuid.uuid4().hex

        def note(next_fun, args, kwargs, context):
            module = context.module
            self._note(module, flag)
            with _fields(module, _cache_dtype(module)):
                out = next_fun(*args, **kwargs)
            if isinstance(module, nn.WeightNorm | nn.SpectralNorm):
                self._renormed.add(_path(module.layer_instance))
            return out

        # Half-precision parameters or inputs may meet float32 here, if only in shape.
        with nn.intercept_methods(note), jax.numpy_dtype_promotion("standard"):
            jax.eval_shape(lambda *args: ignore(fun(*args)), *args)
        self.of = self.policies.resolve(self.modules)

    def __call__(self, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with each module's inputs and outputs in its dtypes."""
        with nn.intercept_methods(self._intercept):
            return fun(*args, **kwargs)

    def cast(self, variables: Any, role: str = "compute_dtype") -> Any:
        """Return variables, the parameters in a dtype of their module's policy.

        The decoding caches of flax's attention get its compute dtype.
        """

        def cast_param(path, leaf):
            owner = nearest(trees.key_path(path), self.modules)
            if owner is None:
                return leaf
            if role == "compute_dtype":
                if self._casts_its_params(owner):
                    return leaf
                self.handed_params.add(owner)
            return trees.cast_floating(leaf, getattr(self.of[owner].policy, role))

        def cast_cache(path, leaf):
            owner = nearest(trees.key_path(path), self.modules)
            if owner is None or not issubclass(self.modules[owner], _ATTENTION):
                return leaf
            return trees.cast_floating(leaf, self._compute_dtype(owner))

        casts = {"params": cast_param, "cache": cast_cache}
        collections = {
            name: jax.tree_util.tree_map_with_path(cast, variables[name])
            for name, cast in casts.items()
            if name in variables
        }
        return {**variables, **collections}

    def rows(self, variables: Any) -> Iterator[ModuleDtypes]:
        """Yield what each module did."""
        params: dict[str | None, set[str]] = {}
        leaves = jax.tree_util.tree_leaves_with_path(variables.get("params", {}))
        for path, leaf in leaves:
            owner = nearest(trees.key_path(path), self.modules)
            params.setdefault(owner, set()).add(dtypes.dtype_name(leaf.dtype))
        for path, cls in self.modules.items():
            yield ModuleDtypes(
                path=path,
                module=cls.__name__,
                params=tuple(sorted(params.get(path, ()))),
                compute=dtypes.dtype_name(self._compute_dtype(path)),
                output=self.outputs.get(path, ()),
                why=why(self.of[path], path, self.own_dtypes[path]),
            )

    def missed_products(self, fun: Callable[..., Any], cast: Any) -> int:
        """Return how many products a call has, if none is in half that should be.

        It is 0 where any product is in half, and where no module is kept from half by
        the `dtype` that the author of the model set.

        Args:
          fun: the call, as a function of the variables.
          cast: the variables, in the dtypes of their modules.
        """
        if not self.kept_from_half or any(map(self._multiplies_in_half, self.modules)):
            return 0  # as nearly always, without another trace
        found = _products(
            jax.make_jaxpr(lambda variables: ignore(self(fun, variables)))(cast)
        )
        operands = [v.aval.dtype for eqn in found for v in eqn.invars[:2]]
        return 0 if any(map(dtypes.is_half, operands)) else len(found)

    @property
    def kept_from_half(self) -> list[str]:
        """The modules that would be in half but for the `dtype` of their author."""
        return kept_from_half(self.of, self.own_dtypes)

    def _note(self, module: nn.Module, flag: Any) -> str:
        """Add a module to those seen; return its path."""
        path = _path(module)
        if path not in self.modules:
            self.modules[path] = type(module)
            self.own_dtypes[path] = given_dtype(module)
        if not path and module.scope is not None:
            module.scope.flags = FrozenDict({**module.scope.flags, "policies": flag})
        return path

    def _kept_dtype(self, path: str) -> Any:
        """Return the `dtype` of the author where no rule outweighs it, None if none."""
        return self.own_dtypes[path] if self.of[path].rule is None else None

    def _compute_dtype(self, path: str) -> Any:
        kept = self._kept_dtype(path)
        return self.of[path].policy.compute_dtype if kept is None else kept

    def _multiplies_in_half(self, path: str) -> bool:
        """Return whether a module is a layer that multiplies matrices, in half."""
        cls = self.modules[path]
        is_product = _is_flax_layer(cls) and not issubclass(cls, (*_NORMS, nn.Embed))
        return is_product and dtypes.is_half(jnp.dtype(self._compute_dtype(path)))

    def _casts_its_params(self, path: str) -> bool:
        """Return whether a module is left to cast its parameters, where it needs to."""
        if self._kept_dtype(path) is not None or issubclass(self.modules[path], _NORMS):
            return True
        return any(f"{path}/".startswith(f"{outer}/") for outer in self._renormed)

    def _intercept(self, next_fun, args, kwargs, context):
        module = context.module
        path = self._note(module, self._flag)
        if path not in self.of:  # one that nn.jit did not call in the abstract run
            self.of = self.policies.resolve(self.modules)
        # A method that the module itself calls is part of the call that is under way.
        if path in self._active:
            return _keep_carry(module, args, next_fun(*args, **kwargs))
        given, policy, is_own = args, self.of[path].policy, self.of[path].is_own
        fields = {}
        if self._kept_dtype(path) is None:
            is_layer = _is_flax_layer(type(module))
            if is_layer or (self.own_dtypes[path] is not None and _has_field(module)):
                fields["dtype"] = policy.compute_dtype
            if not is_layer and (is_own or path in self.handed_params):
                args, kwargs = policy.cast_to_compute((args, kwargs))
        in_float32 = attention.softmax_in_float32(getattr(module, "attention_fn", None))
        if in_float32 is not None:
            fields["attention_fn"] = in_float32
        self._active.append(path)
        try:
            with _fields(module, fields):
                out = next_fun(*args, **kwargs)
        finally:
            self._active.pop()
        if is_own or not path:
            out = policy.cast_to_output(out)
        out = _keep_carry(module, given, out)
        seen = (*self.outputs.get(path, ()), *_float_dtypes(out))
        self.outputs[path] = tuple(dict.fromkeys(seen))
        return out


# Their statistics, scales and biases stay float32: only what they return is cast, by
# the `dtype` of the layer. The weights that two of them make, too.
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


def ignore(out: Any) -> None:
    """Return nothing: what a model returns need not be arrays."""
    del out


def _products(jaxpr: Any) -> list[Any]:
    """Return the matrix products and convolutions of a jaxpr, at any depth."""
    found = []
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in products.NAMES:
            found.append(eqn)
        for body in compat.jaxprs_of(eqn):
            found += _products(body)
    return found


def _path(module: nn.Module) -> str:
    return "/".join(module.path)


def _is_flax_layer(cls: type) -> bool:
    """Return whether this is a layer of flax, which casts as its field `dtype` says."""
    return any(
        base.__module__.startswith("flax.linen.")
        and "dtype" in getattr(base, "__dataclass_fields__", ())
        for base in cls.__mro__
    )


def _has_field(module: nn.Module) -> bool:
    """Return whether `dtype` is a field of a module: a property cannot be set."""
    return "dtype" in getattr(type(module), "__dataclass_fields__", ())


def _cache_dtype(module: nn.Module) -> dict[str, Any]:
    """Return the `dtype` in which attention can write to the cache that it has."""
    if not isinstance(module, _ATTENTION):
        return {}
    cached = module.get_variable("cache", "cached_key")
    return {} if cached is None else {"dtype": cached.dtype}


def _keep_carry(module: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
    """Return what a recurrent cell made, its carry in the dtypes that it came in."""
    if not (isinstance(module, nn.RNNCellBase) and given and isinstance(out, tuple)):
        return out
    if jax.tree.structure(out[0]) != jax.tree.structure(given[0]):
        return out
    return trees.cast_like(out[0], given[0]), *out[1:]


@contextlib.contextmanager
def _fields(module: nn.Module, fields: Mapping[str, Any]) -> Iterator[None]:
    """Set fields of a module for one call."""
    # Not on a copy: that would be a second module in the same scope. The module is one
    # that flax made for this run, whatever the model holds.
    old = {name: getattr(module, name) for name in fields}
    for name, value in fields.items():
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            object.__setattr__(module, name, value)


def _float_dtypes(tree: Any) -> tuple[str, ...]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if trees.is_castable(leaf)]
    return tuple(dtypes.dtype_name(leaf.dtype) for leaf in leaves)
