"""The kernels of docs/recipes/attention_kernels.md are in the lowered programs."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "attention_kernels.md"

# These kernels are written for JAX' defaults, and JAX 0.12 deprecates one.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:jax.experimental.pallas.ops.gpu.attention"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

# Name on the page -> platform, the calls in the program.
KERNELS = {
    "cudnn": ("cuda", {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}),
    "pallas_gpu": ("cuda", {"__gpu$xla.gpu.triton"}),
    "pallas_tpu": ("tpu", {"tpu_custom_call"}),
    "splash": ("tpu", {"tpu_custom_call"}),
}


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Return what the Python blocks of the page define."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    defined: dict[str, Any] = {}
    exec("\n".join(blocks), defined)
    return defined


@pytest.fixture(autouse=True)
def cudnn_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give JAX a version of cuDNN, which it asks for when it traces."""
    cudnn = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(cudnn, lambda: 91000)


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_is_in_the_program(name: str, page: dict[str, Any]) -> None:
    platform, calls = KERNELS[name]
    step = page["step"](page[name])
    traced = step.trace(page["w"], page["x"])
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = re.findall(r"custom_call @([\w$.]+)\((.*)", text)
    operands = [line for call, line in found if call in calls]
    assert {call for call, _ in found if call in calls} == calls
    assert all("bf16" in line for line in operands)
    # The kernel reads what products write, and writes what one reads.
    assert "(tensor<2x256x4x64xf32>) -> tensor<2x256x4x64xbf16>" not in text


def test_cudnn_without_it_says_what_to_do(page: dict[str, Any]) -> None:
    attend = page["cudnn"].__wrapped__
    with pytest.raises(NotImplementedError, match="Q must be fp16/bf16") as raised:
        page["step"](attend).trace(page["w"], page["x"])
    assert "call in_half(kernel)(...)" in " ".join(raised.value.__notes__)
