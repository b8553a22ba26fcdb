"""Which policy each module of a model has: by its path, its class, or what holds it.

The rules of both flax front ends, linen and nnx; nothing here knows flax itself.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jmp_lite import dtypes, extras
from jmp_lite.policy import Policy, PolicyMap, get_policy


@dataclasses.dataclass(frozen=True)
class ModulePolicy:
    """The policy of one module.

    Attributes:
      policy: the policy.
      is_own: whether a rule names this very module, not one around it.
    """

    policy: Policy
    is_own: bool


@dataclasses.dataclass(frozen=True)
class ModulePolicies:
    """Policies by path and by class.

    A module has the policy of the first pattern that matches its whole path
    (`"decoder/layer_0/attention"`, `""` for the model itself); else of the first class
    that it is an instance of; else that of the module around it; else the default.

    Args:
      policy: the default; a policy, its string, or a `PolicyMap` whose patterns match
        module paths.
      classes: module class to policy or its string.

    Raises:
      TypeError: `classes` is not a mapping of classes.
      ValueError: a policy is unknown.

    Examples:
      >>> policies = ModulePolicies(PolicyMap("mixed_float16", {"head": "full"}))
      >>> of = policies.resolve({"": object, "body": object, "head": object})
      >>> str(of["body"].policy), str(of["head"].policy)
      ('p=full,c=f16,o=full', 'p=full,c=full,o=full')
    """

    policy: Any  # given as a policy, its string or a map, kept as a `PolicyMap`
    classes: Any = ()  # given as a mapping, kept as a tuple of pairs: it is hashable

    def __post_init__(self):
        policy = self.policy
        if not isinstance(policy, PolicyMap):
            policy = PolicyMap(policy)
        classes = self.classes
        pairs = tuple(classes.items()) if isinstance(classes, Mapping) else classes
        if not isinstance(pairs, tuple) or not all(_is_class(pair) for pair in pairs):
            raise TypeError(
                "Expected a mapping of module classes to policies, got "
                f"{self.classes!r}; paths go into a PolicyMap."
            )
        classes = tuple((cls, get_policy(policy)) for cls, policy in pairs)
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "classes", classes)

    def resolve(self, modules: Mapping[str, type]) -> dict[str, ModulePolicy]:
        """Return the policy of each module of a model.

        Args:
          modules: path to class; a module's path starts with that of what holds it.

        Raises:
          ValueError: a pattern or a class names no module; the nearest are named.
        """
        self.policy.check_unused(modules)
        present = tuple(modules.values())
        for cls, _ in self.classes:
            if not any(issubclass(c, cls) for c in present):
                if self.policy.allow_unused:
                    continue
                names = sorted({c.__name__ for c in present})
                raise ValueError(
                    f"The model has no {cls.__name__} for the policy of that class; "
                    f"it has {names}. (A PolicyMap's allow_unused=True silences it.)"
                )
        found: dict[str, ModulePolicy] = {}
        for path in sorted(modules, key=lambda p: p.count("/") + bool(p)):
            own = self.policy.rule_for(path) or self._of_class(modules[path])
            found[path] = (
                ModulePolicy(own, is_own=True)
                if own
                else ModulePolicy(_around(path, found, self.policy.default), False)
            )
        return found

    def _of_class(self, module_class: type) -> Policy | None:
        for cls, policy in self.classes:
            if issubclass(module_class, cls):
                return policy
        return None


def nearest(path: str, modules: Mapping[str, Any]) -> str | None:
    """Return the longest of the module paths that a path lies in, None if none does.

    Examples:
      >>> nearest("layer/dense/kernel", {"": 0, "layer": 1, "layer/dense": 2})
      'layer/dense'
    """
    while path:
        path = path.rpartition("/")[0]
        if path in modules:
            return path
    return None


def given_dtype(module: Any) -> Any:
    """Return the `dtype` that the author of a model gave a module, None if none."""
    dtype = getattr(module, "dtype", None)
    try:
        return None if dtype is None else jnp.dtype(dtype).type
    except TypeError:  # a field of that name that means something else
        return None


def _is_class(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], type)


def _around(path: str, found: Mapping[str, ModulePolicy], default: Policy) -> Policy:
    holder = nearest(path, found)
    return default if holder is None else found[holder].policy


@dataclasses.dataclass(frozen=True)
class ModuleDtypes:
    """What one module of a model does under its policy.

    Attributes:
      path: its path, `""` for the model itself.
      module: the name of its class.
      params: dtypes that its own parameters are kept in; empty if it has none.
      compute: the dtype that it computes in.
      output: dtypes of what it returns, those of floats.
      why: what decided: a pattern, a class, the module around it, or its own `dtype`.
    """

    path: str
    module: str
    params: tuple[str, ...]
    compute: str
    output: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What each module of a model does under its policies, in the order of the calls.

    Attributes:
      rows: one per module.
    """

    rows: tuple[ModuleDtypes, ...]

    def __getitem__(self, path: str) -> ModuleDtypes:
        """Return the row of a path.

        Raises:
          KeyError: there is no such module; the text lists those there are.
        """
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(f"no module {path!r} in {[row.path for row in self.rows]}")

    def table(self) -> Any:
        """Return a `rich` table, a row per module.

        Raises:
          ImportError: rich is not installed (`pip install "jmp-lite[numerics]"`).
        """
        with extras.needed("numerics"):
            from rich.table import Table

        table = Table(title="Policies of modules")
        for name in ("path", "module", "params", "compute", "output", "why"):
            table.add_column(name, overflow="fold")
        for row in self.rows:
            params, output = "\n".join(row.params), "\n".join(row.output)
            cells = (row.path, row.module, params, row.compute, output, row.why)
            table.add_row(*cells)
        return table


def why(policies: ModulePolicies, path: str, cls: type, own_dtype: Any) -> str:
    """Return what decides the dtypes of a module, for `Explanation`."""
    if own_dtype is not None:
        return f"its own dtype={dtypes.dtype_name(own_dtype)}"
    pattern = policies.policy.pattern_for(path)
    if pattern is not None:
        return f"path {pattern!r}"
    for of_class, _ in policies.classes:
        if issubclass(cls, of_class):
            return f"class {of_class.__name__}"
    return "the module around it" if path else "the default"
