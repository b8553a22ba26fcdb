"""What the caller decides: a class per primitive, a policy per name scope."""

import dataclasses
import difflib
import functools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_lite._src import arguments, compat, dtypes, fp8
from jmp_lite._src.autocast import half_calls
from jmp_lite._src.autocast.storage import Region
from jmp_lite._src.jaxprs.name_scopes import (
    AUTOCAST,
    FULL_PRECISION,
    IN_HALF,
    join,
    without_marks,
)
from jmp_lite._src.jaxprs.primitives import CLASSES, PRIMITIVES, Fact, facts
from jmp_lite._src.policy import (
    Policy,
    PolicyMap,
    get_policy,
    paths_around,
    policies_of,
)

Classes: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OpRules:
    """The class of each primitive, and the dtype of the results of matrix products.

    To change single primitives, pass `autocast` a mapping of these alone:
    `rules={"tanh": "float32"}`. `default` returns the table that it changes, `only` a
    table of nothing else.

    Args:
      classes: primitive name to class, as a mapping or as pairs, of every primitive of
        the default table. A class is `"half"`, `"float32"`, `"promote"`,
        `"passthrough"` or `"unchanged"`.
      half_results: True: results of `"half"` primitives are half, as in torch. False:
        only if `"half"` primitives alone read them; else they are float32.
      fp8_min_size: under a policy with `matmul_dtype="fp8"`, the least size of each
        dimension of a matrix product in fp8; sizes must also be multiples of 16.
      recompute: whether the backward pass computes norms and activations again from
        half values that are stored anyway; None: it does, unless JAX' default backend
        is a TPU, for which XLA fuses them with products.

    Raises:
      ValueError: a class or a primitive is not known, or one of the default table has
        no class.
      TypeError: `classes` is not a table.

    Examples:
      >>> rules = OpRules.default("float16").replace(tanh="float32", sort="passthrough")
      >>> rules.class_of("tanh"), rules.class_of("fft")
      ('float32', 'unchanged')
    """

    classes: Any  # accepts `Classes`, stored as a hashable tuple of pairs
    half_results: bool = True
    fp8_min_size: int = fp8.MIN_SIZE
    recompute: bool | None = None

    def __post_init__(self) -> None:
        arguments.flag(self.half_results, "half_results")
        arguments.flag(self.recompute, "recompute", or_none=True)
        size = arguments.count(self.fp8_min_size, "fp8_min_size", least=0)
        object.__setattr__(self, "fp8_min_size", size)
        pairs = _table(self.classes)
        for name, op_class in pairs.items():
            arguments.one_of(op_class, f"the class of {name!r}", CLASSES)
        for name in pairs.keys() & PRIMITIVES.keys():
            if pairs[name] == "half" and not facts(name) & Fact.PRODUCT:
                raise ValueError(
                    f"Expected a matrix product in 'half', got {name!r}: 'promote' "
                    "runs it in half where its operands are, 'float32' in float32."
                )
        known = set(PRIMITIVES) | compat.primitive_names()
        if unknown := sorted(map(str, set(pairs) - known)):
            near = difflib.get_close_matches(unknown[0], sorted(known))
            question = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ValueError(
                f"Unknown primitives {unknown}: expected names as a jaxpr prints them, "
                f"such as 'dot_general' or 'reduce_sum'.{question}"
            )
        if missing := sorted(set(PRIMITIVES) - set(pairs)):
            raise ValueError(
                f"OpRules got {len(pairs)} of the {len(PRIMITIVES)} primitives of its "
                f"table; {missing[0]!r} has no class. To change a few, pass autocast "
                "these: rules={'tanh': 'float32'}. To leave all others as the program "
                "has them, matrix products too: OpRules.only({'tanh': 'float32'})."
            )
        object.__setattr__(self, "classes", tuple(sorted(pairs.items())))

    @classmethod
    def default(cls, compute_dtype: DTypeLike, half_results: bool = True) -> "OpRules":
        """Return the rules for a compute dtype.

        Both halves have the same.

        Args:
          compute_dtype: `jnp.float16` or `jnp.bfloat16`, or its name.
          half_results: as in the constructor.

        Examples:
          >>> OpRules.default(jnp.float16).class_of("square")
          'promote'
        """
        dtypes.parse_dtype(compute_dtype)
        classes = {name: known.op_class for name, known in PRIMITIVES.items()}
        return cls(classes, half_results)

    @classmethod
    def only(cls, classes: Classes) -> "OpRules":
        """Return rules for some primitives; all others run as the program has them.

        Args:
          classes: primitive name to class, as a mapping or as pairs.

        Examples:
          >>> OpRules.only({"dot_general": "half"}).class_of("conv_general_dilated")
          'unchanged'
        """
        return cls(dict.fromkeys(PRIMITIVES, "unchanged") | _printed(classes))

    @functools.cached_property
    def _by_name(self) -> dict[str, str]:
        return dict(self.classes)

    @property
    def lowers_anything(self) -> bool:
        """Whether any primitive is in the class `"half"`."""
        return "half" in self._by_name.values()

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes norms and activations again."""
        if self.recompute is None:
            return jax.default_backend() != "tpu"
        return self.recompute

    def class_of(self, primitive: str) -> str:
        """Return the class of a primitive, `"unchanged"` if it is not listed."""
        return self._by_name.get(arguments.text(primitive, "primitive"), "unchanged")

    def replace(
        self,
        *,
        half_results: bool | None = None,
        fp8_min_size: int | None = None,
        recompute: bool | None = None,
        **classes: str,
    ) -> "OpRules":
        """Return these rules with some primitives in another class.

        Args:
          half_results: as in the constructor; None leaves it.
          fp8_min_size: likewise.
          recompute: likewise.
          **classes: primitive name to class (`scatter_add` stands for `scatter-add`).
        """
        return OpRules(
            {**self._by_name, **_printed(classes)},
            self.half_results if half_results is None else half_results,
            self.fp8_min_size if fp8_min_size is None else fp8_min_size,
            self.recompute if recompute is None else recompute,
        )


def resolve_rules(
    rules: OpRules | Mapping[str, str] | None,
    policy: Policy | PolicyMap,
    compute_dtype: DTypeLike,
    half_results: bool | None = None,
    fp8_min_size: int | None = None,
    recompute: bool | None = None,
) -> OpRules:
    """Return the rules of a call of `autocast`, which documents what this raises."""
    if rules is None or isinstance(rules, Mapping):
        half_results = True if half_results is None else half_results
        default = OpRules.default(compute_dtype, half_results)
        classes = dict(default.classes) | _printed(rules or {})
        rules = dataclasses.replace(default, classes=classes)
    if not isinstance(rules, OpRules):
        raise TypeError(
            "Expected rules that map primitives to classes, such as {'tanh': "
            f"'float32'}}, or OpRules, got {rules!r}."
        )
    return rules.replace(
        half_results=half_results, fp8_min_size=fp8_min_size, recompute=recompute
    )


def _printed(classes: Classes) -> dict[str, str]:
    """Return classes by name as JAX prints it: some have a dash, as keywords cannot."""
    dashed = {x.replace("-", "_"): x for x in PRIMITIVES if "-" in x}
    return {dashed.get(name, name): c for name, c in _table(classes).items()}


def _table(classes: Classes) -> dict[str, str]:
    try:
        return dict(classes)
    except (TypeError, ValueError):
        raise TypeError(
            "Expected a table that maps primitives to classes, such as "
            f"{{'tanh': 'float32'}}, got {classes!r}."
        ) from None


def check_name(policy: Policy | PolicyMap | str, caller: str) -> None:
    """Warn of `"bfloat16"`, which names half parameters: these are nobody's here.

    Who writes them out, as in `"p=bf16,c=bf16,o=bf16"`, may share the policy.
    """
    if not isinstance(policy, str) or "=" in policy:
        return
    half = get_policy(policy)
    if half.param_dtype in dtypes.HALF_DTYPES:
        name = jnp.dtype(half.param_dtype).name
        warnings.warn(
            f"{caller} got the policy {policy!r}: half parameters, computation and "
            f"outputs. It casts no parameters. Write 'mixed_{name}', with float32 "
            f"outputs, or {str(half)!r} for what it does now.",
            stacklevel=4,  # takes_function is one
        )


class Regions:
    """The regions of a policy, and the paths that were asked for."""

    def __init__(self, policy: Policy | PolicyMap):
        self.policy = policy
        self.paths: set[str] = set()
        self._region = functools.cache(self._find_region)
        policies = policies_of(policy)
        self.any_fp8 = any(p.matmul_dtype == "fp8" for p in policies)
        self.any_float32 = any(p.compute_dtype == jnp.float32 for p in policies)

    def fit(self, scopes: Iterable[str]) -> None:
        """Read the patterns of the policy as those of a program with these scopes."""
        if isinstance(self.policy, PolicyMap):
            self.policy = self.policy.fitted(scopes)
            self._region = functools.cache(self._find_region)

    def key(self, scope: str) -> str:
        """Return what of a scope matters for what is inside it."""
        return scope if isinstance(self.policy, PolicyMap) else ""

    def at(self, scope: str, name_stack: str) -> Region:
        return self._region(join(scope, name_stack))

    def around_half_call(self, scope: str, name_stack: str) -> Region:
        """Return the region around the call of an `in_half` function."""
        outer, _, _ = f"/{join(scope, name_stack)}/".partition(f"/{IN_HALF}/")
        return self.at(outer.lstrip("/"), "")

    def check_unused(self, name: str, remedy: str = "") -> None:
        """Raise a ValueError if a pattern of the policy matches none of the paths."""
        if isinstance(self.policy, PolicyMap):
            found = "Paths are name scopes"
            if not any(self.paths):
                found = f"{name} has no name scope"
            remedy = (
                f" {found}: enter one around what is meant with jax.named_scope; "
                f"modules of flax.linen enter one each, of nnx none.{remedy}"
            )
            self.policy.check_unused(sorted(self.paths), remedy)

    def _find_region(self, path: str) -> Region:
        parts = path.split("/")
        closed = {
            AUTOCAST: "in an autocast of its own",
            IN_HALF: half_calls.REASON,
            FULL_PRECISION: "full_precision",
        }
        for mark, reason in closed.items():
            if mark in parts:
                return Region(is_half=False, is_closed=True, reason=reason)
        if not isinstance(self.policy, PolicyMap):
            return _region_of(self.policy)
        path = without_marks(path)
        self.paths.update(paths_around(path))
        policy, default = self.policy.at(path), self.policy.default
        if policy.output_dtype == default.output_dtype:
            return _region_of(policy)
        results = {jnp.float32: False, policy.compute_dtype: True}
        return _region_of(policy, results.get(policy.output_dtype))


def _region_of(policy: Policy, half_results: bool | None = None) -> Region:
    if policy.compute_dtype == jnp.float32:
        return Region(is_half=False, reason="its policy computes in float32")
    return Region(
        half_results=half_results,
        fp8=policy.matmul_dtype == "fp8",
        reduces_in_float32=policy.reduce_dtype == jnp.float32,
    )
