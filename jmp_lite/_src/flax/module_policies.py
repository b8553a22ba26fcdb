"""Which policy each module of a model has: by its path, its class, or what holds it.

The rules of both flax front ends, linen and nnx; nothing here knows flax itself.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jmp_lite._src import dtypes, extras
from jmp_lite._src.policy import Policy, PolicyMap, get_policy


@dataclasses.dataclass(frozen=True)
class ModulePolicy:
    """The policy of one module.

    Attributes:
      policy: the policy.
      rule: the pattern or class that gave it, to this module or to one around it; None
        for the default, which leaves a `dtype` that the author of the model set.
      is_named: whether the rule names this very module.
      is_own: whether the rule begins to hold here: it names this module, and is not the
        one that the module around it has.
    """

    policy: Policy
    rule: str | None = None
    is_named: bool = False
    is_own: bool = False


@dataclasses.dataclass(frozen=True)
class ModulePolicies:
    """Policies by path and by class.

    A module has the policy of the first pattern that matches its whole path
    (`"decoder/layer_0/attention"`, `""` for the model itself); else of the first class
    that it is an instance of; else that of the module around it; else the default.
    A rule outweighs a `dtype` that the author of the model set, in the module it names
    and in those inside; the default does not.

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
            holder = nearest(path, found)
            around = ModulePolicy(self.policy.default)
            if holder is not None:
                around = found[holder]
            rule, policy = self._rule_for(path, modules[path])
            if policy is None:
                found[path] = ModulePolicy(around.policy, around.rule)
            else:
                found[path] = ModulePolicy(policy, rule, True, rule != around.rule)
        return found

    def _rule_for(self, path: str, module_class: type) -> tuple[str, Policy | None]:
        """Return the rule that names a module, and its policy; None if none does."""
        pattern = self.policy.pattern_for(path)
        if pattern is not None:
            return f"path {pattern!r}", self.policy.rule_for(path)
        for cls, policy in self.classes:
            if issubclass(module_class, cls):
                return f"class {cls.__name__}", policy
        return "", None


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


def why(of: ModulePolicy, path: str, own_dtype: Any) -> str:
    """Return what decides the dtypes of a module, for `Explanation`.

    Args:
      of: its policy.
      path: its path.
      own_dtype: the `dtype` that the author of the model gave it, None if none.
    """
    own = "" if own_dtype is None else f"its own dtype={dtypes.dtype_name(own_dtype)}"
    if own and of.rule is None:
        return own
    around = "the module around it" if path else "the default"
    reason = of.rule if of.rule is not None and of.is_named else around
    return f"{reason}, over {own}" if own else reason


def kept_from_half(
    of: Mapping[str, ModulePolicy], own_dtypes: Mapping[str, Any]
) -> list[str]:
    """Return the modules that would be in half but for the `dtype` of their author.

    Args:
      of: the policy of each module.
      own_dtypes: the `dtype` that the author gave each, None if none.
    """
    return [
        path
        for path, own_dtype in own_dtypes.items()
        if own_dtype is not None
        and of[path].rule is None
        and dtypes.is_half(jnp.dtype(of[path].policy.compute_dtype))
        and not dtypes.is_half(jnp.dtype(own_dtype))
    ]


def nothing_in_half(what: str, kept: Sequence[str], policy: Policy, remedy: str) -> str:
    """Return the warning that a policy changes nothing.

    Args:
      what: what there are how many of, of which model, `"the 7 products of Net"`.
      kept: the modules that `kept_from_half` returned.
      policy: the default policy.
      remedy: how to make the model without a `dtype`.
    """
    names = [path or "the model itself" for path in kept[:_MOST_NAMES]]
    more = ", …" if len(kept) > _MOST_NAMES else ""
    return (
        f"0 of {what} run in {jnp.dtype(policy.compute_dtype).name} under the policy "
        f"{policy}: {len(kept)} of its modules have a `dtype` that their author set, "
        f"and only a rule outweighs that: {', '.join(names)}{more}. Give it a rule "
        f"(`PolicyMap('full', {{'': '{policy}'}})`), or make it without a dtype "
        f"({remedy}), or use jmp_lite.autocast."
    )


_MOST_NAMES = 5
