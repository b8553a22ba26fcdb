"""What is counted in the text of compiled programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from benchmarks.common import counts as figures
from jmp_lite._src.memory import hlo

PROGRAM = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), \
{1, 0}: (2, {}, must-alias) }, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

%fused (p.1: f32[8,4]) -> f16[8,4] {
  %p.1 = f32[8,4]{1,0} parameter(0)
  %half.1 = f16[8,4]{1,0} convert(%p.1), metadata={op_name="jit(step)/convert (x)"}
  ROOT %index.1 = s32[8,4]{1,0} convert(%half.1)
}

%branch (b: f32[8,4]) -> f32[8,4] {
  %b = f32[8,4]{1,0} parameter(0)
  ROOT %copied = f32[8,4]{1,0} copy(%b)
}

ENTRY %main (w: f32[8,4], t: s32[], m: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %w = f32[8,4]{1,0:T(8,128)} parameter(0), sharding={replicated}
  %t = s32[] parameter(1)
  %m = f32[8,4]{1,0:T(8,128)} parameter(2)
  %ahead = ((f32[8,4]{1,0}), f32[2,4]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%w)
  %there = f32[2,4]{1,0:T(8,128)S(1)} slice-done(%ahead)
  %half = f16[8,4]{1,0:T(8,128)(2,1)} fusion(%w, %there), kind=kLoop, calls=%fused
  %next = s32[] add(%t, %t)
  %start = (f16[8,4]{1,0}, f16[32,4]{1,0}) all-gather-start(%half), dimensions={0}
  %all = f16[32,4]{1,0} all-gather-done(%start)
  %sums = (f32[8,4]{1,0}, bf16[2,4]{1,0}) all-reduce(%w, %there), to_apply=%add
  %sum = f32[8,4]{1,0} get-tuple-element(%sums), index=0
  %chosen = f32[8,4]{1,0} conditional(%t, %sum, %m), branch_computations={%branch}
  %told = () custom-call(%chosen), custom_call_target="xla_ffi_python_gpu_callback"
  %names = f32[8,4]{1,0} custom-call(%chosen), custom_call_target="ConcatBitcast"
  ROOT %out = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%chosen, %names)
}
"""


def count(*lines: str) -> Any:
    """Return what is counted in a program of these instructions."""
    body = "".join(f"  {line}\n" for line in lines)
    return hlo.count(f"HloModule m\nENTRY %main () -> f32[4] {{\n{body}}}")


def test_everything_in_the_text_of_a_program_is_counted():
    counts = hlo.count(PROGRAM)
    # fusion, conditional, callback: not names, a scalar's add, or what goes on beside
    assert counts.kernels == 3
    assert counts.casts == 1  # to f16, inside of the fusion; not the one to s32
    assert counts.conditionals == 1
    assert counts.host_transfers == 1
    assert counts.aliased == 2
    assert counts.collectives == {
        "all-gather f16": 32 * 4 * 2,
        "all-reduce bf16": 2 * 4 * 2,
        "all-reduce f32": 8 * 4 * 4,
    }
    assert counts.collective_calls == {"all-gather": 1, "all-reduce": 1}
    assert counts.products == {}


def test_traffic_takes_a_slice_that_is_fetched_ahead_once():
    entry = PROGRAM[PROGRAM.index("  %ahead") : PROGRAM.index("  %next")]
    head = PROGRAM[: PROGRAM.index("  %ahead")]
    # 32 bytes of the slice; w read and half written by the fusion.
    assert hlo.count(head + entry).traffic == 2 * 4 * 4 + 8 * 4 * (4 + 2)


@pytest.mark.parametrize(
    ("shape_and_opcode", "left"),
    [
        ("bf16[16]{0} reduce-scatter", {"reduce-scatter bf16": 32}),
        ("((f32[16]{0}), f32[4]{0}) reduce-scatter-start", {"reduce-scatter f32": 16}),
        (
            "((f32[16]{0}, bf16[8]{0}), (f32[4]{0}, bf16[2]{0})) reduce-scatter-start",
            {"reduce-scatter bf16": 4, "reduce-scatter f32": 16},
        ),
        ("((f32[4,8]{1,0}), f32[4,8]{1,0}) all-to-all-start", {"all-to-all f32": 128}),
        ("(f32[4]{0}, f32[16]{0}) all-gather-start", {"all-gather f32": 64}),
        (
            "(f32[4]{0}, bf16[16]{0}) all-reduce-start",
            {"all-reduce bf16": 32, "all-reduce f32": 16},
        ),
    ],
)
def test_a_collective_is_no_kernel_and_counts_what_it_leaves(shape_and_opcode, left):
    counts = count(f"%x = {shape_and_opcode}(%y, %z), dimensions={{0}}")
    assert (counts.kernels, counts.collectives) == (0, left)


def test_bytes_are_those_of_dtypes():
    counts = count(
        "%w = f8e4m3fn[16]{0} parameter(0)",
        "%g = f8e5m2[16]{0} copy(%w)",
        "%a = f8e4m3fn[64]{0} all-gather(%w), dimensions={0}",
    )
    assert counts.collectives == {"all-gather f8e4m3fn": 64}
    assert counts.traffic == 16 + 16 + 16 + 64
    for dtype, size in {"s4": 1, "pred": 1, "bf16": 2, "c128": 16}.items():
        assert count(f"%x = {dtype}[4]{{0}} copy(%y)").traffic == 4 * size


PRODUCTS = """\
HloModule m

%forward (a: f8e4m3fn[32,16], b: f8e4m3fn[16,64]) -> bf16[32,64] {
  %a = f8e4m3fn[32,16]{1,0} parameter(0)
  %b = f8e4m3fn[16,64]{1,0} parameter(1)
  %dot.1 = f32[32,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}
  ROOT %rounded = bf16[32,64]{1,0} convert(%dot.1)
}

%backward (g: f8e5m2[32,64], w: f8e4m3fn[16,64]) -> f32[32,16] {
  %g = f8e5m2[32,64]{1,0} parameter(0)
  %w = f8e4m3fn[16,64]{1,0} parameter(1)
  ROOT %dot.2 = f32[32,16]{1,0} dot(%g, %w), operand_precision={highest,highest}
}

%upcast (c: f8e4m3fn[32,16], d: f8e4m3fn[16,64]) -> f32[32,64] {
  %c = f8e4m3fn[32,16]{1,0} parameter(0)
  %c.1 = bf16[32,16]{1,0} convert(%c)
  %d = f8e4m3fn[16,64]{1,0} parameter(1)
  %d.1 = bf16[16,64]{1,0} convert(%d)
  ROOT %dot.3 = f32[32,64]{1,0} dot(%c.1, %d.1), lhs_contracting_dims={1}
}

ENTRY %main (x: f8e4m3fn[32,16], y: f8e4m3fn[16,64], h: f16[32,16], s.1: f32[]) -> () {
  %x = f8e4m3fn[32,16]{1,0} parameter(0)
  %y = f8e4m3fn[16,64]{1,0} parameter(1)
  %h = f16[32,16]{1,0} parameter(2)
  %s.1 = f32[] parameter(3)
  %one = bf16[32,64]{1,0} fusion(%x, %y), kind=kCustom, calls=%forward
  %two = f32[32,16]{1,0} fusion(%one, %y), kind=kCustom, calls=%backward
  %three = f32[32,64]{1,0} fusion(%x, %y), kind=kCustom, calls=%upcast
  %four = (f32[32,64]{1,0}, s8[64]{0}) custom-call(%x, %y, %s.1, %s.1), \
custom_call_target="__cublas$lt$matmul$f8"
  %five = (f32[32,32]{1,0}, s8[64]{0}) custom-call(%h, %h), \
custom_call_target="__cublas$gemm"
  %six = f32[8,8]{1,0} custom-call(%h), custom_call_target="__cusolver$cholesky"
  %seven = f32[32,32]{1,0} convolution(%h, %h), dim_labels=bf_oi->bf
  ROOT %out = () tuple()
}
"""


def test_products_are_counted_by_what_they_read_and_not_by_what_was_cast():
    found = hlo.count(PRODUCTS).products
    of_fp8 = {"f8e4m3fn f8e4m3fn": 2, "f8e5m2 f8e4m3fn": 1}
    assert found == {"bf16 bf16": 1, "f16 f16": 2} | of_fp8
    upcast = hlo.count(PRODUCTS.replace("f8e5m2", "bf16")).products
    assert upcast["bf16 f8e4m3fn"] == 1
    other = hlo.count(PRODUCTS.replace("f8e4m3fn", "f16")).products
    assert (figures.fp8_products(found), figures.fp8_products(other)) == (3, 1)


def test_a_collective_in_pieces_is_counted_once():
    # As a TPU's compiler writes one that goes on beside other work.
    gather = "f16[16]{0} all-gather(%y), channel_id=1, dimensions={0}"
    pieces = f"%1 () -> f16[16] {{\n  ROOT %g = {gather}\n}}\n"
    pieces += pieces.replace("%1", "%2")
    fusion = "f16[16]{0} fusion(%y), kind=kCustom, calls="
    entry = f"  %a = {fusion}%1\n  %b = {fusion}%2\n  %c = {gather}\n"
    counts = hlo.count(f"HloModule m\n{pieces}ENTRY %m () -> f16[16] {{\n{entry}}}")
    assert counts.collectives == {"all-gather f16": 2 * 16 * 2}
    assert counts.collective_calls == {"all-gather": 2}


def test_all_collectives_of_a_shard_map_are_counted():
    mesh = Mesh(np.array(jax.devices()[:4]), "d")

    def on_each(w, x):  # [4, 16], [4, 16]
        gathered = jax.lax.all_gather(w, "d", tiled=True)
        y = x @ gathered
        moved = jax.lax.all_to_all(y, "d", 0, 0)
        scattered = jax.lax.psum_scatter(y.T, "d", tiled=True)
        return jax.lax.psum(y, "d"), moved, scattered

    sharded = PartitionSpec("d")
    specs = {"in_specs": sharded, "out_specs": (PartitionSpec(), sharded, sharded)}
    run = jax.shard_map(on_each, mesh=mesh, **specs)
    ones = jax.ShapeDtypeStruct((16, 16), "float32")
    text = jax.jit(run).lower(ones, ones).compile().as_text()
    assert text is not None and "channel_id=2" not in text
    assert hlo.count(text).collectives == {
        "all-gather f32": 4 * 16 * 16,
        "all-reduce f32": 4 * 4 * 16,
        "all-to-all f32": 4 * 4 * 16,
        "reduce-scatter f32": 4 * 4 * 4,
    }


SUMS = """\
HloModule m

%add.1 (a: bf16[], b: bf16[]) -> bf16[] {
  ROOT %sum.1 = bf16[] add(%a, %b)
}

%add.2 (a.3: f32[], b.3: f32[]) -> f32[] {
  ROOT %sum.2 = f32[] add(%a.3, %b.3)
}

%larger (a.2: bf16[], b.2: bf16[]) -> bf16[] {
  ROOT %max.2 = bf16[] maximum(%a.2, %b.2)
}

%fused (x: bf16[8,4]) -> bf16[4] {
  ROOT %inner = bf16[4]{0} reduce(%x, %zero), dimensions={0}, to_apply=%add.1
}

ENTRY %main (h: bf16[8,4], w: f32[8,4], i: s32[8,1], z: bf16[]) -> bf16[4] {
  %whole = f32[4]{0} reduce(%w, %z), dimensions={0}, to_apply=%add.2
  %rounded = bf16[4]{0} reduce(%w, %z), dimensions={0}, to_apply=%add.2
  %most = bf16[4]{0} reduce(%h, %z), dimensions={0}, to_apply=%larger
  %rows = bf16[8,4]{1,0} scatter(%h, %i, %h), to_apply=%add.1
  %set = bf16[8,4]{1,0} scatter(%h, %i, %h), to_apply=%larger
  %pool = f16[4,4]{1,0} reduce-window(%h, %z), window={size=2x1}, to_apply=%add.1
  %all = bf16[8,4]{1,0} all-reduce(%h), to_apply=%add.1
  %back = bf16[8,4]{1,0} select-and-scatter(%h, %h, %z), select=%larger, scatter=%add.1
  ROOT %out = bf16[4]{0} fusion(%h), kind=kInput, calls=%fused
}
"""


def test_sums_in_half_are_counted_and_neither_maxima_nor_collectives():
    # In the fusion, the scatter, the window and its transpose.
    assert hlo.count(SUMS).half_sums == 4
    assert hlo.count(SUMS.replace("bf16", "f32").replace("f16", "f32")).half_sums == 0


LOOP = """\
HloModule jit_scan, is_scheduled=true

%slicing (p0: f32[16,8], p1: s32[]) -> f32[1,8] {
  %p0 = f32[16,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,8}
}

%stacking (q0: f32[16,8], q1: f32[1,8], q2: s32[]) -> f32[16,8] {
  %q0 = f32[16,8]{1,0} parameter(0)
  %q1 = f32[1,8]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  ROOT %stacked = f32[16,8]{1,0} dynamic-update-slice(%q0, %q1, %q2, %q2)
}

%body (state: (s32[], f32[16,8], f32[16,8])) -> (s32[], f32[16,8], f32[16,8]) {
  %state = (s32[], f32[16,8]{1,0}, f32[16,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %xs = f32[16,8]{1,0} get-tuple-element(%state), index=1
  %ys = f32[16,8]{1,0} get-tuple-element(%state), index=2
  %x = f32[1,8]{1,0} fusion(%xs, %i), kind=kLoop, calls=%slicing
  %all = f32[1,8]{1,0} all-reduce(%x), to_apply=%add
  %more = f32[16,8]{1,0} fusion(%ys, %all, %i), kind=kLoop, calls=%stacking
  ROOT %next = (s32[], f32[16,8]{1,0}, f32[16,8]{1,0}) tuple(%i, %xs, %more)
}

%holds (seen: (s32[], f32[16,8], f32[16,8])) -> pred[] {
  %seen = (s32[], f32[16,8]{1,0}, f32[16,8]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%seen), index=0
  ROOT %less = pred[] compare(%j, %j), direction=LT
}

ENTRY %main (a: (s32[], f32[16,8], f32[16,8])) -> (s32[], f32[16,8], f32[16,8]) {
  %a = (s32[], f32[16,8]{1,0}, f32[16,8]{1,0}) parameter(0)
  ROOT %end = (s32[], f32[16,8]{1,0}, f32[16,8]{1,0}) while(%a), condition=%holds, \
body=%body, backend_config={"known_trip_count":{"n":"16"}}
}
"""


def test_what_a_loop_does_counts_by_its_trips_and_slices_as_slices():
    twice = LOOP.replace("to_apply=%add\n", "channel_id=1, to_apply=%add\n")
    other = "  %other = f32[1,8]{1,0} all-reduce(%x), channel_id=1\n  %more"
    twice = twice.replace("  %more", other)
    assert hlo.count(twice).collective_calls == {"all-reduce": 32}
    counts = hlo.count(LOOP)
    row = 8 * 4
    assert counts.kernels == 16 * 2
    assert counts.collectives == {"all-reduce f32": 16 * row}
    assert counts.collective_calls == {"all-reduce": 16}
    # Each trip: a row is read and written, with its index; summed; read and stacked.
    assert counts.traffic == 16 * ((2 * row + 4) + 2 * row + (2 * row + 4) + 2 * 4 + 1)
    assert counts.loops_counted_once == 0
    unknown = hlo.count(LOOP.replace("known_trip_count", "other"))
    assert (unknown.kernels, unknown.loops_counted_once) == (2, 1)


def test_twice_the_layers_of_a_scan_move_twice_as_much():
    def loss(ws, x):
        scanned, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)
        return jnp.sum(scanned**2)

    x = jax.ShapeDtypeStruct((64, 128), "float32")
    stacks = [jax.ShapeDtypeStruct((n, 128, 128), "float32") for n in (12, 24)]
    grad = jax.jit(jax.grad(loss))
    texts = [grad.lower(ws, x).compile().as_text() or "" for ws in stacks]
    few, many = (hlo.count(text) for text in texts)
    assert many.traffic == pytest.approx(2 * few.traffic, rel=0.03)
    assert many.kernels == pytest.approx(2 * few.kernels, rel=0.03)
