"""The doctor: what it measures and prints, and advises for hardware not here."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib.version
import pytest
from dtype_cases import FakeDevice

from jmp_lite import get_policy, loss_scale_for
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


DIAGNOSIS = doctor.Diagnosis(
    versions={"jax": "1.2.3"},
    devices=("4 × gpu: A100, compute capability 8.0",),
    rates=(Rate("float32", 4096, 137.0, 1.0), Rate(GRADIENT, 4096, error="why")),
    policy="mixed_bfloat16",
    findings=("It is fast.", "It has the range of float32."),
)


# What it advises.


@pytest.mark.parametrize(
    ("device", "ratios", "policy", "why"),
    [
        (CPU, {"bfloat16": 0.4, "float16": 0.1}, "float32", "bfloat16 is slower than"),
        (CPU, {}, "float32", 'get_policy("mixed_bfloat16") gives the same results'),
        (GTX_1080, {}, "float32", 'get_policy("mixed_float16") gives the same results'),
        (CPU, {"bfloat16": 3.5}, "mixed_bfloat16", "at 3.50 × the rate of float32"),
        (GTX_1080, {"float16": 0.9}, "float32", "half precision is fast from 7.0"),
        (V100, {"bfloat16": 0.5, "float16": 5.0}, "mixed_float16", "at 5.00 × the"),
        (V100, {}, "mixed_float16", "V100 has no fast bfloat16"),
        (A100, {"bfloat16": 2.0}, "mixed_bfloat16", "has the range of float32"),
        (A100, {"bfloat16": 0.8}, "mixed_bfloat16", "less than this device can do"),
        (TPU, {"bfloat16": 1.0, "float16": 1.0}, "mixed_bfloat16", "has the range of"),
    ],
    ids=lambda x: getattr(x, "device_kind", None),
)
def test_a_device_gets_the_policy_that_trains_fast_on_it(device, ratios, policy, why):
    found, reasons = doctor.recommend(device, ratios)
    assert found == policy and why in " ".join(reasons)
    assert all(reason[-1] == "." for reason in reasons)
    needs_scale = jax.tree.leaves(loss_scale_for(get_policy(policy))) != []
    advice = dataclasses.replace(DIAGNOSIS, policy=policy).recommendation
    assert advice.endswith("dynamic." if needs_scale else "none.")


def fp8_findings(device: FakeDevice, **speeds: float) -> list[str]:
    """Return what is found about fp8 at these rates relative to bfloat16."""
    names = {"bfloat16": "bfloat16", "forward": "float8_e4m3fn", "gradient": GRADIENT}
    ratios = {names[name]: 2.5 * speed for name, speed in speeds.items()}
    return doctor.fp8_findings(device, ratios)


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
    (finding,) = fp8_findings(device, bfloat16=1.0, forward=3.0, gradient=3.0)
    assert finding.startswith(f"No native fp8 products are known here: {why}")


# A trained step is one forward product and two for gradients: 1 / 2 + 2 / 1.6, not 3.
@pytest.mark.parametrize(
    ("device", "forward", "gradient", "ratio"),
    [
        (H100, 2.0, 1.6, "1.71"),
        (TPU7, 2.0, 1.6, "1.71"),
        (H100, 1.8, 1.0, "1.17"),
    ],
)
def test_native_fp8_is_to_try_if_clearly_faster(device, forward, gradient, ratio):
    speeds = {"bfloat16": 1.0, "forward": forward, "gradient": gradient}
    measured, advice = fp8_findings(device, **speeds)
    assert f"native on {device.device_kind}. They run at {ratio} × the rate" in measured
    assert f"(forward {forward:.2f} ×, gradients {gradient:.2f} ×)." in measured
    expected = (
        'Try get_policy("mixed_fp8")' if ratio == "1.71" else "not clearly faster"
    )
    assert expected in advice


def test_native_fp8_without_a_measurement_is_not_recommended():
    speeds = {"bfloat16": 1.0, "forward": 2.0, "gradient": 2.0}
    for missing in speeds:
        left = {name: x for name, x in speeds.items() if name != missing}
        (found,) = fp8_findings(H100, **left)
        assert found.endswith("Their rate relative to bfloat16 was not measured here.")


def test_a_driver_that_jax_does_not_use_is_noticed(tmp_path: Path):
    driver = tmp_path / "version"
    assert doctor.find_missing({"cpu"}, driver) == []
    driver.touch()
    (missing,) = doctor.find_missing({"cpu"}, driver)
    assert 'JAX finds only the CPU: pip install "jmp-lite[gpu]"' in missing
    assert doctor.find_missing({"gpu"}, driver) == []


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


# What it measures.


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
    found = doctor.float32_finding()
    assert f" keep {bits} of 23 bits" in found
    assert ("highest" in found) == (bits < 23) and ("TF32" in found) == (bits == 10)


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
    assert missing == Rate(GRADIENT, 1024, error="no such unit")
    tflops = {rate.dtype: rate.tflops or 0.0 for rate in measured}
    for rate in measured:
        assert rate.over_float32 == pytest.approx(4.0 / costs[rate.dtype], rel=0.05)
        # The columns agree with each other, however slow a round was.
        quotient = tflops[rate.dtype] / tflops["float32"]
        assert rate.size == 1024 and rate.over_float32 == pytest.approx(quotient)
    # A product takes 4 × 64 seconds at first, and ever longer.
    slowest = 4 * 64 * (1 + len(order) / 100)
    assert 2 * 1024**3 / slowest < 1e12 * tflops["float32"] < 2 * 1024**3 / (4 * 64)
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
    assert list(found["versions"]) == ["Python", "jax", "jaxlib"]
    assert found["devices"] == ["8 × cpu: cpu"]
    assert [rate["dtype"] for rate in found["rates"]] == DTYPES
    assert all(rate["tflops"] > 0 and rate["error"] == "" for rate in found["rates"])
    assert found["rates"][0]["over_float32"] == 1
    assert get_policy(found["policy"])
    findings = found["findings"]
    for expected in (
        "No native fp8",
        "float32 products keep 23 of 23 bits.",
        *doctor.find_miscompiled(),
    ):
        assert any(finding.startswith(expected) for finding in findings)


def test_what_does_not_compile_is_a_finding(monkeypatch):
    rates = Rate("float32", 256, 1.0, 1.0), Rate(GRADIENT, 256, error="no such unit")
    monkeypatch.setattr(doctor, "measure_rates", lambda *args: rates)
    assert f"{GRADIENT} does not compile: no such unit" in doctor.diagnose().findings


def test_the_text_has_the_table_and_a_sentence_a_line():
    lines = str(DIAGNOSIS).splitlines()
    assert lines[:2] == ["jax 1.2.3", "4 × gpu: A100, compute capability 8.0"]
    rows = [line.split() for line in lines]
    assert ["products", "of", "4096", "×", "4096", "TFLOP/s", "/", "float32"] in rows
    assert ["float32", "137", "1.00"] in rows and [*GRADIENT.split(), "-", "-"] in rows
    assert lines[-3] == 'Train with get_policy("mixed_bfloat16"), loss scale: none.'
    assert lines[-2:] == [f"- {finding}" for finding in DIAGNOSIS.findings]
