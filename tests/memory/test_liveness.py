"""What is in memory at the peak of a program, read off its text."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jmp_lite._src import compat
from jmp_lite._src.memory import hlo, liveness

HEAD = "HloModule m, is_scheduled=true\n\n"
LOOP = """\
%body (c: (f32[8], f32[8])) -> (f32[8], f32[8]) {
  %c = (f32[8]{0}, f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%c), index=0
  %y = f32[8]{0} get-tuple-element(%c), index=1
  %big = f32[64]{0} custom-call(%x), metadata={op_name="jit(f)/jvp(inner)/dot"}
  %small = f32[8]{0} custom-call(%big)
  ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(%small, %y)
}

"""


def at_peak(lines, before="", parameter_sizes=()):
    lines = "%p = f32[8]{0} parameter(0)", *lines
    body = "".join(f"  {line}\n" for line in lines)
    entry = "ENTRY %main (p: f32[8]) -> f32[8] {\n" + body + "}\n"
    return liveness.at_peak(hlo.parse(HEAD + before + entry), parameter_sizes)


def total(lines, before=""):
    return sum(row.bytes for row in at_peak(lines, before))


def test_an_array_lives_until_it_is_read_last():
    lines = [
        "%a = f32[64]{0} custom-call(%p)",
        "%b = f32[32]{0} custom-call(%a)",  # the peak: a and b
        "%c = f32[16]{0} custom-call(%b)",
        "ROOT %d = f32[8]{0} custom-call(%c)",
    ]
    assert total(lines) == 128 + 256
    # A bitcast is a name: what reads it reads the array.
    lines[2:] = [
        "%n = f32[8,8]{1,0} bitcast(%a)",
        "%c = f32[16]{0} custom-call(%b)",
        "ROOT %d = f32[8]{0} custom-call(%n, %c)",
    ]
    assert total(lines) == 64 + 128 + 256


def test_results_are_not_counted():
    lines = [
        "%a = f32[8]{0} custom-call(%p)",
        "%b = f32[64]{0} custom-call(%a)",
        "%c = f32[] custom-call(%b)",
        "ROOT %r = (f32[8]{0}, f32[]) tuple(%a, %c)",
    ]
    assert total(lines) == 256


def test_elementwise_kernels_write_over_what_they_read_last():
    lines = [
        "%a = f32[64]{0} custom-call(%p)",
        "%b = f32[64]{0} fusion(%a), kind=kLoop, calls=%f",
        "ROOT %c = f32[8]{0} custom-call(%b)",
    ]
    assert total(lines) == 256
    lines[2] = "ROOT %c = f32[8]{0} custom-call(%b, %a)"
    assert total(lines) == 256 + 256
    lines[1] = "%b = f32[64]{0} custom-call(%a)"
    lines[2] = "ROOT %c = f32[8]{0} custom-call(%b)"
    assert total(lines) == 256 + 256


def test_loops_work_in_what_they_carry_and_add_what_they_make():
    lines = [
        "%a = f32[8]{0} custom-call(%p)",
        "%b = f32[8]{0} custom-call(%p)",
        "%t = (f32[8]{0}, f32[8]{0}) tuple(%a, %b)",
        "%w = (f32[8]{0}, f32[8]{0}) while(%t), condition=%cond, body=%body",
        "%x = f32[8]{0} get-tuple-element(%w), index=0",
        "%big = f32[60]{0} custom-call(%x)",
        "ROOT %d = f32[] custom-call(%big)",
    ]
    assert total(lines, before=LOOP) == 32 + 32 + 256
    # After the loop only what is read of its results is in memory.
    lines[5] = "%big = f32[100]{0} custom-call(%x)"
    assert total(lines, before=LOOP) == 32 + 400
    inner, carried = at_peak(lines[:5], LOOP)
    assert inner == liveness.LiveRow("activations", "inner", "dot", "f32", 1, 256)
    assert carried == liveness.LiveRow("temporaries", "", "custom-call", "f32", 2, 64)


def test_what_a_loop_fills_is_of_that_loop_if_it_has_no_name():
    loop = "(f32[8]{{0}}, f32[8]{{0}}) while({}), condition=%cond, body=%body"
    loop += ', metadata={{op_name="jit(f)/transpose(jvp({}))/while"}}'
    lines = [
        "%a = f32[8]{0} fusion(), kind=kLoop, calls=%f",
        '%b = f32[8]{0} fusion(), metadata={op_name="jit(f)/jvp(net)/exp"}',
        "%t = (f32[8]{0}, f32[8]{0}) tuple(%a, %b)",
        f"%w = {loop.format('%t', 'net')}",
        f"%v = {loop.format('%w', 'other')}",
        "%x = f32[8]{0} get-tuple-element(%v), index=0",
        "ROOT %d = f32[] custom-call(%x)",
    ]
    peak = at_peak(lines, LOOP.replace("f32[64]", "f32[]"), parameter_sizes={8})
    found = [(x.kind, x.layer, x.operation) for x in peak[:2]]
    assert found == [("gradients", "net", "while"), ("activations", "net", "exp")]


@pytest.mark.parametrize(
    ("op_name", "place"),
    [
        (f"jit(f)/jvp(net/a)/while/body/{compat.CLOSED_CALL}/add", ("net/a", "add")),
        ("jit(f)/jmp_lite_autocast/net/exp", ("net", "exp")),
        ("", ("", "")),
    ],
)
def test_the_name_of_an_instruction_is_a_layer_and_an_operation(op_name, place):
    assert liveness.place(op_name) == place


@pytest.mark.parametrize("is_stacked", [False, True])
def test_the_sum_is_what_xla_allocates(is_stacked):
    def loss(ws, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        if is_stacked:
            return jnp.sum(jax.lax.scan(layer, x, ws)[0])
        for i in range(6):
            x, _ = layer(x, ws[i])
        return jnp.sum(x)

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((6, 64, 64), (1024, 64))]
    compiled = jax.jit(jax.grad(loss)).lower(*shapes).compile()
    text: Any = compiled.as_text()
    memory: Any = compiled.memory_analysis()
    found = sum(row.bytes for row in liveness.at_peak(hlo.parse(text)))
    assert found == pytest.approx(memory.temp_size_in_bytes, rel=0.1)
