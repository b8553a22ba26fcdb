"""The models that benchmarks compile: written in float32, or cast by hand.

In float32 a loss is plain code. In half it is cast by hand: parameters where a product
reads them, and what is between products; statistics of norms, softmax and the loss are
float32.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.common import families, llama, other_families, transformer
from benchmarks.common.transformer import cross_entropy
from jmp_lite.linen import with_policy

# Every model takes `(params, *batch)` and returns a loss and what is to be kept.
Loss = Callable[..., tuple[jax.Array, Any]]
Sizes = dict[str, Any]  # of a model

_TRANSFORMER = {
    "layers": (1, 1, 6),
    "width": (64, 256, 1024),
    "heads": (4, 4, 16),
    "vocabulary": (256, 2048, 32000),
    "batch": (2, 8, 8),
    "length": (32, 256, 1024),
}
_LLAMA = _TRANSFORMER | {"hidden": (128, 768, 2816), "kv_heads": (2, 2, 4)}
# Each is "small", which runs on any machine within a second; "ci"; and "full". Layers
# are written out, so a program's size, and the time it takes to compile, is that of its
# layers, and on TPUs that of its arrays as well.
_SIZES: dict[str, dict[str, tuple[Any, ...]]] = {
    "transformer": _TRANSFORMER,
    "mlp": {"width": (64, 1024, 4096), "batch": (16, 2048, 8192)},
    "cnn": {  # at size full, ResNet-50
        "blocks": ((1, 1), (1, 1), (3, 4, 6, 3)),
        "width": (8, 32, 64),
        "classes": (10, 10, 1000),
        "image": (32, 64, 224),
        "batch": (4, 32, 64),
    },
    "unet": {
        "widths": ((8, 16), (32, 64), (128, 256, 512)),
        "blocks": (1, 1, 2),
        "groups": (4, 8, 32),
        "image": (8, 16, 64),
        "batch": (2, 4, 32),
    },
    "vit": {  # ViT-S/16
        "layers": (1, 1, 12),
        "width": (32, 192, 384),
        "heads": (2, 3, 6),
        "patch": (8, 16, 16),
        "classes": (10, 10, 1000),
        "image": (16, 64, 224),
        "batch": (4, 32, 64),
    },
    "llama": _LLAMA,
    "moe": _LLAMA
    | {"layers": (1, 1, 4), "experts": (4, 8, 8), "capacity": (1.25, 1.25, 1.25)},
    "lstm": {
        "width": (64, 128, 1024),
        "vocabulary": (256, 2048, 32000),
        "batch": (4, 16, 64),
        "steps": (8, 16, 128),
    },
    "llama in a scan": _LLAMA,
    "conformer": {
        "layers": (1, 1, 16),
        "width": (32, 192, 256),
        "heads": (2, 3, 4),
        "kernel": (7, 31, 31),
        "classes": (16, 256, 1024),
        "batch": (2, 8, 16),
        "frames": (32, 1024, 1600),
        "features": (16, 80, 80),
    },
    "convnext": {
        "blocks": ((1, 1), (1, 1), (3, 3, 9, 3)),
        "widths": ((8, 16), (32, 64), (96, 192, 384, 768)),
        "classes": (10, 10, 1000),
        "image": (16, 64, 224),
        "batch": (4, 32, 64),
    },
    "unet3d": {
        "widths": ((4, 8), (16, 32), (32, 64, 128, 256)),
        "groups": (2, 8, 8),
        "classes": (10, 3, 3),
        "volume": (8, 32, 128),
        "batch": (2, 2, 2),
    },
    "dit": {  # DiT-S/2
        "layers": (1, 1, 12),
        "width": (32, 192, 384),
        "heads": (2, 3, 6),
        "patch": (2, 2, 2),
        "classes": (10, 10, 1000),
        "image": (8, 16, 32),
        "channels": (4, 4, 4),
        "batch": (2, 32, 64),
    },
    "gnn": {
        "steps": (1, 1, 15),
        "width": (16, 128, 128),
        "outputs": (3, 3, 3),
        "nodes": (32, 2048, 16384),
        "edges": (64, 8192, 98304),
    },
    "pinn": {
        "layers": (2, 3, 8),
        "width": (16, 128, 256),
        "points": (32, 8192, 65536),
    },
}
# Of a size, those of each model.
SIZES: dict[str, dict[str, Sizes]] = {
    size: {
        model: {name: values[i] for name, values in sizes.items()}
        for model, sizes in _SIZES.items()
    }
    for i, size in enumerate(("small", "ci", "full"))
}
_TEXT = {"layers": 1, "width": 256, "vocabulary": 2048, "batch": 8, "length": 256}
_HEADS = _TEXT | {"heads": 4, "hidden": 1024}
# As small as size ci of the others.
SIZES_OF_OTHERS: dict[str, Sizes] = {
    "dlrm": {"tables": 8, "rows": 10_000, "width": 64, "hidden": 256, "batch": 2048},
    "swin": {
        **{"widths": (48, 96), "heads": 3, "window": 4, "patch": 4, "classes": 10},
        **{"image": 64, "batch": 32},
    },
    "vae": {"widths": (32, 64, 128), "latent": 64, "image": 64, "batch": 32},
    "t5": _HEADS,
    "gemma": _HEADS,
    "mamba": _TEXT | {"states": 16},
    "linear attention": _HEADS | {"chunk": 64},
    "nerf": {"layers": 4, "width": 128, "rays": 512, "samples": 32},
    "realnvp": {"couplings": 4, "width": 128, "image": 32, "batch": 32},
    "wgan": {"widths": (64, 128, 256), "image": 32, "batch": 32},
}


class Model(NamedTuple):
    """A model that is compiled."""

    title: str  # on the pages
    make_loss: Callable[..., Loss]  # of a dtype and sizes
    # The parameters, what is kept from step to step, and the batch, as zeros.
    make_shapes: Callable[[Sizes], tuple[Any, ...]]

    def shapes(self, sizes: Sizes) -> tuple[Any, ...]:
        return jax.eval_shape(lambda: self.make_shapes(sizes))


# What a batch is made of: functions of the sizes.


def zeros(*shape: str | int, dtype: Any = jnp.float32) -> Callable[[Sizes], jax.Array]:
    """Return what makes zeros `[*shape]`, where names stand for sizes."""
    return lambda sizes: jnp.zeros(
        [sizes[n] if isinstance(n, str) else n for n in shape], dtype
    )


integers = functools.partial(zeros, dtype=jnp.int32)
IMAGES, LABELS = zeros("batch", "image", "image", 3), integers("batch")
TOKENS = integers("batch", "length")


# Models without a library of layers.


def transformer_loss(dtype: str, sizes: Sizes) -> Loss:
    def loss(params, tokens):
        heads = sizes["heads"]
        return transformer.loss_fn(params, tokens, heads, jnp.dtype(dtype)), ()

    return loss


def _transformer_shapes(sizes: Sizes) -> tuple[Any, ...]:
    params = transformer.init(sizes["layers"], sizes["width"], sizes["vocabulary"])
    return params, (), TOKENS(sizes)


def mlp_loss(dtype: str, sizes: Sizes) -> Loss:
    """The MLP of TensorFlow's guide to mixed precision in Keras."""
    del sizes

    def loss(params, images, labels):
        x = images.astype(dtype)
        for i, (kernel, bias) in enumerate(params):
            x = x @ kernel.astype(dtype) + bias.astype(dtype)
            x = jax.nn.relu(x) if i < len(params) - 1 else x
        return cross_entropy(x, labels), ()

    return loss


def _mlp_shapes(sizes: Sizes) -> tuple[Any, ...]:
    pairs = itertools.pairwise([784, sizes["width"], sizes["width"], 10])
    params = [(jnp.zeros((n, m)), jnp.zeros(m)) for n, m in pairs]
    return params, (), zeros("batch", 784)(sizes), LABELS(sizes)


def _llama_shapes(sizes: Sizes) -> tuple[Any, ...]:
    return llama.make_params(sizes), (), TOKENS(sizes)


def _scanned_llama_shapes(sizes: Sizes) -> tuple[Any, ...]:
    return transformer.stack(llama.make_params(sizes)), (), TOKENS(sizes)


def lstm_loss(dtype: str, sizes: Sizes) -> Loss:
    """Return the cross entropy of the next token, of one LSTM layer."""
    half = jnp.dtype(dtype)

    def loss(params, tokens):
        tokens = tokens.T
        weights = jax.tree.map(lambda w: w.astype(half), params)
        x = weights["embedding"][tokens[:-1]]
        # Those of all steps at once.
        inputs = x @ weights["input"] + weights["bias"]

        def step(carry, inputs):
            h, c = carry
            i, f, g, o = jnp.split(inputs + h @ weights["recurrent"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        first = jnp.zeros((sizes["batch"], sizes["width"]), half)
        _, h = jax.lax.scan(step, (first, first), inputs)
        return cross_entropy(h @ weights["head"], tokens[1:]), ()

    return loss


def _lstm_shapes(sizes: Sizes) -> tuple[Any, ...]:
    width, words = sizes["width"], sizes["vocabulary"]
    params = {
        "embedding": (words, width),
        "input": (width, 4 * width),
        "recurrent": (width, 4 * width),
        "bias": (4 * width,),
        "head": (width, words),
    }
    tokens = integers("batch", sizes["steps"] + 1)(sizes)
    return transformer.zeros(params), (), tokens


# Models in flax: ResNet, whose statistics are kept, and those that keep nothing.


def _resnet(sizes: Sizes, dtype: str) -> families.ResNet:
    # In float32 the dtypes are those of the inputs, which a policy may cast.
    half = None if dtype == "float32" else jnp.dtype(dtype)
    return families.ResNet(half, sizes["blocks"], sizes["width"], sizes["classes"])


def cnn_loss(dtype: str, sizes: Sizes, policy: str = "") -> Loss:
    model: Any = _resnet(sizes, dtype)
    if policy:
        model = with_policy(model, policy)

    def loss(params, batch_stats, images, labels):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, images, mutable=["batch_stats"])
        return cross_entropy(logits, labels), updated["batch_stats"]

    return loss


def _cnn_shapes(sizes: Sizes) -> tuple[Any, ...]:
    images = IMAGES(sizes)
    variables = _resnet(sizes, "float32").init(jax.random.key(0), images)
    return variables["params"], variables["batch_stats"], images, LABELS(sizes)


def flax_model(
    title: str,
    module: Any,
    error: Callable[..., jax.Array],
    *batch: Callable[[Sizes], jax.Array],
) -> Model:
    """Return a flax model, whose fields are its sizes.

    The loss is the error, of the model as a function and of the arrays of a batch.
    """
    names = {field.name for field in dataclasses.fields(module)}

    def make_model(sizes, dtype):
        fields = {name: value for name, value in sizes.items() if name in names}
        return module(**fields, dtype=jnp.dtype(dtype))

    def make_loss(dtype, sizes):
        model = make_model(sizes, dtype)

        def loss(params, *batch):
            apply = functools.partial(model.apply, {"params": params})
            return error(apply, *batch), ()

        return loss

    def make_shapes(sizes):
        model, found = make_model(sizes, "float32"), []

        def init(*inputs):
            output, variables = model.init_with_output(jax.random.key(0), *inputs)
            found.append(variables["params"])
            return output

        arrays = [make(sizes) for make in batch]
        error(init, *arrays)  # which knows what the model takes
        return found[0], (), *arrays

    return Model(title, make_loss, make_shapes)


# Losses of flax models: of the model as a function, and a batch.


def _labels_error(model: Callable[..., Any], *batch: jax.Array) -> jax.Array:
    """Return the cross entropy of a batch that ends with its labels."""
    *inputs, labels = batch
    return cross_entropy(model(*inputs), labels)


def _target_error(model: Callable[..., Any], *batch: jax.Array) -> jax.Array:
    """Return the mean squared error of a batch that ends with its target."""
    *inputs, target = batch
    return _squared_error(model(*inputs), target)


def _noise_error(model, images, noise, times, *labels):
    """Return the mean squared error of the noise at 1000 levels of it."""
    kept = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000)).astype(np.float32)
    signal = jnp.asarray(kept)[times][:, None, None, None]
    noisy = jnp.sqrt(signal) * images + jnp.sqrt(1 - signal) * noise
    return _squared_error(model(noisy, times, *labels), noise)


def _burgers_error(model, times, places, forces):
    """Return the mean squared error of `u_t + u u_x - 0.01 u_xx`, as Burgers has it."""
    one = jnp.ones_like(times)

    def slope(places):
        return jax.jvp(lambda x: model(times, x), (places,), (one,))[1]

    value, by_time = jax.jvp(lambda t: model(t, places), (times,), (one,))
    by_place, curvature = jax.jvp(slope, (places,), (one,))
    residual = by_time + value * by_place - 0.01 * curvature
    return _squared_error(residual, forces)


def _squared_error(predicted: Any, target: Any) -> jax.Array:
    return jnp.mean((predicted.astype(jnp.float32) - target) ** 2)


def _clicks(model, numbers, categories, labels):
    logits = model(numbers, categories).astype(jnp.float32)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def _next_token(model, tokens):
    return cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])


def _translation(model, source, target):
    return cross_entropy(model(source, target)[:, :-1], target[:, 1:])


def _evidence(model, images, noise):
    """Return the negative evidence lower bound."""
    logits, mean, log_variance = model(images, noise)
    logits = logits.astype(jnp.float32)
    error = optax.sigmoid_binary_cross_entropy(logits, images).sum((1, 2, 3))
    excess = jnp.exp(log_variance) + mean**2 - 1 - log_variance
    return (error + 0.5 * excess.sum(-1)).mean()


def _colours(model, origins, directions, depths, colours):
    """Return the squared error of rays `[R, 3]`, of depths `[R, S]`."""
    points = origins[:, None] + depths[..., None] * directions[:, None]
    density, found = model(points, directions)
    absorbed = density[:, :-1] * jnp.diff(depths)
    light = jnp.exp(-jnp.cumsum(absorbed, axis=1) + absorbed)
    seen = light * (1 - jnp.exp(-absorbed))
    return jnp.mean(((seen[..., None] * found[:, :-1]).sum(1) - colours) ** 2)


def _likelihood(model, images):
    return -model(images).mean() / images[0].size


def _criticism(model, real, false, share):
    """Return the loss of the critic, with the penalty of its gradient."""
    between = share * real + (1 - share) * false
    slopes = jax.grad(lambda x: model(x).sum())(between)
    norms = jnp.sqrt((slopes**2).sum((1, 2, 3)))
    return (model(false) - model(real)).mean() + 10 * ((norms - 1) ** 2).mean()


# By the names that arguments and results have.
MODELS: dict[str, Model] = {
    "transformer": Model("transformer", transformer_loss, _transformer_shapes),
    "mlp": Model("MLP", mlp_loss, _mlp_shapes),
    "cnn": Model("ResNet-50", cnn_loss, _cnn_shapes),
    "unet": flax_model(*("U-Net", families.UNet, _noise_error), IMAGES, IMAGES, LABELS),
    "vit": flax_model("ViT-S/16", families.ViT, _labels_error, IMAGES, LABELS),
    "llama": Model("Llama", llama.make_loss, _llama_shapes),
    "moe": Model("mixture of experts", llama.make_loss, _llama_shapes),
    "lstm": Model("LSTM", lstm_loss, _lstm_shapes),
    "llama in a scan": Model("Llama in a scan", llama.make_loss, _scanned_llama_shapes),
    "conformer": flax_model(
        *("conformer", families.Conformer, _labels_error),
        zeros("batch", "frames", "features"),
        lambda sizes: integers("batch", sizes["frames"] // 4)(sizes),
    ),
    "convnext": flax_model(
        *("ConvNeXt", families.ConvNeXt, _labels_error), IMAGES, LABELS
    ),
    "unet3d": flax_model(
        *("3D U-Net", families.UNet3D, _labels_error),
        zeros("batch", "volume", "volume", "volume", 1),
        integers("batch", "volume", "volume", "volume"),
    ),
    "dit": flax_model(
        *("DiT", families.DiT, _noise_error),
        *2 * [zeros("batch", "image", "image", "channels")],
        *(LABELS, LABELS),
    ),
    "gnn": flax_model(
        *("graph network", families.MeshGraphNet, _target_error),
        *(zeros("nodes", 12), zeros("edges", 7), integers("edges"), integers("edges")),
        zeros("nodes", "outputs"),
    ),
    "pinn": flax_model(
        *("PINN", families.Field, _burgers_error), *3 * [zeros("points", 1)]
    ),
}
# Those that are compiled once.
OTHERS: dict[str, Model] = {
    "dlrm": flax_model(
        *("DLRM", other_families.DLRM, _clicks),
        *(zeros("batch", 13), integers("batch", "tables"), zeros("batch")),
    ),
    "swin": flax_model("Swin", other_families.Swin, _labels_error, IMAGES, LABELS),
    "vae": flax_model(
        *("VAE", other_families.VAE, _evidence), IMAGES, zeros("batch", "latent")
    ),
    "t5": flax_model("T5", other_families.T5, _translation, TOKENS, TOKENS),
    "gemma": flax_model("Gemma", other_families.Gemma, _next_token, TOKENS),
    "mamba": flax_model("Mamba", other_families.Mamba, _next_token, TOKENS),
    "linear attention": flax_model(
        "gated linear attention",
        *(other_families.GatedLinearAttention, _next_token, TOKENS),
    ),
    "nerf": flax_model(
        *("NeRF", other_families.NeRF, _colours, zeros("rays", 3), zeros("rays", 3)),
        *(zeros("rays", "samples"), zeros("rays", 3)),
    ),
    "realnvp": flax_model("RealNVP", other_families.RealNVP, _likelihood, IMAGES),
    "wgan": flax_model(
        *("WGAN-GP, critic", other_families.Critic, _criticism),
        *(IMAGES, IMAGES, zeros("batch", 1, 1, 1)),
    ),
}
