"""Every program of the corpus holds up under autocast, in both kinds of half."""

import functools
from collections import Counter
from typing import Any

import bitwise
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from autocast_corpus import CHECKS, PROGRAMS, Program
from autocast_corpus.program import DTYPES, POLICIES, relative_error

from jmp_lite import autocast
from jmp_lite.ops import OpRules

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
# they trace and compile. The program of the gradient gives the values as well: the one
# of the values alone is compiled where there is no gradient.
_SHORT = {"products", "casts", "grad_inside", "grad_products", "grad_casts", "sums"}


def _marks(program: Program, half: str, check: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.standard_promotion] if program.third_party else []
    its_half = list(POLICIES)[PROGRAMS.index(program) % len(POLICIES)]
    is_short = check in _SHORT or (check == "jit" and "grad_inside" in program.without)
    return marks if is_short and half == its_half else [*marks, pytest.mark.full]


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
        getattr(_checks(program, half), check)()


# What is added to the weights of outputs, which are from -1 to 1.
SIGNED, POSITIVE = np.float32(0), np.float32(2)
# Code for tiny arrays need not be good: that halves what compiling costs.
_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


class Plain:
    """A program in float32; what it is compiled to and its results are kept."""

    def __init__(self, program: Program) -> None:
        self.fun, self.args = program.make()
        self.jitted = _jit(self.fun)
        self.outs_and_grad = _outs_and_grad(self.fun)
        self.jitted_grad = _jit(self.outs_and_grad)

    @functools.cached_property
    def value(self) -> Any:
        return self.jitted(*self.args)

    @functools.cached_property
    def batch_value(self) -> Any:
        return _jit(_batched(self.fun, self.args))(*_stacked(self.args))

    @functools.cached_property
    def pushed_value(self) -> Any:
        return _jit(_pushed(self.fun))(*self.args)

    @functools.cached_property
    def value_and_gradient(self) -> Any:
        return self.jitted_grad(*self.args, SIGNED)


class Checks:
    """What is asked of a program under autocast: a method for each of `CHECKS`."""

    def __init__(self, program: Program, half: str) -> None:
        self.program, self.plain = program, _plain(program)
        self.policy, self.dtype = POLICIES[half], jnp.dtype(DTYPES[half])
        self.cast = autocast(self.plain.fun, self.policy)
        self.jitted = _jit(self.cast)
        self.outer_grad = _jit(jax.grad(_loss(self.cast)))
        self.inner_grad = _jit(autocast(self.plain.outs_and_grad, self.policy))

    def eager(self) -> None:
        self.assert_close(self.cast(*self.plain.args), self.plain.value)

    def jit(self) -> None:
        self.assert_close(self.jitted(*self.plain.args), self.plain.value)

    def products(self) -> None:
        jaxpr, name = self.jaxpr(self.jitted), self.dtype.name
        half_ones = filter(jaxprs.is_half, jaxprs.products(jaxpr))
        assert {jaxprs.operand_dtypes(eqn) for eqn in half_ones} == {(name, name)}
        assert not jaxprs.not_lowered(jaxpr)

    def grad_products(self) -> None:
        for grad in (self.outer_grad, self.inner_grad):
            assert not jaxprs.not_lowered(self.jaxpr(grad, SIGNED))

    def sums(self) -> None:
        for grad in (self.outer_grad, self.inner_grad):
            assert not jaxprs.half_sums(self.jaxpr(grad, SIGNED))

    def casts(self) -> None:
        plain = jaxprs.wasted_casts(self.jaxpr(self.plain.jitted))
        found = jaxprs.wasted_casts(self.jaxpr(self.jitted))
        assert Counter(found) <= Counter(plain)  # what is equal is merged

    def grad_casts(self) -> None:
        # Of autocast(grad(f)): the backward pass of grad(autocast(f)) is JAX's, where
        # two products that share a cotangent cast it twice.
        plain = jaxprs.wasted_casts(self.jaxpr(self.plain.jitted_grad, SIGNED))
        found = jaxprs.wasted_casts(self.jaxpr(self.inner_grad, SIGNED))
        assert Counter(found) <= Counter(plain)

    def identity(self) -> None:
        fun, args = self.plain.fun, self.plain.args
        rules = OpRules.default(self.dtype)
        rules = OpRules.only([(p, c) for p, c in rules.classes if c != "half"])
        same = autocast(fun, self.policy, rules=rules)
        assert self.dtype not in jaxprs.dtypes(jaxprs.trace(same, *args))
        found = bitwise.raw_bits(_jit(same)(*args))
        assert found == bitwise.raw_bits(self.plain.value)

    def vmap_outside(self) -> None:
        self.check_batch(_batched(self.cast, self.plain.args))

    def vmap_inside(self) -> None:
        batched = _batched(self.plain.fun, self.plain.args)
        self.check_batch(autocast(batched, self.policy))

    def check_batch(self, batched: Any) -> None:
        found = _jit(batched)(*_stacked(self.plain.args))
        self.assert_close(found, self.plain.batch_value)

    def jvp(self) -> None:
        out, tangent = _jit(_pushed(self.cast))(*self.plain.args)
        expected, expected_tangent = self.plain.pushed_value
        self.assert_close(out, expected)
        self.assert_close(tangent, expected_tangent, self.program.grad_tolerance)

    def grad_outside(self) -> None:
        self.check_gradient(self.outer_grad(*self.plain.args, SIGNED))

    def grad_inside(self) -> None:
        outs, grad = self.inner_grad(*self.plain.args, SIGNED)
        self.assert_close(outs, self.plain.value_and_gradient[0])
        self.check_gradient(grad)

    def check_gradient(self, grad: Any) -> None:
        expected = self.plain.value_and_gradient[1]
        self.assert_close(grad, expected, self.program.grad_tolerance)

    def one_sign(self) -> None:
        args = *jax.tree.map(_positive, self.plain.args), POSITIVE
        _, expected = self.plain.jitted_grad(*args)
        for grad in (self.outer_grad(*args), self.inner_grad(*args)[1]):
            self.assert_close(grad, expected, self.program.grad_tolerance)

    def jaxpr(self, jitted: Any, *more: Any) -> Any:
        """Return the open jaxpr of a jitted function on the program's arguments."""
        return jaxprs.opened(jitted.trace(*self.plain.args, *more).jaxpr)

    def assert_close(
        self, tree: Any, expected: Any, roundoffs: float | None = None
    ) -> None:
        """Assert the structure and avals expected, and values within the tolerance."""
        assert jax.tree.structure(tree) == jax.tree.structure(expected)
        assert bitwise.avals(tree) == bitwise.avals(expected)
        roundoffs = self.program.tolerance if roundoffs is None else roundoffs
        roundoff = float(jnp.finfo(self.dtype).eps) / 2
        error = relative_error(_floats(tree), _floats(expected))
        assert error < roundoffs * roundoff, f"{error / roundoff:.1f} roundoffs"


# The checks of a program that run one after another share what they trace and compile.
_plain = functools.lru_cache(maxsize=4)(Plain)
_checks = functools.lru_cache(maxsize=2)(Checks)


# What is done to a function and its arguments.


def _positive(x: Any) -> Any:
    return jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _batched(fun: Any, args: tuple[Any, ...]) -> Any:
    return jax.vmap(fun, in_axes=(0, *[None] * (len(args) - 1)))


def _stacked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    def two(x):
        return jnp.stack([x, x * jnp.asarray(0.9, x.dtype)])

    return jax.tree.map(two, args[0]), *args[1:]


def _pushed(fun: Any) -> Any:
    """Return the function that gives a function's value and directional derivative."""

    def pushed(first, *rest):
        leaves, tree = jax.tree.flatten(first)
        tangent = tree.unflatten([_ramp(x, i) for i, x in enumerate(leaves)])
        return jax.jvp(lambda first: _floats(fun(first, *rest)), (first,), (tangent,))

    return pushed


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


def _outs_and_grad(fun: Any) -> Any:
    """Return the function that gives a function's value, and its loss' gradient."""

    def loss(*args):
        outs = fun(*args[:-1])
        return _loss(lambda *_: outs)(*args), outs

    grad = jax.value_and_grad(loss, has_aux=True)

    def outs_and_grad(*args):
        (_, outs), grads = grad(*args)
        return outs, grads

    return outs_and_grad


def _floats(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def _ramp(x: Any, seed: int) -> Any:
    ramp = np.cos(np.arange(x.size, dtype=np.float64) * 0.7 + seed)
    return jnp.asarray(ramp.reshape(x.shape), x.dtype)
