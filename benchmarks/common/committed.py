"""The committed results: which there are, and the command that measures each."""

import json
from typing import Any

from examples.common.results import COMMITTED

# Models whose steps were timed on a GPU, and how.
TIMED = {
    "transformer": "--model transformer --dtype bfloat16 --dtype fp8 --dtype float16 "
    "--rounds 8",
    # Stopped after the first model, when the time on the device was up.
    "cnn": "--model cnn --model unet --model vit --model llama --model moe "
    "--model lstm --model llama_in_a_scan --model mlp --dtype bfloat16 --rounds 15",
    "unet": "--model unet --dtype bfloat16 --rounds 10",
    "vit": "--model transformer --model vit --dtype bfloat16 --rounds 10",
    "llama": "--model llama --dtype bfloat16 --rounds 10",
    "lstm": "--model lstm --dtype bfloat16 --rounds 10",
    "mlp": "--model mlp --dtype bfloat16 --rounds 10",
}
# Every committed result, and what measures it.
_PROGRAMS: dict[str, str] = {
    "cpu/digits/results": "examples.digits --seeds 3",
    "cpu/digits-autocast/results": "examples.digits --seeds 3 --autocast",
    "cpu/resnet/results": "examples.resnet --seeds 3",
    "cpu/transformer/results": "examples.transformer --seeds 3",
    "cpu/transformer-with_policy/results": (
        "examples.transformer --seeds 3 --no-autocast"
    ),
    "cpu/step_overhead": "benchmarks.step_overhead",
    "cpu/convergence": "benchmarks.convergence",
    "cpu/fp8_accuracy": "benchmarks.fp8_accuracy",
    "cpu/storage_accuracy": "benchmarks.storage_accuracy",
    "cpu/autocast_trace": "benchmarks.autocast_trace --rounds 7",
    "cpu/tree_stats": "benchmarks.tree_stats",
    "cpu/checkpoint_save": "benchmarks.checkpoint_save --folder /dev/shm",
    "h100/step_overhead": (
        "benchmarks.step_overhead --leaves 1 --leaves 16 --rounds 30 --steps 20"
    ),
    **{
        f"h100/train_step-{x}": f"benchmarks.train_step {how}"
        for x, how in TIMED.items()
    },
    **{
        f"{device}-compiled/programs-ci": "benchmarks.programs"
        for device in ("h100", "a100", "v100", "v5e")
    },
    **{
        f"{device}-compiled/programs-full": (
            f"benchmarks.programs --device {device} --size full"
        )
        for device in ("h100", "v5e")
    },
    "h100-compiled/programs-others": (
        "benchmarks.programs --device h100 --size others"
    ),
    "h100-compiled/memory": "benchmarks.memory --device h100",
    "v5e-compiled/memory": (  # to compile for a TPU takes minutes for each row
        "benchmarks.memory --device v5e --layers 2 --width 1024 --heads 8 "
        "--vocabulary 8192"
    ),
    "rtx4090-compiled/small_gpu": "benchmarks.small_gpu",
}


def _command(name: str) -> str:
    folder, _, _ = name.rpartition("/")
    # What is compiled is in the folder of its device by itself.
    out = "" if folder.endswith("-compiled") else f"/{folder}"
    return f"python -m {_PROGRAMS[name]} --out benchmarks/results{out}"


RESULTS = {f"{name}.json": _command(name) for name in _PROGRAMS}


def load(name: str) -> dict[str, Any]:
    """Return a committed result.

    Raises:
      KeyError: nothing is said to measure it.
      FileNotFoundError: there is none.
    """
    if name not in RESULTS:
        raise KeyError(f"expected one of {', '.join(RESULTS)}, got {name!r}")
    return json.loads((COMMITTED / name).read_text(encoding="utf-8"))
