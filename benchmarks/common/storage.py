"""Ways to store parameters, master weights and optimiser state in training."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp

HALF = "bfloat16"
FLOAT32 = "float32"

ADAM, ADAFACTOR = "Adam", "AdaFactor"
# Name -> an optimiser, for a learning rate.
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    ADAM: optax.adam,
    # Its steps are as long as those of Adam: not relative to the parameters.
    ADAFACTOR: lambda rate: optax.adafactor(rate, multiply_by_parameter_scale=False),
}

MASTERS, REMAINDERS, STOCHASTIC = "masters", "remainders", "stochastic"
# Name -> a title, and what wraps the optimiser of half parameters.
WEIGHTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    MASTERS: ("bf16 + float32 masters", jmp.master_weights),
    REMAINDERS: (
        "bf16 + 16-bit remainders",
        lambda tx: jmp.master_weights(tx, storage="remainder"),
    ),
    STOCHASTIC: (
        "bf16, stochastic rounding",
        lambda tx: jmp.stochastic_rounding(tx, jax.random.key(0)),
    ),
}


class Storage(NamedTuple):
    """How a training stores its numbers."""

    compute: str = HALF  # the dtype of the model
    weights: str = FLOAT32  # or a key of `WEIGHTS`: parameters in bfloat16
    optimizer: str = ADAM  # a key of `OPTIMIZERS`
    state: str = FLOAT32  # the dtype of its moments, or "8bit"
    checked: bool = True  # by `scale_aware`

    @property
    def param_dtype(self) -> Any:
        return jnp.dtype(FLOAT32 if self.weights == FLOAT32 else HALF)

    def transformation(
        self, rate: Any, *first: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Return the optimiser, and `first` what changes the unscaled gradients."""
        tx: Any = optax.chain(*first, OPTIMIZERS[self.optimizer](rate))
        if self.state != FLOAT32:
            tx = jmp.low_precision_state(tx, self.state)
        if self.weights != FLOAT32:
            tx = WEIGHTS[self.weights][1](tx)
        if self.checked:
            # bfloat16 has the range of float32: a loss scale is not needed.
            tx = jmp.scale_aware(tx, jmp.NoOpLossScale())
        return optax.with_extra_args_support(tx)

    @property
    def params_title(self) -> str:
        return FLOAT32 if self.weights == FLOAT32 else WEIGHTS[self.weights][0]

    @property
    def optimizer_title(self) -> str:
        states = {FLOAT32: "", HALF: ", bf16 state", "8bit": ", 8-bit state"}
        return self.optimizer + states[self.state]

    def __str__(self) -> str:
        """All of it, as tables name it."""
        compute = "" if self.compute == HALF else ", float32 model"
        # Training in float32 is checked by nobody.
        checked = "" if self.checked or self.compute == FLOAT32 else ", unchecked"
        return f"{self.optimizer_title}; {self.params_title}{compute}{checked}"


_ADAMS = [(ADAM, state) for state in (FLOAT32, HALF, "8bit")]
_PLAIN = [(ADAM, FLOAT32), (ADAFACTOR, FLOAT32)]
_ALL = [*_ADAMS, (ADAFACTOR, FLOAT32)]

# Those of one kind of parameters stand together.
CHOICES: list[Storage] = [
    *(Storage(FLOAT32, FLOAT32, *tx, checked=False) for tx in _PLAIN),
    *(Storage(HALF, FLOAT32, *tx) for tx in _ALL),
    *(Storage(HALF, MASTERS, *tx) for tx in _ADAMS),
    *(Storage(HALF, REMAINDERS, *tx) for tx in _ADAMS),
    *(Storage(HALF, STOCHASTIC, *tx) for tx in _ALL),
    # Without the check, a gradient can be applied as soon as it is computed.
    *(
        Storage(HALF, weights, *tx, checked=False)
        for weights in (FLOAT32, STOCHASTIC)
        for tx in _PLAIN
    ),
]

# Of each way to store parameters or state, the plainest.
MAIN_CHOICES: list[Storage] = [
    Storage(FLOAT32, checked=False),
    Storage(),
    Storage(state=HALF),
    Storage(optimizer=ADAFACTOR),
    *(Storage(weights=weights) for weights in WEIGHTS),
    Storage(weights=STOCHASTIC, optimizer=ADAFACTOR),
]

# Those between which a reader decides; the table of all has the rest.
SHOWN_CHOICES: list[Storage] = [
    *(x for x in MAIN_CHOICES if x.weights in (FLOAT32, MASTERS)),
    Storage(weights=REMAINDERS, state="8bit"),
    Storage(weights=STOCHASTIC, state="8bit"),
    Storage(weights=STOCHASTIC, optimizer=ADAFACTOR),
]
