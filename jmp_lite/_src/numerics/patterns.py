"""Patterns for layers: scopes for `autocast`, modules for linen's `with_policy`.

linen enters a scope with the name of each module; the outermost module has no name, and
a scope with the name of its class: the scope of the module `"mlp/down"` of a `Net` is
`"Net/mlp/down"`. Methods other than `__call__` have another: `"Net/embed.attend"`.
"""

import dataclasses
import re
from collections.abc import Iterable

from jmp_lite._src.policy import PolicyMap, applies, paths_around

# A class, not one that linen has numbered to name a module: Dense_0.
_CLASS = re.compile(r"(?!\w*_\d+(\.|$))([A-Z]\w*)(\.\w+)?")
_METHOD = re.compile(r"(\w+)\.\w+")


def pattern_of(layer: str) -> str:
    r"""Return the pattern of a layer that matches its scope and its linen module.

    Examples:
      >>> pattern_of("Net/mlp_1/down"), pattern_of("Net/embed.attend")
      ('(Net/)?mlp_1/down', '(Net/)?embed(\\.attend)?')
      >>> pattern_of("squares")
      'squares'
    """
    top, rest = _split(layer)
    if not top:
        return _escape(layer)
    if not rest:
        return f"({_escape(top)})?"
    pattern, before = f"({_escape(top)}/)?", ""
    for i, part in enumerate(rest.split("/")):
        method = _METHOD.fullmatch(part)
        slash = "/" if i else ""
        if method and method[1] == before:  # a method that the module itself calls
            pattern += f"({slash}{_escape(part)})?"
        elif method:
            before = method[1]
            pattern += f"{slash}{before}({_escape(part.removeprefix(before))})?"
        else:
            before = part
            pattern += slash + _escape(part)
    return pattern


def exact_pattern_of(layer: str) -> str:
    r"""Return `pattern_of(layer)`, but one for a model itself that only it matches.

    Examples:
      >>> exact_pattern_of("Net"), exact_pattern_of("Net/mlp")
      ('Net', '(Net/)?mlp')
    """
    return _escape(layer) if part_of_model(layer) == "" else pattern_of(layer)


def part_of_model(layer: str) -> str | None:
    """Return the path of a module in its linen model; None if there is no model."""
    top, rest = _split(layer)
    return rest if top else None


def models_in(layers: Iterable[str]) -> set[str]:
    """Return the classes of the models of linen that layers are in.

    Examples:
      >>> sorted(models_in(["loss/Net/mlp", "Net.encode", "Critic/Dense_0", "loss"]))
      ['Critic', 'Net']
    """
    found = (map(_CLASS.fullmatch, layer.split("/")) for layer in layers)
    return {next((m[2] for m in matches if m), "") for matches in found} - {""}


def is_inside(layer: str, layers: Iterable[str], several_models: bool) -> bool:
    """Return whether the patterns of some layers apply to a layer.

    Unless there are several models, the rule of a model is `""`.
    """
    outer = {x if several_models or part_of_model(x) != "" else "" for x in layers}
    return not outer.isdisjoint(paths_around(layer))


def fit(policy: PolicyMap, layers: Iterable[str]) -> PolicyMap:
    """Return a policy whose patterns for modules of linen match scopes as well.

    Patterns that match one of these layers, or nothing, are unchanged.
    """
    paths = {path for layer in layers for path in paths_around(layer)}
    splits = {_split(path) for path in paths if _split(path)[0]}

    def fitted(pattern):
        if any(applies(pattern, path) for path in paths):
            return pattern
        tops = {top for top, rest in splits if applies(pattern, rest)}
        if not tops:
            return pattern
        return f"(({'|'.join(map(_escape, sorted(tops)))})(/|$))?({pattern})"

    rules = tuple((fitted(pattern), p) for pattern, p in policy.rules)
    return dataclasses.replace(policy, rules=rules)


def _split(layer: str) -> tuple[str, str]:
    """Return the scopes up to that of the model, and the path of a module in it."""
    parts = layer.split("/")
    for i, part in enumerate(parts):
        if found := _CLASS.fullmatch(part):
            end, own_method = i + 1, re.compile(rf"{found[2]}\.\w+")
            while end < len(parts) and own_method.fullmatch(parts[end]):
                end += 1
            return "/".join(parts[:end]), "/".join(parts[end:])
    return "", layer


def _escape(layer: str) -> str:
    return re.escape(layer).replace(r"\-", "-")
