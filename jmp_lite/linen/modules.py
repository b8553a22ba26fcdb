"""Policies over the modules of a linen model, its source untouched.

Limits: modules are told their dtypes from outside, by their `dtype` or by what they are
handed. flax's attention is told to take its softmax in float32; one that a model writes
itself has the dtype of its logits: give that module a policy, or use `autocast`, which
sees into it. `init` runs the model as written: of what it makes, only parameters and
the caches of flax's attention are cast. Modules of one class and shape under flax's
`nn.jit` share what is traced first, and with it the policy.
"""

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import FrozenDict

from jmp_lite import attention, dtypes, trees
from jmp_lite.module_policies import (
    Explanation,
    ModuleDtypes,
    ModulePolicies,
    ModulePolicy,
    given_dtype,
    nearest,
    why,
)
from jmp_lite.policy import Policy, PolicyMap


def with_policy(
    module: nn.Module,
    policy: Policy | PolicyMap | str,
    classes: Mapping[type[nn.Module], Policy | str] | None = None,
) -> "PolicyModule":
    """Return a model that runs under a policy, or one policy per path and class.

    flax's layers compute in the compute dtype of their policy (their `dtype`); another
    module gets its parameters, if it has any, and then its floating inputs in it. One
    that a rule names gets its inputs in that dtype anyway, and gives its outputs in the
    output dtype of the rule; the model's own outputs have that of the default. What has
    no parameters, and no rule, works on what it is handed. Statistics, scales and
    biases of flax's norms are float32, and so is the softmax of flax's attention. A
    `dtype` that the author of the model has set on a module stays.

    Args:
      module: an unbound linen module.
      policy: the policy of all of it; or a `PolicyMap`, whose patterns match whole
        module paths (`"decoder/layer_0/attention"`). A policy holds for all that is
        inside the module, unless another rule does.
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

        Gradients for parameters have the dtype of the parameters.

        Raises:
          ValueError: a pattern or class of the policies names no module.
        """
        run = _Run(self.policies)
        run.collect(lambda: self.module.apply(variables, *args, **kwargs))
        cast = run.cast(variables)
        out = run(self.module.apply, cast, *args, **kwargs)
        if not kwargs.get("mutable"):
            return out
        out, updated = out
        return out, _with_dtypes_of(variables, cast, updated)

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
        run = _Run(self.policies, is_watched=True)
        run.collect(lambda v: self.module.apply(v, *args, **kwargs), variables)
        cast = jax.eval_shape(run.cast, variables)
        jax.eval_shape(
            lambda v: _ignore(run(self.module.apply, v, *args, **kwargs)), cast
        )
        return Explanation(tuple(run.rows(variables)))

    def _init(self, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = _Run(self.policies)
        run.collect(lambda: init(*args, **kwargs))
        return run.cast(init(*args, **kwargs), role="param_dtype")


class _Run:
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
            jax.eval_shape(lambda *args: _ignore(fun(*args)), *args)
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
                why=why(self.policies, path, cls, self.own_dtypes[path]),
            )

    def _note(self, module: nn.Module, flag: Any) -> str:
        """Add a module to those seen; return its path."""
        path = _path(module)
        if path not in self.modules:
            self.modules[path] = type(module)
            self.own_dtypes[path] = given_dtype(module)
        if not path and module.scope is not None:
            module.scope.flags = FrozenDict({**module.scope.flags, "policies": flag})
        return path

    def _compute_dtype(self, path: str) -> Any:
        own_dtype = self.own_dtypes[path]
        return self.of[path].policy.compute_dtype if own_dtype is None else own_dtype

    def _casts_its_params(self, path: str) -> bool:
        """Return whether a module is left to cast its parameters, where it needs to."""
        if self.own_dtypes[path] is not None or issubclass(self.modules[path], _NORMS):
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
        if self.own_dtypes[path] is None:
            if _is_flax_layer(type(module)):
                fields["dtype"] = policy.compute_dtype
            elif is_own or path in self.handed_params:
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


def _ignore(out: Any) -> None:
    """Return nothing: what a model returns need not be arrays."""
    del out


def _path(module: nn.Module) -> str:
    return "/".join(module.path)


def _is_flax_layer(cls: type) -> bool:
    """Return whether this is a layer of flax, which casts as its field `dtype` says."""
    return any(
        base.__module__.startswith("flax.linen.")
        and "dtype" in getattr(base, "__dataclass_fields__", ())
        for base in cls.__mro__
    )


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


def _float_dtypes(tree: Any) -> tuple[str, ...]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if trees.is_castable(leaf)]
    return tuple(dtypes.dtype_name(leaf.dtype) for leaf in leaves)
