"""What a transformation takes: a function, a policy, arrays; or an error says why."""

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_lite._src import arguments, compat, dtypes, trees
from jmp_lite._src.policy import Policy, PolicyMap, get_policy, policies_of
from jmp_lite._src.trees import PyTree

F = TypeVar("F", bound=Callable[..., object])


def takes_function(transformation: F) -> F:
    """Name the shape of a call if it has the arguments of the function, too."""
    parameters = inspect.signature(transformation).parameters
    count = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    name = transformation.__name__
    given = "f, policy" if "policy" in parameters else "step"

    @functools.wraps(transformation)
    def checked(*args, **kwargs):
        if len(args) > count:
            raise TypeError(
                f"{name} expects at most {count} arguments before keywords, got "
                f"{len(args)}. {_call_shape(name, given)}"
            )
        if unknown := [key for key in kwargs if key not in parameters]:
            of_torch = name == "autocast"
            call = _call_shape(name, given)
            remedy = no_context_manager(name) if of_torch else call
            raise TypeError(
                f"{name} got an unexpected keyword argument {unknown[0]!r}: it has "
                f"{', '.join(parameters)}. {remedy}"
            )
        return transformation(*args, **kwargs)

    return checked  # pyright: ignore[reportReturnType] - of the same signature


def name_of(fun: object) -> str:
    """Return what to call a function in a message."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def check_function(
    fun: object, caller: str, policy: object = None, *, allows_modules: bool = False
) -> None:
    """Raise a TypeError that says what to do if this is no function to transform.

    `allows_modules` says whether modules of flax are functions, too.
    """
    got = f"{caller} expects a function, got {arguments.shown(fun)}"
    dtype = policy if isinstance(fun, str) else fun  # torch.autocast("cuda", dtype)
    if isinstance(dtype, type) and dtype in dtypes.HALF_DTYPES:
        fun = f"mixed_{dtype.__name__}"
    is_function = callable(policy) and not isinstance(policy, type)
    if isinstance(fun, Policy | PolicyMap | str) and is_function:
        name = name_of(policy)
        raise TypeError(
            f"{got} first, and the function {name} after it: write "
            f"{caller}({name}, {fun!r})."
        )
    if isinstance(fun, Policy | PolicyMap | str) and caller == "autocast":
        raise TypeError(
            f"{got}. A policy goes behind the function, autocast(f, policy), or into a "
            f"decorator by its name, @autocast(policy={fun!r}). "
            f"{no_context_manager(caller)}"
        )
    if not callable(fun):
        if callable(getattr(fun, "apply", None)):  # such as Transformed of Haiku
            raise TypeError(f"{got}, which has one: pass its .apply.")
        raise TypeError(f"{got}. {no_context_manager(caller)}")
    if allows_modules:
        return
    if compat.is_unbound_linen_module(fun):
        raise TypeError(
            f"{got}, a linen module, which computes in its method apply: write "
            f"{caller}(model.apply, ...)(variables, x). Or give it a policy: "
            "jmp_lite.linen.with_policy(model, policy)."
        )
    if any(map(compat.is_nnx_module, (fun, getattr(fun, "__self__", None)))):
        raise TypeError(_nnx_advice(f"{caller} got"))


def check_policy(
    policy: Policy | PolicyMap | str, caller: str
) -> tuple[Policy | PolicyMap, DTypeLike]:
    """Return the policy and the one half dtype that it computes in.

    A policy that computes in the dtype of a program written in float32 (or in float64,
    with float64 parameters) asks for nothing: its dtype is float32 (float64).
    """
    if any(map(trees.is_array, jax.tree.leaves(policy))):
        raise TypeError(
            f"{caller} got {type(policy).__name__} as its policy. {_call_shape(caller)}"
        )
    if not isinstance(policy, PolicyMap):
        policy = get_policy(policy)
    policies = policies_of(policy)
    computes = {p.compute_dtype for p in policies}
    halves = computes & set(dtypes.HALF_DTYPES)
    params = {p.param_dtype for p in policies}
    as_written = {jnp.float64} if params == {jnp.float64} else {jnp.float32}
    if len(halves) > 1 or computes - halves - as_written:
        raise ValueError(
            f"{caller} expects a policy that computes in float16 or in bfloat16 (and "
            "scopes that compute in float32), or in float32 alone; got "
            f"{', '.join(sorted(map(str, policies)))}. It narrows float32 and widens "
            "nothing."
        )
    return policy, (halves or as_written).pop()


def refuse_modules(args_and_kwargs: PyTree, who: str) -> None:
    """Raise a TypeError that says what to do if an argument is an nnx module."""
    leaves = jax.tree.leaves(args_and_kwargs, is_leaf=compat.is_nnx_module)
    if any(map(compat.is_nnx_module, leaves)):
        raise TypeError(_nnx_advice(f"{who} got"))


def check_arguments(args_and_kwargs: PyTree) -> None:
    refuse_modules(args_and_kwargs, "a function under autocast")
    for path, leaf in jax.tree.leaves_with_path(args_and_kwargs):
        if trees.is_number(leaf) or isinstance(leaf, jax.Ref) or callable(leaf):
            continue
        index = trees.key_path(path[1:])
        raise TypeError(
            f"A function under autocast got {leaf!r} as its argument {index!r}; "
            "expected arrays, numbers or functions. Bind other values with "
            "functools.partial. If a model holds such values, pass its arrays only "
            "(arrays, rest = equinox.partition(model, equinox.is_array)) and call "
            "equinox.combine(arrays, rest) in the function."
        )


def _call_shape(name: str, given: str = "f, policy") -> str:
    return (
        f"It returns a function of the arguments: write {name}({given})(*args), not "
        f"{name}({given}, *args)."
    )


def no_context_manager(caller: str) -> str:
    return (
        f"{caller} is not a context manager: it returns another function, as jax.jit "
        "does."
    )


def _nnx_advice(got: str) -> str:
    return (
        f"{got} an nnx module, whose changes of state (statistics, random streams) "
        "would be lost in the trace. Split it: graphdef, state = nnx.split(model); in "
        "the function, call nnx.merge(graphdef, state, copy=True), and return the "
        "nnx.state of it where it changes. To train, jmp_lite.nnx.with_policy(model, "
        "policy) keeps them."
    )
