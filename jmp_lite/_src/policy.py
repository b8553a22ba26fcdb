"""Policies: the dtypes of parameters, computation and outputs.

Policies and policy maps are frozen, hashable, picklable and static under `jit`.
"""

import dataclasses
import difflib
import functools
import itertools
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite._src import arguments, compat, dtypes, trees

T = TypeVar("T")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """The dtypes of parameters, computation and outputs.

    The casts change the floating arrays of a tree (bf16, f16, f32, f64). All other
    leaves are returned unchanged: integers, bools, complex numbers, fp8, PRNG keys,
    `float0`, `None`, Python scalars and other objects.

    Args:
      param_dtype: the dtype that parameters are stored in; a dtype or its name.
      compute_dtype: the dtype of the forward and backward pass.
      output_dtype: the dtype of a model's outputs.
      matmul_dtype: None, or `"fp8"`: large matrix products of `autocast` and of
        `with_policy` have fp8 operands, as in `fp8_dot_general`; the compute dtype must
        be bfloat16. Casts do not depend on it.
      reduce_dtype: None, or float32: under `autocast` and `with_policy`, the gradient
        of a parameter that is cast for a matrix product is the product's float32
        accumulator, and float32 where micro-batches and devices sum it. None rounds it
        to the compute dtype.

    Raises:
      ValueError: a name is unknown, a dtype is not floating or is fp8, which needs a
        scale, or the matmul dtype or reduce dtype does not fit.
      TypeError: an argument is neither a name nor a dtype.

    Examples:
      >>> policy = Policy("float32", jnp.float16, "float32")
      >>> policy.cast_to_compute({"w": jnp.ones(2), "step": 3})["w"].dtype
      dtype('float16')
      >>> str(policy)
      'p=full,c=f16,o=full'

    References:
      jmp (https://github.com/google-deepmind/jmp); Keras' mixed precision guide.
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike
    matmul_dtype: str | None = None
    reduce_dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            object.__setattr__(self, name, dtypes.parse_dtype(getattr(self, name)))
        arguments.one_of(self.matmul_dtype, "matmul_dtype", (None, "fp8"))
        if self.matmul_dtype is not None and self.compute_dtype != jnp.bfloat16:
            raise ValueError(
                "Matrix products in fp8 need the compute dtype bfloat16, got "
                f"{dtypes.dtype_name(self.compute_dtype)}: write "
                "'params=float32,compute=bfloat16,output=float32,matmul=fp8', or "
                "mixed_fp8."
            )
        object.__setattr__(self, "reduce_dtype", check_reduce_dtype(self.reduce_dtype))

    def cast_to_param(self, tree: T) -> T:
        """Cast the floating arrays of a tree to `param_dtype`."""
        return trees.cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Cast the floating arrays of a tree to `compute_dtype`."""
        return trees.cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Cast the floating arrays of a tree to `output_dtype`."""
        return trees.cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Return this policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def check_device(self, device: Any = None) -> str | None:
        """Warn if the compute dtype, or matrix products in fp8, are slow on a device.

        Args:
          device: a `jax.Device`; the default is the first local device.

        Returns:
          None if they are fast, otherwise the text of the warning.

        Examples:
          >>> Policy("full", "full", "full").check_device() is None
          True
        """
        reason = dtypes.slow_half_reason(self.compute_dtype, device)
        if self.matmul_dtype is not None:
            reason = dtypes.slow_fp8_reason(device) or reason
        if reason is not None:
            warnings.warn(f"{self}: {reason}.", stacklevel=2)
        return reason

    def __str__(self) -> str:
        """Return the short form of the policy, which `get_policy` parses."""
        param, compute, output = map(
            dtypes.dtype_name, (self.param_dtype, self.compute_dtype, self.output_dtype)
        )
        matmul = f",m={self.matmul_dtype}" if self.matmul_dtype else ""
        reduce = ",r=full" if self.reduce_dtype else ""
        return f"p={param},c={compute},o={output}{matmul}{reduce}"

    def __repr__(self) -> str:
        """Return an expression that evaluates to an equal policy."""
        return f"get_policy({str(self)!r})"


def check_reduce_dtype(dtype: DTypeLike | None) -> DTypeLike | None:
    if dtype is None:
        return None
    parsed = dtypes.parse_dtype(dtype)
    if parsed != jnp.float32:
        raise ValueError(
            "Expected the reduce dtype None (the compute dtype) or float32, got "
            f"{dtypes.dtype_name(parsed)}."
        )
    return parsed


# The first two are Keras' names; its layers keep float32 variables. Outputs are float32
# here. In Keras the user sets a float32 output on the last layer.
_NAMED_POLICIES = {
    "mixed_float16": ("full", "f16", "full"),
    "mixed_bfloat16": ("full", "bf16", "full"),
    "mixed_fp8": ("full", "bf16", "full", "fp8"),
}

_KNOWN = (
    f"Policies are named {', '.join(_NAMED_POLICIES)} and mixed, or written as "
    "'params=float32,compute=float16,output=float32'."
)

_GRAMMAR_KEYS = {
    "params": "param_dtype",
    "compute": "compute_dtype",
    "output": "output_dtype",
    "matmul": "matmul_dtype",
    "reduce": "reduce_dtype",
}
_GRAMMAR_KEYS |= {key[0]: field for key, field in _GRAMMAR_KEYS.items()}


def get_policy(policy: "str | Policy") -> Policy:
    """Return the policy that a string describes.

    The grammar is jmp's::

      "float16"                         all three dtypes, as jmp has it: parameters too
      "params=float32,compute=float16"  defaults: params=float32, compute=params,
      "p=f32,c=f16,o=f32"               output=compute
      "mixed_float16"                   Keras' name for p=f32, c=f16, o=f32
      "mixed"                           p=f32, o=f32, c=`recommended_half_dtype()`
      "mixed_fp8"                       p=f32, c=bf16, o=f32, and m=fp8: matrix products
                                        in fp8

    Args:
      policy: a string, or a `Policy`, which is returned unchanged.

    Returns:
      The policy.

    Raises:
      ValueError: the string has an unknown key or dtype; the message lists the known
        ones.
      TypeError: the argument is neither a string nor a `Policy`.

    Examples:
      >>> get_policy("compute=bfloat16, output=float32")
      get_policy('p=full,c=bf16,o=full')
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        got = f"Expected a Policy or its string, got {policy!r}."
        try:
            dtype = dtypes.parse_dtype(policy)
        except (TypeError, ValueError):
            dtype = None
        if dtype in dtypes.HALF_DTYPES:
            name = f"mixed_{jnp.dtype(dtype).name}"
            got += f" To compute in it with float32 parameters, write {name!r}."
        elif dtype in (jnp.float32, jnp.float64):
            got += f" To compute in it, write {jnp.dtype(dtype).name!r}."
        elif isinstance(policy, PolicyMap):
            got += " A PolicyMap is passed as it is, without get_policy."
        elif policy is None:
            got += f" {_KNOWN} No casts: 'float32'."
        else:
            others = compat.of_another_package(policy, Policy)
            got += others or f" {_KNOWN}"
        raise TypeError(got)
    name = policy.strip()
    if name == "mixed":
        return Policy(jnp.float32, dtypes.recommended_half_dtype(), jnp.float32)
    if name in _NAMED_POLICIES:
        return Policy(*_NAMED_POLICIES[name])
    if "=" not in name:
        try:
            dtype = dtypes.parse_dtype(name)
        except ValueError as error:
            raise ValueError(f"{error} {_KNOWN}") from None
        return Policy(dtype, dtype, dtype)
    given = {}
    for part in name.split(","):
        key, separator, value = part.partition("=")
        field = _GRAMMAR_KEYS.get(key.strip())
        if field is None or not separator or field in given:
            raise ValueError(
                f"Cannot read {part.strip()!r} in the policy {policy!r}: expected "
                "params=, compute= or output= (p=, c=, o=), each at most once, with a "
                f"dtype {dtypes.known_names()}; or matmul=fp8 (m=fp8), "
                "reduce=float32 (r=f32)."
            )
        given[field] = value.strip()
    given.setdefault("param_dtype", jnp.float32)
    given.setdefault("compute_dtype", given["param_dtype"])
    given.setdefault("output_dtype", given["compute_dtype"])
    return Policy(**given)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PolicyMap:
    """A policy for each leaf, chosen by its key path.

    Patterns are regular expressions over whole paths, such as the key path of a leaf
    (`"decoder/layers/0/kernel"`, the format of `jax.tree_util.keystr(simple=True,
    separator="/")`), the path of a module or that of a name scope. A pattern applies to
    what its path names and to everything inside: `"decoder"` and `"decoder/.*"` mean
    the same, `""` is everything. The first pattern that applies sets the policy.

    One map serves casts, `with_policy` and `autocast`. The layer of a linen model whose
    parameters are `"params/decoder/kernel"` is the module `"decoder"` and the scope
    `"Model/decoder"`: each of them names the other two, if it matches nothing itself.

    Args:
      default: the policy where no pattern applies; a `Policy` or its string.
      rules: a mapping of patterns to policies, in order of precedence.
      allow_unused: if False, a pattern that sets no policy raises an error.

    Raises:
      ValueError: a pattern is not a regular expression, or a policy is unknown; in
        the casts and `explain`: a pattern sets the policy of no leaf.
      TypeError: `rules` is not a mapping.

    Examples:
      >>> policy = PolicyMap("mixed_float16", {".*/norm": "full"})
      >>> params = {"dec": {"norm": {"scale": jnp.ones(2)}, "w": jnp.ones(2)}}
      >>> {path: str(dtype) for path, dtype in policy.explain(params).items()}
      {'dec/norm/scale': 'float32', 'dec/w': 'float16'}

    References:
      Keras' DTypePolicyMap, whose patterns must match whole paths, too.
    """

    default: Any  # accepts a policy or its string, stored as a `Policy`
    rules: Any = ()  # accepts a mapping, stored as a hashable tuple of pairs
    allow_unused: bool = False

    def __post_init__(self) -> None:
        rules = self.rules.items() if isinstance(self.rules, Mapping) else self.rules
        try:
            pairs = [(pattern, policy) for pattern, policy in rules]
        except (TypeError, ValueError):
            raise TypeError(
                f"Expected a mapping of patterns to policies, got {self.rules!r}."
            ) from None
        pairs = tuple((check_pattern(pattern), get_policy(p)) for pattern, p in pairs)
        arguments.flag(self.allow_unused, "allow_unused")
        object.__setattr__(self, "default", get_policy(self.default))
        object.__setattr__(self, "rules", pairs)

    def cast_to_param(self, tree: T) -> T:
        """Cast each floating array to the `param_dtype` of its policy."""
        return self._cast(tree, "param_dtype")

    def cast_to_compute(self, tree: T) -> T:
        """Cast each floating array to the `compute_dtype` of its policy."""
        return self._cast(tree, "compute_dtype")

    def cast_to_output(self, tree: T) -> T:
        """Cast each floating array to the `output_dtype` of its policy."""
        return self._cast(tree, "output_dtype")

    def with_output_dtype(self, output_dtype: DTypeLike) -> "PolicyMap":
        """Return this map with another output dtype in every policy."""
        default = self.default.with_output_dtype(output_dtype)
        rules = [(p, x.with_output_dtype(output_dtype)) for p, x in self.rules]
        return dataclasses.replace(self, default=default, rules=rules)

    def at(self, path: str) -> Policy:
        """Return the policy of a key path.

        Raises:
          TypeError: the path is not a string.
        """
        return self.match(path)[1] or self.default

    def match(self, path: str) -> tuple[str, Policy | None]:
        """Return the first pattern that applies to a path, and its policy or None."""
        arguments.text(path, "path")
        index = first_match([pattern for pattern, _ in self.rules], path)
        return ("", None) if index is None else self.rules[index]

    def explain(self, tree: Any, role: str = "compute") -> dict[str, np.dtype]:
        """Return the dtype that each array of a tree is cast to.

        Args:
          tree: any pytree.
          role: `"param"`, `"compute"` or `"output"`.

        Returns:
          A dict of key path to dtype, in the order of the leaves, without leaves that
          have no dtype.

        Raises:
          ValueError: the role is unknown; a pattern sets the policy of no leaf.
        """
        arguments.one_of(role, "role", ("param", "compute", "output"))

        def without_numbers(x):
            is_cast = trees.is_castable(x)
            return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_cast else x

        shapes = jax.tree.map(without_numbers, tree)
        cast = jax.tree.leaves(self._cast(shapes, f"{role}_dtype"))
        return {
            path: x.dtype
            for path, x in zip(trees.key_paths(tree), cast, strict=True)
            if trees.is_array(x) or isinstance(x, np.ndarray)
        }

    def check_unused(self, paths: Iterable[str], remedy: str = "") -> None:
        """Raise if a pattern sets the policy of none of these paths.

        Args:
          paths: key paths; `""` is the root.
          remedy: what to do, at the end of the message.

        Raises:
          ValueError: names the pattern and the nearest paths; never raised if
            `allow_unused` is set.
        """
        if isinstance(paths, str) or not np.iterable(paths):
            raise TypeError(arguments.wrong("paths", "key paths", paths))
        paths = [arguments.text(path, "each path") for path in paths]
        if self.allow_unused:
            return
        patterns = [pattern for pattern, _ in self.rules]
        remedy += " (allow_unused=True in a PolicyMap disables this check.)"
        check_patterns(patterns, paths, remedy)

    def fitted(self, paths: Iterable[str], model: str = "") -> "PolicyMap":
        """Return a map with the same policies, whose patterns match these paths.

        A pattern that matches none of them is compared without what is in front of a
        model: the collection of the parameters, and the scope of the model's class.

        Args:
          paths: key paths, paths of modules or of name scopes.
          model: the class of the model that paths of modules are in.

        Examples:
          >>> policy = PolicyMap("full", {"params/mlp": "mixed_float16"})
          >>> policy.fitted(["Net/mlp/up", "Net/head"]).rules[0][0]
          'Net/mlp'
        """
        known = dict.fromkeys(outer for path in paths for outer in paths_around(path))
        has_params, has_class = "params" in known, False
        # What a pattern may call a path: itself, that in its model, with its class.
        own, short, full = {path: path for path in known}, {}, {}
        for path in known:
            name, module = (model, path) if model else split_at_model(path)
            has_class = has_class or bool(name) and not has_params
            short[path] = path.partition("/")[2] if has_params else module
            full[path] = "/".join(filter(None, (name, module)))

        def fit(pattern: str) -> str:
            if any(applies(pattern, path) for path in known):
                return pattern
            wanted = [pattern, re.sub("^params(/|$)", "", pattern)]
            if not has_class:  # of two models, each has a class of its own
                wanted.append(re.sub(f"^{_CLASS}(/|$)", "", pattern))
            for asked, names in itertools.product(wanted, (own, short, full)):
                found = [path for path in known if applies(asked, names[path])]
                if found:
                    inner = {x for x in found if {*paths_around(x)[:-1]} & {*found}}
                    return "|".join(re.escape(x) for x in found if x not in inner)
            return pattern

        rules = tuple((fit(pattern), policy) for pattern, policy in self.rules)
        return dataclasses.replace(self, rules=rules)

    def _cast(self, tree: T, role: str) -> T:
        paths = trees.key_paths(tree)
        fitted = self.fitted(paths)
        fitted.check_unused(paths)
        return jax.tree.map_with_path(
            lambda path, x: trees.cast_floating(
                x, getattr(fitted.at(trees.key_path(path)), role)
            ),
            tree,
            is_leaf=trees.keeps_dtypes,
        )


def policies_of(policy: Policy | PolicyMap) -> list[Policy]:
    if not isinstance(policy, PolicyMap):
        return [policy]
    return [policy.default, *(of_rule for _, of_rule in policy.rules)]


def paths_around(path: str) -> list[str]:
    """Return the paths around a path, from the root on, and the path itself.

    Examples:
      >>> paths_around("decoder/norm")
      ['', 'decoder', 'decoder/norm']
    """
    parts = path.split("/") if path else []
    return ["/".join(parts[:i]) for i in range(len(parts) + 1)]


# The scope of a linen model is its class, or a method of it. linen numbers other
# modules, as Dense_0.
_CLASS = r"(?!\w*_\d+\b)([A-Z]\w*)"


@functools.lru_cache(maxsize=4096)
def split_at_model(path: str) -> tuple[str, str]:
    """Return the class of a linen model and the path of a module in it.

    Methods that have scopes of their own are left out. Without a model, the class is
    `""`.

    Examples:
      >>> split_at_model("loss/Net/mlp"), split_at_model("decoder/mlp")
      (('Net', 'mlp'), ('', 'decoder/mlp'))
      >>> split_at_model("Net/Net.encode/embed/embed.attend")
      ('Net', 'embed')
    """
    parts = path.split("/")
    for i, part in enumerate(parts):
        if found := re.fullmatch(rf"{_CLASS}(\.\w+)?", part):
            modules = [found[1]]
            for inner in parts[i + 1 :]:
                module, dot, _ = inner.partition(".")
                if not (dot and module == modules[-1]):
                    modules.append(module)
            return found[1], "/".join(modules[1:])
    return "", path


def pattern_of(layer: str) -> str:
    r"""Return a pattern that is a layer, whether it names a scope or a module.

    Examples:
      >>> pattern_of("loss/Net/mlp-1/down"), pattern_of("Net/embed.attend")
      ('Net/mlp-1/down', 'Net/embed')
      >>> pattern_of("squares.all")
      'squares\\.all'
    """
    scope = "/".join(filter(None, split_at_model(layer)))
    return re.escape(scope).replace(r"\-", "-")


@functools.lru_cache(maxsize=4096)
def applies(pattern: str, path: str) -> bool:
    """Return whether a pattern names a path or one around it.

    Examples:
      >>> applies("decoder", "decoder/norm"), applies("decoder/.*", "decoder")
      (True, True)
      >>> applies("norm", "decoder/norm"), applies("decoder/norm", "decoder")
      (False, False)
    """
    return any(
        re.fullmatch(pattern, outer) or (outer and re.fullmatch(pattern, f"{outer}/"))
        for outer in paths_around(path)
    )


def first_match(patterns: Iterable[str], path: str) -> int | None:
    return next((i for i, p in enumerate(patterns) if applies(p, path)), None)


def check_patterns(
    patterns: Sequence[str], paths: Iterable[str], remedy: str = ""
) -> None:
    """Raise if a pattern is the first that applies for none of these paths."""
    paths = list(paths)
    decided = {first_match(patterns, path) for path in paths}
    for index, pattern in enumerate(patterns):
        if index in decided:
            continue
        if matched := [path for path in paths if applies(pattern, path)]:
            earlier = next(p for p in patterns if applies(p, matched[0]))
            raise ValueError(
                f"The pattern {pattern!r} is never used: earlier patterns apply to all "
                f"of its paths, such as {matched[0]!r} ({earlier!r} does). The first "
                "pattern that applies decides: put narrower ones first."
            )
        known = {outer: None for path in paths for outer in paths_around(path)[1:]}
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.0)
        if near:  # else there is none but the root
            why = f" A pattern must match a whole path; the nearest are {near}."
            remedy = why + remedy
        raise ValueError(f"The pattern {pattern!r} matches no path.{remedy}")


def check_pattern(pattern: object) -> str:
    try:
        if not isinstance(pattern, str):
            raise TypeError("not a string")
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"Expected a regular expression over key paths, got {pattern!r}: {error}."
        ) from None
    return pattern


def cast_to_full(tree: T) -> T:
    """Cast the floating arrays of a tree to float32.

    Args:
      tree: any pytree.

    Returns:
      `cast_floating(tree, jnp.float32)`.

    Examples:
      >>> cast_to_full(jnp.ones(2, jnp.bfloat16)).dtype
      dtype('float32')
    """
    return trees.cast_floating(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Cast the floating arrays of a tree to `half_dtype()`: jmp's function.

    That is float16 on a CPU and a GPU. Write `trees.cast_floating(tree, dtype)` for the
    dtype that you train in.

    Args:
      tree: any pytree.

    Returns:
      `cast_floating(tree, half_dtype())`.

    Examples:
      >>> cast_to_half(jnp.ones(2)).dtype == dtypes.half_dtype()
      True
    """
    return trees.cast_floating(tree, dtypes.half_dtype())
