"""The policies of modules: by path, class, or what is around; does not import flax."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_lite._src import arguments, compat, dtypes, reports, trees
from jmp_lite._src.autocast import half_calls
from jmp_lite._src.policy import Policy, PolicyMap, first_match, get_policy, policies_of
from jmp_lite._src.trees import PyTree


@dataclasses.dataclass(frozen=True)
class ModulePolicy:
    policy: Policy
    # The pattern or class that gave this policy to the module or to one that encloses
    # it; None for the default, which does not override a module's `dtype`.
    rule: str | None = None
    is_named: bool = False  # whether the rule is of this module, not of one around it
    is_rule_start: bool = False  # whether, besides, the enclosing module has another
    own_dtype: DTypeLike | None = None  # the `dtype` that the author set on it

    @property
    def kept_dtype(self) -> DTypeLike | None:
        """The author's `dtype` if no rule overrides it, else None."""
        return self.own_dtype if self.rule is None else None

    @property
    def compute_dtype(self) -> DTypeLike:
        kept = self.kept_dtype
        return self.policy.compute_dtype if kept is None else kept

    @property
    def is_fp8(self) -> bool:
        """Whether large matrix products of the module are in fp8."""
        return self.kept_dtype is None and self.policy.matmul_dtype == "fp8"

    def why(self, path: str) -> str:
        """Return what decided the dtypes of the module, which has this path."""
        own = ""
        if self.own_dtype is not None:
            own = f"its own dtype={dtypes.dtype_name(self.own_dtype)}"
            if self.rule is None:
                return own
        around = "the enclosing module" if path else "the default"
        reason = self.rule if self.rule and self.is_named else around
        return f"{reason}, overriding {own}" if own else reason


def own_dtype(module: Any) -> DTypeLike | None:
    """Return the dtype in the field `dtype` of a module, None if it has none."""
    dtype = getattr(module, "dtype", None)
    try:
        return None if dtype is None else jnp.dtype(dtype).type
    except TypeError:  # a field of that name with another meaning
        return None


@dataclasses.dataclass(frozen=True)
class ModulePolicies:
    """Policies by path and by class, of each of which the first that fits decides."""

    policy: Any  # a policy, its string or a map; stored as a `PolicyMap`
    classes: Any = None  # a mapping or None; stored as pairs, which can be hashed

    def __post_init__(self) -> None:
        policy = self.policy
        if not isinstance(policy, PolicyMap):
            policy = PolicyMap(policy)
        of = "module classes to policies (paths go into a PolicyMap)"
        classes = arguments.mapping(self.classes, "classes", of)
        if not all(isinstance(cls, type) for cls in classes):
            raise TypeError(arguments.wrong("classes", f"a mapping of {of}", classes))
        pairs = tuple((cls, get_policy(policy)) for cls, policy in classes.items())
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "classes", pairs)
        if others := [p for p in self._halves if p.reduce_dtype != self.reduce_dtype]:
            raise ValueError(
                f"Expected one reduce dtype for the whole model, got the policies "
                f"{policy.default} and {others[0]}. Set it in all of them, or use "
                "jmp_lite.autocast, which has one by path."
            )

    def in_float32(self) -> contextlib.AbstractContextManager[None]:
        """Return a context to run a model in whose variables are not cast yet.

        In it, what is called through `in_half` gets half.
        """
        if not self._halves:
            return contextlib.nullcontext()
        return half_calls.inside(self._halves[0].compute_dtype)

    @property
    def reduce_dtype(self) -> DTypeLike | None:
        return self.policy.default.reduce_dtype

    @property
    def _halves(self) -> list[Policy]:
        every = [*policies_of(self.policy), *(policy for _, policy in self.classes)]
        return [p for p in every if dtypes.is_half(jnp.dtype(p.compute_dtype))]

    def resolve(
        self, modules: Mapping[str, type], own_dtypes: Mapping[str, DTypeLike | None]
    ) -> dict[str, ModulePolicy]:
        """Return the policy of each module of a model, in the order of `modules`.

        By its path, which starts with that of the module that encloses it: its class,
        and the `dtype` that its author set, if any.
        """
        fitted = self.policy.fitted(modules, modules[""].__name__)
        fitted.check_unused(modules)
        patterns = [pattern for pattern, _ in fitted.rules]
        found = {path: first_match(patterns, path) for path in modules}
        if patterns and set(found.values()) == {None}:
            given = [pattern for pattern, _ in self.policy.rules[:5]]
            warnings.warn(
                "No pattern of the PolicyMap is a path of the model: its rules do "
                f"nothing. Got {given}; paths are {[*modules][1:6]}.",
                stacklevel=3,
            )
        present = tuple(modules.values())
        for cls, _ in self.classes:
            if self.policy.allow_unused or any(issubclass(c, cls) for c in present):
                continue
            names = sorted({c.__name__ for c in present})
            raise ValueError(
                f"The model has no {cls.__name__} for the policy of that class; "
                f"it has {names}. (allow_unused=True in a PolicyMap disables this "
                "check.)"
            )

        @functools.cache
        def resolved(path: str) -> ModulePolicy:
            outer, index = enclosing_module(path, modules), found[path]
            inherited = ModulePolicy(self.policy.default)
            if outer is not None:
                inherited = resolved(outer)
                index = None if index == found[outer] else index
            named = self._rule_at(index, modules[path])
            rule, policy = named or (inherited.rule, inherited.policy)
            is_start, own = rule != inherited.rule, own_dtypes.get(path)
            return ModulePolicy(policy, rule, bool(named), is_start, own)

        return {path: resolved(path) for path in modules}

    def _rule_at(self, index: int | None, module: type) -> tuple[str, Policy] | None:
        """Return the rule that names a module, and its policy; None if none does."""
        if index is not None:  # a pattern begins to apply at the path of the module
            pattern, policy = self.policy.rules[index]
            return f"path {pattern!r}", policy
        for cls, policy in self.classes:
            if issubclass(module, cls):
                return f"class {cls.__name__}", policy
        return None


def not_a_module(kind: str, got: object) -> TypeError:
    """Return the error for what is passed to `with_policy` as a linen or nnx module."""
    remedy = ""
    if isinstance(got, type):
        remedy = f"Make one first: {got.__name__}(...)."
    elif isinstance(got, str | Policy | PolicyMap):
        remedy = "Write with_policy(model, policy)."
    elif compat.is_nnx_module(got):
        remedy = "This is one of nnx: use jmp_lite.nnx.with_policy."
    elif compat.is_unbound_linen_module(got):
        remedy = "This is one of linen: use jmp_lite.linen.with_policy."
    elif callable(got):  # also a model of equinox
        remedy = "A function takes a policy by jmp_lite.autocast(f, policy)."
    elif isinstance(got, Mapping):
        remedy = "A policy is of the model, not of its parameters."
    return TypeError(arguments.wrong("the model", f"{kind} module", got, remedy))


def enclosing_module(path: str, modules: Container[str]) -> str | None:
    """Return the longest module path that a path lies inside of, None if none does."""
    while path:
        path = path.rpartition("/")[0]
        if path in modules:
            return path
    return None


def params_by_module(params: PyTree, modules: Container[str]) -> dict[str, list[Any]]:
    """Return the parameters of each module that has some, without those inside it.

    Key paths start with module paths; leaves that are in no module are left out.
    """
    found: dict[str, list[PyTree]] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        owner = enclosing_module(trees.key_path(path), modules)
        if owner is not None:
            found.setdefault(owner, []).append(leaf)
    return found


def cast_params(
    params: Any, resolved: Mapping[str, ModulePolicy], role: str, owners: Container[str]
) -> PyTree:
    """Return parameters, cast to a dtype of the policy of their module."""

    def cast(path, leaf):
        owner = enclosing_module(trees.key_path(path), resolved)
        if owner is None or owner not in owners:
            return leaf
        return trees.cast_floating(leaf, getattr(resolved[owner].policy, role))

    return jax.tree.map_with_path(cast, params)


@dataclasses.dataclass(frozen=True)
class ModuleDtypes:
    """The dtypes of one module of a model under its policy."""

    path: str  # "" for the model itself
    module: str  # the name of its class
    params: tuple[str, ...]  # that its own parameters are stored in
    compute: str  # the dtype, and whether matrix products are in fp8
    output: tuple[str, ...]  # of its floating outputs
    why: str  # what decided: a pattern, a class, what encloses it, its own `dtype`


@dataclasses.dataclass(frozen=True)
class Explanation(reports.Report):
    """The dtypes of each module of a model under its policies."""

    rows: tuple[ModuleDtypes, ...]

    def __getitem__(self, path: str) -> ModuleDtypes:
        """Return the row of a path."""
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(f"no module {path!r} in {[row.path for row in self.rows]}")

    def _table(self, every):
        rows = self.rows if every else self.rows[: reports.LINES]
        columns = [field.name for field in dataclasses.fields(ModuleDtypes)]
        cells = [list(vars(row).values()) for row in rows]
        return reports.Table("Policies of modules", columns, cells)


def explain(
    modules: Mapping[str, type],
    resolved: Mapping[str, ModulePolicy],
    params: PyTree,
    outputs: Mapping[str, Iterable[str]],
    in_fp8: Container[str] = (),
) -> Explanation:
    """Return the dtypes of each module, in this order.

    By the path of a module: its class, its policy, and its output dtypes if known;
    `in_fp8` are those with matrix products in fp8.
    """
    owned, rows = params_by_module(params, modules), []
    for path, cls in modules.items():
        stored = {dtypes.dtype_name(leaf.dtype) for leaf in owned.get(path, ())}
        compute = dtypes.dtype_name(resolved[path].compute_dtype)
        row = ModuleDtypes(
            path=path,
            module=cls.__name__,
            params=tuple(sorted(stored)),
            compute=f"{compute}, products in fp8" if path in in_fp8 else compute,
            output=tuple(outputs.get(path, ())),
            why=resolved[path].why(path),
        )
        rows.append(row)
    return Explanation(tuple(rows))
