"""Record how other libraries move their loss scale, for `test_loss_scale_machine.py`.

Runs each peer for real: a parameter, a gradient that is finite or not, the peer's own
step. Not a part of the test suite: it needs an environment of its own, and is run by
hand when a peer or a sequence is added::

    python -m venv peers
    peers/bin/pip install jmp==0.0.4 torch keras flax
    KERAS_BACKEND=torch peers/bin/python tests/tools/record_peers.py

It rewrites `tests/data/peers.json`. Per run: the peer, its arguments, ours that should
do the same, and sequences of steps ("1" is a finite one, "0" is not) with the scale
after each step, as pairs [how many steps, scale]. These scales stay in the range where
every peer is defined (torch and keras have no floor, and none has our ceiling); what a
peer does beyond it is recorded under "extremes".
"""

import importlib
import itertools
import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

STEPS = 48
OUTPUT = pathlib.Path(__file__).parents[1] / "data" / "peers.json"


def sequences(period: int) -> dict[str, str]:
    """Return named sequences; some are made to upset a machine of this period."""
    rng = random.Random(period)
    named = {
        "finite": "1" * STEPS,
        "non-finite": "0" * STEPS,
        "alternating": "10" * STEPS,
        "one too few": ("1" * (period - 1) + "0") * STEPS,
        "just enough": ("1" * period + "0") * STEPS,
        "pairs of bad": ("1" * period + "00") * STEPS,
        "burst": "0" * 7 + "1" * (STEPS - 14) + "0" * 7,
    }
    for share in (2, 5, 10):
        draws = ("0" if rng.randrange(share) == 0 else "1" for _ in range(STEPS))
        named[f"random, 1 bad in {share}"] = "".join(draws)
    return {name: bits[:STEPS] for name, bits in named.items()}


def gradients(bits: str) -> Iterator[float]:
    """Yield a gradient per step: 1, or by turns inf, -inf and NaN."""
    bad = [float("inf"), float("-inf"), float("nan")]
    for step, bit in enumerate(bits):
        yield 1.0 if bit == "1" else bad[step % 3]


def run_torch(bits: str, **arguments: Any) -> list[float]:
    """Step `torch.amp.GradScaler`."""
    torch = importlib.import_module("torch")
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", **arguments)
    scales = []
    for gradient in gradients(bits):
        optimizer.zero_grad()
        scaler.scale(parameter * gradient).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def run_keras(bits: str, **arguments: Any) -> list[float]:
    """Step `keras.optimizers.LossScaleOptimizer`."""
    keras = importlib.import_module("keras")
    variable = keras.Variable(1.0)
    inner = keras.optimizers.SGD(0.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, **arguments)
    optimizer.build([variable])
    scales = []
    for gradient in gradients(bits):
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        scales.append(float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)))
    return scales


def run_jmp(bits: str, **arguments: Any) -> list[float]:
    """Step `jmp.DynamicLossScale`."""
    jmp, jnp = importlib.import_module("jmp"), importlib.import_module("jax.numpy")
    # jmp wants arrays of the right dtype, as its own examples do not.
    floats = {k: jnp.float32(v) for k, v in arguments.items() if "scale" in k}
    loss_scale = jmp.DynamicLossScale(**(arguments | floats))
    scales = []
    for gradient in gradients(bits):
        loss_scale = loss_scale.adjust(jmp.all_finite(jnp.float32(gradient)))
        scales.append(float(loss_scale.loss_scale))
    return scales


def run_flax(bits: str, **arguments: Any) -> list[float]:
    """Step `flax.training.dynamic_scale.DynamicScale`."""
    module = importlib.import_module("flax.training.dynamic_scale")
    jnp = importlib.import_module("jax.numpy")
    dynamic_scale = module.DynamicScale(**arguments)
    scales = []
    for gradient in gradients(bits):
        step = dynamic_scale.value_and_grad(lambda x, g: x * g)
        dynamic_scale, *_ = step(jnp.float32(1), jnp.float32(gradient))
        scales.append(float(dynamic_scale.scale))
    return scales


# The widest bounds that ours can have.
CEILING = {"max_loss_scale": 2.0**126}
UNBOUNDED = {"min_loss_scale": 0.0} | CEILING


def torch_run(scale: float, period: int, factor: float, backoff: float) -> Any:
    theirs = {
        "init_scale": scale,
        "growth_interval": period,
        "growth_factor": factor,
        "backoff_factor": backoff,
    }
    ours = {
        "loss_scale": scale,
        "period": period,
        "factor": factor,
        "backoff_factor": backoff,
        **UNBOUNDED,
    }
    return "torch", run_torch, theirs, ours


def keras_run(scale: float, period: int) -> Any:
    theirs = {"initial_scale": scale, "dynamic_growth_steps": period}
    ours = {"loss_scale": scale, "period": period, **UNBOUNDED}
    return "keras", run_keras, theirs, ours


def jmp_run(scale: float, period: int, factor: int, floor: float) -> Any:
    theirs = {
        "loss_scale": scale,
        "period": period,
        "factor": factor,
        "min_loss_scale": floor,
    }
    return "jmp", run_jmp, theirs, theirs | CEILING


def flax_run(scale: float, interval: int, factor: float, floor: float) -> Any:
    theirs = {
        "scale": scale,
        "growth_interval": interval,
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "minimum_scale": floor,
    }
    # Flax grows on the step after `growth_interval` clean ones.
    ours = {
        "loss_scale": scale,
        "period": interval + 1,
        "factor": factor,
        "min_loss_scale": floor,
        **CEILING,
    }
    return "flax", run_flax, theirs, ours


RUNS = [
    torch_run(2.0**16, 5, 2.0, 0.5),
    torch_run(2.0**16, 1, 2.0, 0.5),
    torch_run(1000.0, 4, 1.5, 0.7),
    torch_run(2.0**16, 3, 4.0, 0.5),
    keras_run(2.0**15, 5),
    keras_run(2.0**15, 1),
    jmp_run(2.0**15, 5, 2, 1.0),
    jmp_run(2.0**15, 4, 4, 0.25),
    jmp_run(10.0, 3, 3, 0.37),
    flax_run(2.0**16, 4, 2.0, 1.0),
]


# So many steps take a scale of 2**15 out of float32's range, one by one.
FAR = 300
EXTREMES = [
    torch_run(2.0**15, 1, 2.0, 0.5),
    keras_run(2.0**15, 1),
    jmp_run(2.0**15, 1, 2, 0.0),
]


def run_lengths(scales: list[float]) -> list[list[float]]:
    """Return the scales as pairs of how many steps, and the scale."""
    groups = itertools.groupby(scales)
    return [[len(list(group)), scale] for scale, group in groups]


def main() -> None:
    """Run every peer on every sequence and write the recording."""
    metadata = importlib.import_module("importlib.metadata")
    recorded = [
        {
            "peer": peer,
            "theirs": theirs,
            "ours": ours,
            "sequences": {
                name: {"finite": bits, "scales": run_lengths(run(bits, **theirs))}
                for name, bits in sequences(ours["period"]).items()
            },
        }
        for peer, run, theirs, ours in RUNS
    ]
    names = ("torch", "keras", "jmp", "flax", "jax")
    extremes = [
        {
            "peer": peer,
            # As text: JSON has no inf.
            "after_finite": repr(run("1" * FAR, **theirs)[-1]),
            "after_non_finite": repr(run("0" * FAR, **theirs)[-1]),
        }
        for peer, run, theirs, _ in EXTREMES
    ]
    head = {
        "recorded_by": "tests/tools/record_peers.py",
        "versions": {name: metadata.version(name) for name in names},
        "extremes": extremes,
    }
    lines = ",\n".join(json.dumps(run) for run in recorded)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
