"""Every program of the corpus holds up under autocast, in both kinds of half."""

import functools
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from autocast_corpus import CHECKS, PROGRAMS, Program
from autocast_corpus.program import DTYPES, POLICIES, relative_error

from jmp_lite import OpRules, autocast

# The others are asked in both: these take the longest, and what they ask is not about
# the kind of half.
_HALVES = {
    "eager": ["f16"],
    "identity": ["bf16"],
    "jvp": ["f16"],
    "vmap_inside": ["bf16"],
    "vmap_outside": ["f16"],
}


# `make test` asks these of each program, in one kind of half, by turns. They share what
# they trace and compile.
_SHORT = {"jit", "products", "casts", "grad_inside", "grad_products", "grad_casts"}
_SHORT |= {"sums"}


def _marks(program: Program, half: str, check: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.standard_promotion] if program.third_party else []
    its_half = list(POLICIES)[PROGRAMS.index(program) % len(POLICIES)]
    return marks if check in _SHORT and half == its_half else [*marks, pytest.mark.full]


def _cases() -> list[Any]:
    return [
        pytest.param(
            program,
            half,
            check,
            id=f"{program.name}-{half}-{check}",
            marks=_marks(program, half, check),
        )
        for program in PROGRAMS
        for half in POLICIES
        for check in CHECKS
        if check not in program.without
        if half in _HALVES.get(check, POLICIES)
    ]


@pytest.mark.parametrize(("program", "half", "check"), _cases())
def test_program(program: Program, half: str, check: str) -> None:
    with program.context():
        _RUN[check](program, half)


def _check_eager(program: Program, half: str) -> None:
    fun, args = _made(program)
    out = autocast(fun, POLICIES[half])(*args)
    _assert_same_avals(out, _value(program))
    _assert_close(out, _value(program), half, program.tolerance)


def _check_jit(program: Program, half: str) -> None:
    out = _cast(program, half)(*_made(program)[1])
    _assert_same_avals(out, _value(program))
    _assert_close(out, _value(program), half, program.tolerance)


def _check_products(program: Program, half: str) -> None:
    jaxpr = _jaxpr(_cast(program, half), program)
    name = jnp.dtype(DTYPES[half]).name
    half_ones = filter(jaxprs.is_half, jaxprs.products(jaxpr))
    assert {jaxprs.operand_dtypes(eqn) for eqn in half_ones} == {(name, name)}
    assert not jaxprs.not_lowered(jaxpr)


def _check_grad_products(program: Program, half: str) -> None:
    for grad in (_grad_outside(program, half), _grad_inside(program, half)):
        assert not jaxprs.not_lowered(_jaxpr(grad, program, SIGNED))


def _check_sums(program: Program, half: str) -> None:
    for grad in (_grad_outside(program, half), _grad_inside(program, half)):
        assert not jaxprs.half_sums(_jaxpr(grad, program, SIGNED))


def _check_casts(program: Program, half: str) -> None:
    plain = jaxprs.wasted_casts(_jaxpr(_plain(program), program))
    low = jaxprs.wasted_casts(_jaxpr(_cast(program, half), program))
    assert low == plain


def _check_grad_casts(program: Program, half: str) -> None:
    # Of autocast(grad(f)): the backward pass of grad(autocast(f)) is JAX's, where two
    # products that share a cotangent cast it twice.
    plain = jaxprs.wasted_casts(_jaxpr(_plain_grad(program), program, SIGNED))
    inside = _jaxpr(_grad_inside(program, half), program, SIGNED)
    assert jaxprs.wasted_casts(inside) == plain


def _check_identity(program: Program, half: str) -> None:
    fun, args = _made(program)
    rules = OpRules.default(DTYPES[half])
    rules = OpRules([(p, c) for p, c in rules.classes if c != "half"])
    same = autocast(fun, POLICIES[half], rules=rules)
    assert DTYPES[half] not in jaxprs.dtypes(jaxprs.trace(same, *args))
    assert bitwise.raw_bits(_jit(same)(*args)) == bitwise.raw_bits(_value(program))


def _check_vmap_outside(program: Program, half: str) -> None:
    fun, args = _made(program)
    fun = _batched(autocast(fun, POLICIES[half]), len(args))
    out = _jit(fun)(*_stacked(args))
    _assert_close(out, _batch_value(program), half, program.tolerance)


def _check_vmap_inside(program: Program, half: str) -> None:
    fun, args = _made(program)
    fun = autocast(_batched(fun, len(args)), POLICIES[half])
    out = _jit(fun)(*_stacked(args))
    _assert_close(out, _batch_value(program), half, program.tolerance)


def _check_jvp(program: Program, half: str) -> None:
    fun, args = _made(program)
    out, tangent = _jit(_pushed(autocast(fun, POLICIES[half])))(*args)
    expected, expected_tangent = _pushed_value(program)
    _assert_same_avals(tangent, expected_tangent)
    _assert_close(out, expected, half, program.tolerance)
    _assert_close(tangent, expected_tangent, half, program.grad_tolerance)


def _check_grad_outside(program: Program, half: str) -> None:
    grad = _grad_outside(program, half)(*_made(program)[1], SIGNED)
    _assert_close_gradient(program, half, grad)


def _check_grad_inside(program: Program, half: str) -> None:
    _, grad = _grad_inside(program, half)(*_made(program)[1], SIGNED)
    _assert_close_gradient(program, half, grad)


def _check_one_sign(program: Program, half: str) -> None:
    args = *jax.tree.map(_positive, _made(program)[1]), POSITIVE
    _, expected = _plain_grad(program)(*args)
    outside, inside = _grad_outside(program, half), _grad_inside(program, half)
    for grad in (outside(*args), inside(*args)[1]):
        _assert_close(grad, expected, half, program.grad_tolerance)


def _positive(x: Any) -> Any:
    return jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _assert_close_gradient(program: Program, half: str, grad: Any) -> None:
    expected = _gradient(program)
    _assert_same_avals(grad, expected)
    _assert_close(grad, expected, half, program.grad_tolerance)


# Code for tiny arrays need not be good: that halves what compiling costs.
_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


# What is traced and compiled once, for several checks ask for it: the same jitted
# function answers from its cache.


@functools.cache
def _made(program: Program) -> tuple[Any, tuple[Any, ...]]:
    return program.make()


@functools.lru_cache(maxsize=2)
def _plain(program: Program) -> Any:
    return _jit(_made(program)[0])


@functools.lru_cache(maxsize=2)
def _plain_grad(program: Program) -> Any:
    return _jit(jax.value_and_grad(_loss(_made(program)[0])))


@functools.lru_cache(maxsize=2)
def _cast(program: Program, half: str) -> Any:
    return _jit(autocast(_made(program)[0], POLICIES[half]))


@functools.lru_cache(maxsize=2)
def _grad_outside(program: Program, half: str) -> Any:
    return _jit(jax.grad(_loss(autocast(_made(program)[0], POLICIES[half]))))


@functools.lru_cache(maxsize=2)
def _grad_inside(program: Program, half: str) -> Any:
    grad = jax.value_and_grad(_loss(_made(program)[0]))
    return _jit(autocast(grad, POLICIES[half]))


def _jaxpr(fun: Any, program: Program, *more: Any) -> Any:
    """Return the open jaxpr of a jitted function on the arguments of a program."""
    return jaxprs.opened(fun.trace(*_made(program)[1], *more).jaxpr)


# What float32 says.


@functools.cache
def _value(program: Program) -> Any:
    return _plain(program)(*_made(program)[1])


@functools.cache
def _batch_value(program: Program) -> Any:
    fun, args = _made(program)
    return _jit(_batched(fun, len(args)))(*_stacked(args))


@functools.cache
def _pushed_value(program: Program) -> Any:
    fun, args = _made(program)
    return _jit(_pushed(fun))(*args)


@functools.cache
def _gradient(program: Program) -> Any:
    return _plain_grad(program)(*_made(program)[1], SIGNED)[1]


# What is done to a function.


def _batched(fun: Any, count: int) -> Any:
    return jax.vmap(fun, in_axes=(0, *[None] * (count - 1)))


def _stacked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    first = jax.tree.map(
        lambda x: jnp.stack([x, x * jnp.asarray(0.9, x.dtype)]), args[0]
    )
    return first, *args[1:]


def _pushed(fun: Any) -> Any:
    """Return the function that gives a function's value and directional derivative."""

    def pushed(first, *rest):
        leaves, tree = jax.tree.flatten(first)
        tangent = tree.unflatten([_ramp(x, i) for i, x in enumerate(leaves)])
        return jax.jvp(lambda first: _floats(fun(first, *rest)), (first,), (tangent,))

    return pushed


# What is added to the weights of outputs, which are from -1 to 1.
SIGNED, POSITIVE = np.float32(0), np.float32(2)


def _loss(fun: Any) -> Any:
    """Return a function of scalar value: the outputs, each with a weight of its own."""

    def loss(*args):
        *args, offset = args
        outs = _floats(fun(*args))
        terms = [
            jnp.sum(x * (_ramp(x, i) + offset.astype(x.dtype))).astype(jnp.float32)
            for i, x in enumerate(outs)
        ]
        return sum(terms[1:], terms[0])

    return loss


def _floats(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def _ramp(x: Any, seed: int) -> Any:
    ramp = np.cos(np.arange(x.size, dtype=np.float64) * 0.7 + seed)
    return jnp.asarray(ramp.reshape(x.shape), x.dtype)


# How results are compared.


def _assert_same_avals(tree: Any, expected: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    assert bitwise.avals(tree) == bitwise.avals(expected)


def _assert_close(tree: Any, expected: Any, half: str, roundoffs: float) -> None:
    error = relative_error(_floats(tree), _floats(expected))
    roundoff = float(jnp.finfo(DTYPES[half]).eps) / 2
    assert error < roundoffs * roundoff, f"{error / roundoff:.1f} roundoffs"


_RUN = {
    "eager": _check_eager,
    "jit": _check_jit,
    "products": _check_products,
    "grad_products": _check_grad_products,
    "casts": _check_casts,
    "grad_casts": _check_grad_casts,
    "identity": _check_identity,
    "vmap_outside": _check_vmap_outside,
    "vmap_inside": _check_vmap_inside,
    "jvp": _check_jvp,
    "grad_outside": _check_grad_outside,
    "grad_inside": _check_grad_inside,
    "one_sign": _check_one_sign,
    "sums": _check_sums,
}
