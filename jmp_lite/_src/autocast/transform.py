"""`autocast`, `full_precision`, `in_half`: the transformations themselves.

Limits: the function is traced in float32 and its jaxpr is rewritten, so checks of
dtypes in its Python code see float32, unless it is called by `in_half`. `pallas_call`,
`custom_linear_solve`, callbacks and other primitives that `control_flow` does not know
run unchanged; `explain` lists them.
"""

import collections
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jmp_lite._src import compat, dtypes, fp8
from jmp_lite._src.autocast import checks, half_calls, products, sums
from jmp_lite._src.autocast.analysis import Analyzer, AsWritten
from jmp_lite._src.autocast.emit import Emitter
from jmp_lite._src.autocast.options import OpRules, Regions, check_name, resolve_rules
from jmp_lite._src.autocast.rules import BOUNDARY
from jmp_lite._src.autocast.storage import Placed, Plan, walk
from jmp_lite._src.jaxprs import core, name_scopes, repeats
from jmp_lite._src.jaxprs.tracing import Traced, trace
from jmp_lite._src.policy import (
    Policy,
    PolicyMap,
    check_reduce_dtype,
)
from jmp_lite._src.trees import PyTree

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., object])


@overload
def autocast(
    fun: Callable[P, R],
    policy: Policy | PolicyMap | str = "mixed",
    *,
    rules: OpRules | Mapping[str, str] | None = None,
    half_results: bool | None = None,
    fp8_min_size: int | None = None,
    recompute: bool | None = None,
) -> Callable[P, R]: ...
@overload
def autocast(
    *,
    policy: Policy | PolicyMap | str = "mixed",
    rules: OpRules | Mapping[str, str] | None = None,
    half_results: bool | None = None,
    fp8_min_size: int | None = None,
    recompute: bool | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@checks.takes_function
def autocast(
    fun: Any = ...,
    policy: Policy | PolicyMap | str = "mixed",
    *,
    rules: OpRules | Mapping[str, str] | None = None,
    half_results: bool | None = None,
    fp8_min_size: int | None = None,
    recompute: bool | None = None,
) -> Any:
    """Return a function that computes in half precision where that is safe.

    Matrix products run in the compute dtype, and their results are stored in it. All
    else is computed in float32, and stored in half where a product reads it, or as a
    sum of such arrays. Where linear algebra, an order, a difference or a number near 1
    needs the digits of a product's result, that is float32. Only float32 is rounded:
    other dtypes, products with a `precision`, explicit conversions and `full_precision`
    regions stay as the program has them. Gradients of float32 parameters are float32,
    from `grad(autocast(f))` and from `autocast(grad(f))`; the second returns the
    float32 accumulator of the products without rounding it.

    In float16, train with a loss scale (`scale_aware`): autocast does not add one.

    Call it under `jax.jit`. Elsewhere each call traces the function again, since it may
    read other values than before, and compiles the loops and jitted functions in it:
    milliseconds, where a call of a jitted function takes microseconds.

    Args:
      fun: any JAX function, with any control flow. Without it, `autocast` returns a
        decorator: `@autocast(policy="mixed_bfloat16")`.
      policy: a policy or its string; its `compute_dtype` is float16 or bfloat16, or
        float32, under which the function runs as it is written (`"float64"` does the
        same). A `PolicyMap` has patterns over name-scope paths
        (`"Model/decoder/attention"`: each module of linen and Haiku enters a scope, a
        linen model that of its class, modules of nnx none); `""` is everything. A
        policy that computes in float32 leaves its scope unchanged. A rule with another
        `output_dtype` than the default has results of matrix products in that dtype in
        its scope: `PolicyMap("p=f32,c=f16,o=f16", {"head":
        "p=f32,c=f16,o=f32"})` keeps results in float32 there.
      rules: primitives in another class than by default: `{"tanh": "float32"}`; or a
        whole table, `OpRules`.
      half_results: True: results of matrix products are half wherever anything but a
        return reads them, as in torch.amp; the default. False, the safe form for
        float16, which ends at 65504: only if another product alone reads them. It moves
        more bytes, and on GPUs its convolutions run in float32.
        `numerics.advise` measures which layers come near the end of the range. Scopes
        whose policy says otherwise are not affected.
      fp8_min_size: the least size of each dimension of a product in fp8, if the policy
        has these (`"mixed_fp8"`); the default is 256. Sizes must be multiples of 16,
        and products have no batch dimensions; all others are bfloat16.
      recompute: whether the backward pass computes norms and activations again, in
        float32, from half values that are stored anyway. No product is computed twice.
        The default is True, but False if JAX' default backend is a TPU. What is inside
        `jax.checkpoint` is not affected.

    Returns:
      A function of the same signature and the same output dtypes. Arguments that are
      numbers, functions or `None` reach `fun` as they are.

    Raises:
      TypeError: `fun` is not callable or is an nnx module; `rules`, `half_results`,
        `fp8_min_size` or `recompute` is of another type; in a call: an argument is
        neither array, number nor function.
      ValueError: the policy computes in two kinds of half, or in a wider dtype than
        its parameters have; in a call: a pattern of the policy matches no scope.

    Warns:
      UserWarning: in a call: no product runs in half, or none in fp8 though the policy
        has fp8; most FLOPs of its products are of complex numbers; the device has no
        fp8, so that it is slow.

    Examples:
      >>> def f(w, x):
      ...     return jax.nn.softmax(x @ w)
      >>> w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
      >>> jaxpr = jax.make_jaxpr(autocast(f, "mixed_bfloat16"))(w, x)
      >>> "bf16[4,8] = dot_general" in str(jaxpr), jaxpr.out_avals[0].dtype
      (True, dtype('float32'))

      >>> @autocast(policy="mixed_bfloat16")
      ... def product(w, x):
      ...     return x @ w
      >>> "bf16" in str(jax.make_jaxpr(product)(w, x))
      True

    References:
      torch.amp.autocast; TensorFlow's auto_mixed_precision graph pass.
    """
    if fun is ...:
        options = {
            "policy": policy,
            "rules": rules,
            "half_results": half_results,
            "fp8_min_size": fp8_min_size,
            "recompute": recompute,
        }
        return _Decorator(autocast, **options)
    checks.check_function(fun, "autocast", policy)
    check_name(policy, "autocast")
    policy, compute_dtype = checks.check_policy(policy, "autocast")
    options = half_results, fp8_min_size, recompute
    rules = resolve_rules(rules, policy, compute_dtype, *options)

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        if compat.is_linen_init():  # what is created in a trace does not leave it
            return fun(*args, **kwargs)
        if compute_dtype not in dtypes.HALF_DTYPES:
            if isinstance(policy, PolicyMap):  # whose patterns must match scopes
                plan_call(fun, policy, compute_dtype, rules, args, kwargs)
            with jax.named_scope(name_scopes.AUTOCAST), half_calls.outside():
                return fun(*args, **kwargs)
        planned = plan_call(fun, policy, compute_dtype, rules, args, kwargs)
        if rules.lowers_anything and (text := planned.what_is_missing()):
            warnings.warn(text, stacklevel=2)
        elif planned.analyzer.regions.any_fp8:
            fp8.warn_if_slow()
        with jax.named_scope(name_scopes.AUTOCAST), half_calls.outside():
            return planned.run()

    return wrapped


# What JAX raises if Python code needs the value of a traced array.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def full_precision(fun: Callable[P, R]) -> Callable[P, R]:
    """Return a function that `autocast` leaves alone: all in it runs as written.

    Args:
      fun: any function.

    Returns:
      The same function, marked by a name scope.

    Raises:
      TypeError: `fun` is not callable.

    Examples:
      >>> def f(x):
      ...     return x @ x, full_precision(jnp.dot)(x, x)
      >>> half, full = autocast(f, "mixed_bfloat16")(jnp.float32([[1.01, 0.0]] * 2))
      >>> bool(full[0, 0] == jnp.float32(1.01) ** 2), bool(half[0, 0] == full[0, 0])
      (True, False)
    """
    is_linen = compat.is_unbound_linen_module(fun)
    checks.check_function(fun, "full_precision", allows_modules=not is_linen)

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        with jax.named_scope(name_scopes.FULL_PRECISION), half_calls.outside():
            return fun(*args, **kwargs)

    return wrapped


def in_half(
    fun: Callable[P, R], *, except_: str | int | Iterable[str | int] = ()
) -> Callable[P, R]:
    """Return a function that `autocast` calls in half precision, as it is written.

    Use it for a kernel that demands half: flash attention of cuDNN, of Pallas, splash
    attention. Under `autocast`, `fun` gets its float32 arrays in the compute dtype of
    the policy, and is not looked into. Its half results are values that autocast holds
    in half, as those of matrix products, and float32 for the dtypes of the program. Its
    gradients flow, by the derivative rules that it has; a gradient of what several
    operations read is summed in float32. A finite number below the range of half, as in
    a mask, becomes the lowest number of half.

    Where no autocast traces, it is `fun` itself; so it is in `full_precision`, in
    scopes whose policy computes in float32, and if no argument is float32.

    Args:
      fun: any JAX function. Arguments that are not arrays reach it as they are, and so
        do arrays of other dtypes.
      except_: arguments that stay float32 (scales, statistics, a bias), by name or
        position.

    Returns:
      A function of the same signature.

    Raises:
      TypeError: `fun` is not callable, or is an nnx module; `except_` holds neither
        names nor positions; in a call: an argument is an nnx module.
      ValueError: `fun` has no argument of a name or position in `except_`; in a call
        under autocast: `fun` takes no float32, in a scope that computes in float32.

    Examples:
      >>> def kernel(q, k, v):
      ...     assert q.dtype == jnp.bfloat16, "a kernel for bfloat16"
      ...     return jax.nn.dot_product_attention(q, k, v)
      >>> def attend(w, x):
      ...     return in_half(kernel)(x @ w, x, x)
      >>> w, x = jnp.eye(8), jnp.ones((1, 4, 2, 8))
      >>> jax.eval_shape(autocast(attend, "mixed_bfloat16"), w, x).dtype
      dtype('float32')

    References:
      torch.amp.custom_fwd(cast_inputs=...).
    """
    checks.check_function(fun, "in_half")
    is_excepted = half_calls.excepted(except_, fun, checks.name_of(fun))

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        how = half_calls.current()
        if how is None:
            return fun(*args, **kwargs)
        checks.refuse_modules((args, kwargs), "a function of in_half")
        return half_calls.call(fun, checks.name_of(fun), args, kwargs, how, is_excepted)

    return wrapped


def sums_in_float32(fun: Callable[P, R], reduce_dtype: Any = None) -> Callable[P, R]:
    """Return a function of the same values whose gradients are summed in float32.

    Use it for code that casts to half precision by hand or with
    `policy.cast_to_compute`; `autocast` and `with_policy` do this already. The gradient
    of a value that is broadcast, repeated, gathered or used many times is a sum. JAX
    computes it in the dtype of the value: the gradient of a bfloat16 bias stops growing
    after a few hundred rows. Here these sums are float32. Values, the dtypes of values
    and gradients, and sums in the forward pass do not change.

    Args:
      fun: any JAX function of arrays that computes in half precision somewhere.
      reduce_dtype: as in `Policy`. float32: where a float32 argument is cast for a
        matrix product, its gradient is the product's accumulator. None: it is rounded
        to half.

    Returns:
      A function of the same signature.

    Raises:
      TypeError: `fun` is not callable or is an nnx module.
      ValueError: another reduce dtype.

    Warns:
      UserWarning: `fun` needs concrete values (an `if` on an array), which `grad` has
        outside of `jit`: its gradients are summed as JAX does it.

    Examples:
      >>> def loss(table, rows):
      ...     return table.astype(jnp.bfloat16)[rows].astype(jnp.float32).mean()
      >>> table, rows = jnp.ones(1), jnp.zeros(1024, jnp.int32)
      >>> jax.grad(loss)(table, rows), jax.grad(sums_in_float32(loss))(table, rows)
      (Array([0.25], dtype=float32), Array([1.], dtype=float32))
    """
    checks.check_function(fun, "sums_in_float32")
    reduces_in_float32 = check_reduce_dtype(reduce_dtype) is not None

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        if not compat.is_tracing():  # so no gradient is taken
            return fun(*args, **kwargs)
        try:
            traced = trace(fun, args, kwargs)
        except NEEDS_VALUES:
            traced = None
        if traced is None:
            # Under jit, this raises JAX' error for the caller's own function. Outside
            # of it, `grad` has concrete values.
            out = fun(*args, **kwargs)
            warnings.warn(
                f"{checks.name_of(fun)} needs the concrete value of an array (an if, a "
                "float()): its gradients are summed in the dtype of each value. Use "
                "jax.lax.cond or jnp.where, and they are summed in float32.",
                stacklevel=2,
            )
            return out
        as_written = AsWritten(reduces_in_float32=reduces_in_float32)
        plan = as_written.plan_closed(traced.closed)
        outs = Emitter(as_written).run(plan, plan.half_out, *traced.args)
        return traced.restore(_as_arrays(outs))

    return wrapped


def _as_arrays(outs: Iterable[ArrayLike]) -> list[jax.Array]:
    """Return results as arrays; JAX has kinds of its own for constants in a jaxpr."""
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in outs]


class PlannedCall:
    """A function traced on its arguments, and the plan for it."""

    def __init__(self, name: str, traced: Traced, analyzer: Analyzer, plan: Plan):
        self.name, self.traced = name, traced
        self.analyzer, self.plan = analyzer, plan

    def run(self) -> PyTree:
        """Return what the function returns, in the dtypes that it would have."""
        return self.traced.restore(self.arrays(self.traced.args))

    def arrays(self, args: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the arrays of what the function returns, of arguments as traced."""
        half_out = (False,) * len(self.plan.outs)
        args = list(map(sums.in_context, args))
        fun = functools.partial(Emitter(self.analyzer).run, self.plan, half_out)
        jaxpr = self.plan.jaxpr
        is_long = len(jaxpr.eqns) >= repeats.LEAST_EQNS and not jaxpr.effects
        is_shared = is_long and compat.is_differentiating()
        return _as_arrays(repeats.run(fun, args) if is_shared else fun(*args))

    def what_is_missing(self) -> str:
        """Return a warning of a precision of the policy that no product has, or ""."""
        equations = walk(self.plan, has_places=False)
        runs_half = [
            of.plan.is_half_product or of.plan.rule is BOUNDARY for of in equations
        ]
        is_half = any(products.is_half_product(of.eqn) for of in equations)
        if is_half and not any(runs_half):
            remedy = (
                "It casts what is float32, by hand, by the `dtype` of its layers, by "
                "with_policy or in an autocast of its own: leave out that or this."
            )
            if any(map(core.is_half, self.plan.jaxpr.invars)):
                remedy = (
                    "If its parameters are stored in half, norms and the loss are in "
                    "half, too: begin it with params = jmp_lite.cast_to_full(params)."
                )
            return (
                f"autocast: the products of {self.name} are in half as it is written. "
                f"{remedy}"
            )
        if not any(runs_half):
            why = "it has no matrix product"
            if kept := self._kept():
                why = f"its matrix products are left as they are ({kept})"
            text = f"autocast: no product of {self.name} runs in half: {why}."
            return f"{text} {_REAL_PARTS}" if _complex_share(equations) > 0.5 else text
        if (share := _complex_share(equations)) > 0.5:
            of_all = f"{share:.0%} of the matrix-product FLOPs of {self.name}"
            why = f"as they are: {products.COMPLEX}"
            return f"autocast leaves {of_all} {why}. {_REAL_PARTS}"
        has_fp8 = any(of.plan.rule.is_fp8 for of in equations)
        if not self.analyzer.regions.any_fp8 or has_fp8:
            return ""
        return f"autocast put no matrix product of {self.name} in fp8: {self._kept()}."

    def _kept(self) -> str:
        kept = collections.Counter()
        for of in walk(self.plan):
            count = 0 if of.plan.bodies else products.count(of.eqn) * of.calls
            if count:
                kept[of.reason] += count
        return "; ".join(f"{n} × {reason}" for reason, n in kept.most_common())


_REAL_PARTS = (
    "No half dtype is complex. Compute real and imaginary parts, with real products: "
    "Re(C @ x) is C.real @ x.real - C.imag @ x.imag. If complex products are meant, "
    "mark them with full_precision."
)


def _complex_share(equations: Iterable[Placed]) -> float:
    """Return the share of the FLOPs of products that stay complex."""
    total = in_complex = 0
    for of in equations:
        flops = products.flops(of.eqn) * of.times
        total += flops
        in_complex += flops if of.plan.reason == products.COMPLEX else 0
    return in_complex / total if total else 0.0


def plan_call(
    fun: Callable[..., PyTree],
    policy: Policy | PolicyMap,
    compute_dtype: DTypeLike,
    rules: OpRules,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    *,
    without_refs: bool = False,
) -> PlannedCall:
    """Trace a call, and decide what runs in half."""
    checks.check_arguments((args, kwargs))
    regions = Regions(policy)
    analyzer = Analyzer(rules, regions, compute_dtype)
    traced = analyzer.trace(fun, args, kwargs, without_refs=without_refs)
    plan = analyzer.plan_closed(traced.closed)
    regions.check_unused(checks.name_of(fun))
    return PlannedCall(checks.name_of(fun), traced, analyzer, plan)


class _Decorator(functools.partial):
    """What `autocast` returns without a function."""

    def __enter__(self, *_: object) -> NoReturn:
        raise TypeError(
            f"autocast expects a function. {checks.no_context_manager('autocast')}"
        )

    __exit__ = __enter__
