"""The doctor: what it measures and prints, and advises for hardware not here."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from dtype_cases import FakeDevice

from jmp_lite import fp8_dot_general, get_policy, loss_scale_for
from jmp_lite._src import doctor
from jmp_lite._src.doctor import Rate

GRADIENT = "float8_e5m2 x float8_e4m3fn"
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", GRADIENT]

CPU = FakeDevice("cpu", device_kind="cpu")
GTX_1080 = FakeDevice("gpu", "6.1", "GTX 1080")
V100 = FakeDevice("gpu", "7.0", "V100")
A100 = FakeDevice("gpu", "8.0", "A100")
H100 = FakeDevice("gpu", "9.0", "H100")
TPU = FakeDevice("tpu", device_kind="TPU v5e")
TPU7 = FakeDevice("tpu", device_kind="TPU7x")
MI300 = FakeDevice("gpu", "gfx942", "MI300X")


def in_one_line(text: str) -> str:
    return " ".join(text.split())


# What it advises.


@pytest.mark.parametrize(
    ("device", "ratios", "policy", "why"),
    [
        (CPU, {"bfloat16": 0.4, "float16": 0.1}, "float32", "bfloat16 is slower than"),
        (CPU, {}, "float32", "bfloat16 is slower than"),
        (CPU, {}, "float32", 'get_policy("mixed_bfloat16") gives the same results'),
        (GTX_1080, {}, "float32", 'get_policy("mixed_float16") gives the same results'),
        (CPU, {"bfloat16": 3.5}, "mixed_bfloat16", "at 3.50 × the rate of float32"),
        (GTX_1080, {"float16": 0.9}, "float32", "half precision is fast from 7.0"),
        (V100, {"bfloat16": 0.5, "float16": 5.0}, "mixed_float16", "at 5.00 × the"),
        (V100, {}, "mixed_float16", "V100 has no fast bfloat16"),
        (A100, {"bfloat16": 2.0}, "mixed_bfloat16", "has the range of float32"),
        (A100, {"float16": 2.0}, "mixed_bfloat16", "has the range of float32"),
        (A100, {"bfloat16": 0.8}, "mixed_bfloat16", "less than this device can do"),
        (TPU, {"bfloat16": 1.0, "float16": 1.0}, "mixed_bfloat16", "has the range of"),
    ],
    ids=lambda x: getattr(x, "device_kind", None),
)
def test_a_device_gets_the_policy_that_trains_fast_on_it(device, ratios, policy, why):
    recommendation = doctor.recommend(device, ratios)
    assert recommendation.policy == policy
    assert why in " ".join(recommendation.reasons)
    assert all(reason[-1] == "." for reason in recommendation.reasons)
    needs_scale = jax.tree.leaves(loss_scale_for(get_policy(policy))) != []
    assert recommendation.loss_scale == ("dynamic" if needs_scale else "none")


def fp8_reasons(device: FakeDevice, **speeds: float) -> list[str]:
    """Return the reasons about fp8 for these rates relative to bfloat16."""
    names = {"bfloat16": "bfloat16", "forward": "float8_e4m3fn", "gradient": GRADIENT}
    ratios = {names[name]: 2.5 * speed for name, speed in speeds.items()}
    found = doctor.recommend(device, ratios)
    half = "float16" if device is V100 else "bfloat16"
    assert found.policy == ("float32" if device is CPU else f"mixed_{half}")
    first = next(i for i, reason in enumerate(found.reasons) if "fp8" in reason)
    assert not any("fp8" in reason for reason in found.reasons[:first])
    return list(found.reasons[first:])


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (CPU, "fp8 is slower than float32 on the CPU (cpu)"),
        (V100, "V100 has compute capability 7.0; fp8 is fast from 8.9."),
        (TPU, "the matrix units of a TPU v5e have no fp8"),
        (MI300, "it is not known whether MI300X has matrix units for fp8."),
    ],
    ids=lambda x: getattr(x, "device_kind", None),
)
def test_without_native_fp8_one_sentence_says_so(device, why):
    # Even where it was measured to be faster than bfloat16, as on CPUs.
    speeds = {} if device is CPU else {"bfloat16": 1.0}
    (reason,) = fp8_reasons(device, **speeds, forward=3.0, gradient=3.0)
    assert reason.startswith(f"No native fp8 products are known here: {why}")


# A trained step is one forward product and two for gradients: 1 / 2 + 2 / 1.6, not 3.
@pytest.mark.parametrize(
    ("device", "forward", "gradient", "ratio"),
    [
        (H100, 2.0, 1.6, "1.71"),
        (TPU7, 2.0, 1.6, "1.71"),
        (H100, 1.0, 1.0, "1.00"),
        (H100, 1.8, 1.0, "1.17"),
        (H100, 0.5, 0.5, "0.50"),
    ],
)
def test_native_fp8_is_to_try_if_clearly_faster(device, forward, gradient, ratio):
    speeds = {"bfloat16": 1.0, "forward": forward, "gradient": gradient}
    native, measured, *advice = fp8_reasons(device, **speeds)
    assert native == f"fp8 products are native on {device.device_kind}."
    assert measured == (
        f"fp8 products run at {ratio} × the rate of bfloat16 here (forward "
        f"{forward:.2f} ×, gradients {gradient:.2f} ×)."
    )
    if float(ratio) < 1.2:
        (why,) = advice
        assert why.startswith("That is not clearly faster") and "--seconds" in why
        return
    advice, first = advice
    assert 'Try get_policy("mixed_fp8") for models' in advice
    assert "256 or larger" in advice
    assert "policy stays mixed_bfloat16" in first and "measured on the model" in first


@pytest.mark.parametrize("missing", ["bfloat16", "forward", "gradient"])
def test_native_fp8_without_a_measurement_is_not_recommended(missing):
    speeds = {"bfloat16": 1.0, "forward": 2.0, "gradient": 2.0}
    del speeds[missing]
    _, why = fp8_reasons(H100, **speeds)
    assert why == "Their rate relative to bfloat16 was not measured here."


def test_a_driver_that_jax_does_not_use_is_noticed(tmp_path: Path):
    driver = tmp_path / "version"
    assert doctor.find_missing({"cpu"}, driver=driver) == ()
    driver.touch()
    (missing,) = doctor.find_missing({"cpu"}, driver=driver)
    assert 'JAX finds only the CPU: pip install "jmp-lite[gpu]"' in missing
    assert doctor.find_missing({"gpu"}, driver=driver) == ()


def test_a_jaxlib_that_is_known_to_compute_sums_wrongly_is_named():
    version = jaxlib.version.__version__
    found = doctor.find_miscompiled()
    of_f32 = version in {"0.10.2", "0.11.0"}
    of_bf16 = jaxlib.version.__version_info__ >= (0, 11, 2)
    assert len(found) == of_f32 + of_bf16, found
    for sentence in found:
        assert sentence.startswith(f"jaxlib {version} computes sums wrongly here: a")


def test_any_jaxlib_that_computes_the_sum_wrongly_is_named(monkeypatch):
    monkeypatch.setattr(doctor.jax, "jit", lambda f: lambda s: 0 * f(s))
    sentence, of_bf16 = doctor.find_miscompiled()
    assert "a gradient of 14336 is 0." in sentence
    assert "a gradient of 512 is 0." in of_bf16 and "0.11.2" in of_bf16
    assert "0.10.2 and 0.11.0" in sentence and "issues/39103" in sentence
    text = dataclasses.replace(DIAGNOSIS, miscompiled=(sentence,)).to_text()
    assert " XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= " in in_one_line(text)


# What it measures.


@pytest.mark.parametrize(
    ("dtype", "largest", "normal", "subnormal"),
    [
        (jnp.float16, 65504.0, 2.0**-14, 2.0**-24),
        (jnp.bfloat16, 2.0**128 - 2.0**120, 2.0**-126, 2.0**-133),
        (jnp.float32, 2.0**128 - 2.0**104, 2.0**-126, 2.0**-149),
    ],
)
def test_the_range_of_a_dtype(dtype, largest, normal, subnormal):
    found = doctor.measure_range(dtype)
    name = np.dtype(dtype).name
    assert dataclasses.astuple(found)[:-1] == (name, largest, normal, subnormal)
    # XLA on the CPU computes both halves in float32, and flushes its subnormals.
    assert found.keeps_subnormals == (dtype == jnp.float16)


def _rounded_away(x):
    """Round to 10 bits, ties away from zero, as GPUs do to TF32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + jnp.uint32(1 << 12)) & jnp.uint32(0xFFFFE000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@pytest.mark.parametrize(
    ("rounded", "bits"),
    [
        (lambda x: x, 23),
        (lambda x: x.astype(jnp.bfloat16), 7),
        (lambda x: x.astype(jnp.float16), 10),
        (_rounded_away, 10),
    ],
)
def test_the_bits_of_products_are_found(monkeypatch, rounded, bits):
    def dot(a, b):
        operands = rounded(a), rounded(b)
        return jax.lax.dot(*operands, preferred_element_type=jnp.float32)

    monkeypatch.setattr(doctor.jnp, "dot", dot)
    found, error = doctor.measure_float32()
    assert found == bits
    assert 2.0 ** -(bits + 3) < error < 2.0 ** -min(bits, 20)


def test_an_accelerator_is_not_judged_by_small_products(monkeypatch):
    sizes = []
    monkeypatch.setattr(doctor.jax, "local_devices", lambda: [H100])
    products = lambda size: sizes.append(size) or ({}, {})  # noqa: E731
    monkeypatch.setattr(doctor, "_compile_products", products)
    doctor.measure_rates(1e-9)
    assert sizes == [4096]


def test_rates_are_measured_by_turns_and_compared_within_a_round(monkeypatch):
    clock = [0.0]
    order = []
    costs = {"float32": 4.0, "bfloat16": 2.0, "float16": 8.0}

    def compile_products(size):
        def make(name):
            def call():
                order.append((size, name))
                # The machine is slower and slower.
                clock[0] += costs[name] * (size / 256) ** 3 * (1 + len(order) / 100)

            return call

        return {name: make(name) for name in costs}, {GRADIENT: "no such unit"}

    monkeypatch.setattr(doctor, "_compile_products", compile_products)
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: clock[0])
    shares = []
    rates = doctor.measure_rates(5000.0, shares.append)
    assert {size for size, _ in order} == {256, 1024}  # 4096 would not fit
    timed = [name for size, name in order if size == 1024][3:]
    assert timed == list(costs) * (len(timed) // 3) and len(timed) >= 9
    *measured, missing = rates
    for rate in measured:
        assert rate.over_float32 == pytest.approx(4.0 / costs[rate.dtype], rel=0.05)
    assert missing == Rate(GRADIENT, 1024, error="no such unit")
    float32 = measured[0]
    assert float32.size == 1024 and float32.seconds is not None
    assert float32.tflops == pytest.approx(2 * 1024**3 / float32.seconds / 1e12)
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_what_does_not_compile_says_why(monkeypatch):
    dot_general = jax.lax.dot_general

    def no_e5m2(a, b, *args, **kwargs):
        if a.dtype == jnp.float8_e5m2:
            raise NotImplementedError("no fp8 on this device\nand more lines")
        return dot_general(a, b, *args, **kwargs)

    monkeypatch.setattr(doctor.jax.lax, "dot_general", no_e5m2)
    runs, errors = doctor._compile_products(8)
    assert list(runs) == DTYPES[:-1]
    assert errors == {GRADIENT: "no fp8 on this device"}
    products = [str(run().dtype) for run in runs.values()]
    assert products == [*DTYPES[:3], "bfloat16"]  # of fp8


def test_the_timed_fp8_products_are_those_of_fp8_dot_general(monkeypatch):
    found = set()
    dot_general = jax.lax.dot_general

    def noted(a, b, dimension_numbers, precision=None, preferred_element_type=None):
        if a.dtype.itemsize == 1:
            out = np.dtype(preferred_element_type).name
            found.add((a.dtype.name, b.dtype.name, precision, out))
        return dot_general(a, b, dimension_numbers, precision, preferred_element_type)

    def loss(a, b):
        return fp8_dot_general(a, b, (((1,), (0,)), ((), ()))).sum()

    monkeypatch.setattr(jax.lax, "dot_general", noted)
    # A shape of its own, so that no trace is in a cache.
    a, b = jnp.ones((16, 48), jnp.bfloat16), jnp.ones((48, 80), jnp.bfloat16)
    jax.jit(jax.grad(loss, argnums=(0, 1))).lower(a, b)
    expected = found.copy()
    of_a = {"float8_e4m3fn", "float8_e5m2"}
    assert {products[:2] for products in expected} == {(x, DTYPES[3]) for x in of_a}
    found.clear()
    runs, errors = doctor._compile_products(16)
    assert found == expected and list(runs) == DTYPES and not errors


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_is_refused(seconds):
    with pytest.raises(ValueError, match="Expected seconds to be positive, got"):
        doctor.diagnose(seconds=seconds)


@pytest.mark.parametrize("error", [RuntimeError("no backend"), AssertionError()])
def test_no_device_is_said(monkeypatch, error):
    def local_devices():
        raise error

    monkeypatch.setattr(doctor.jax, "local_devices", local_devices)
    with pytest.raises(RuntimeError) as raised:
        doctor.diagnose()
    expected = f"JAX finds no device (JAX_PLATFORMS is 'cpu'): {error!r}"
    assert str(raised.value) == expected


# What it prints.


def test_json_has_all_that_was_measured():
    found = json.loads(doctor.diagnose(seconds=0.1).to_json())
    assert list(found) == [f.name for f in dataclasses.fields(doctor.Diagnosis)]
    assert found["versions"]["jax"] == jax.__version__
    assert list(found["versions"]) == ["Python", "jax", "jaxlib"]
    cpus = {"platform": "cpu", "kind": "cpu", "compute_capability": None, "count": 8}
    assert found["devices"] == [cpus]
    assert [rate["dtype"] for rate in found["rates"]] == DTYPES
    for rate in found["rates"]:
        assert rate["error"] == "" and rate["seconds"] > 0 and rate["tflops"] > 0
    assert found["rates"][0]["over_float32"] == 1
    ranges = [row["dtype"] for row in found["ranges"]]
    assert ranges == ["float32", "float16", "bfloat16"]
    assert found["float32_bits"] == 23
    assert get_policy(found["recommendation"]["policy"])
    assert set(found["recommendation"]) == {"policy", "loss_scale", "reasons"}
    assert "No native fp8 products" in found["recommendation"]["reasons"][-1]
    assert isinstance(found["missing"], list)
    assert found["miscompiled"] == list(doctor.find_miscompiled())


GPUS = {"platform": "gpu", "kind": "A100", "compute_capability": "8.0", "count": 4}
DIAGNOSIS = doctor.Diagnosis(
    versions={"jax": "1.2.3"},
    devices=(GPUS,),
    rates=(Rate("float32", 4096, 1e-3, 137.0, 1.0), Rate(GRADIENT, 4096, error="why")),
    ranges=(doctor.DtypeRange("float16", 65504.0, 2.0**-14, 2.0**-24, False),),
    float32_bits=10,
    float32_error=3e-4,
    recommendation=doctor.recommend(A100, {"bfloat16": 2.0}),
    missing=("Something is missing.",),
    miscompiled=("Something is wrong.",),
)


def test_the_tables_say_it_all():
    text = in_one_line(DIAGNOSIS.to_text())
    for expected in (
        "jax 1.2.3",
        "gpu: A100 8.0 4",
        "products of 4096 × 4096",
        "float32 137 1.00",
        "float8_e5m2 x float8_e4m3fn - -",
        "float8_e5m2 x float8_e4m3fn does not compile: why",
        "float16 65504 2^-14 2^-24 flushed to 0",
        "keep 10 of 23 bits (TF32): relative error 3.0e-04.",
        'jax.default_matmul_precision("highest") keeps 23',
        'Train with get_policy("mixed_bfloat16"), loss scale: none.',
        "- bfloat16 products run at 2.00 × the rate of float32 here.",
        "- No native fp8 products are known here: A100 has compute capability 8.0;",
        "- Something is missing. - Something is wrong.",
    ):
        assert expected in text
    full = dataclasses.replace(DIAGNOSIS, float32_bits=23)
    assert "highest" not in in_one_line(full.to_text())
