"""The models that benchmarks compile: written in float32, or cast by hand.

In float32 a loss is plain code. In half it is cast by hand: parameters where a product
reads them, and what is between products; statistics of norms, softmax and the loss are
float32.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import families, image_models, transformer
from benchmarks.common.transformer import cross_entropy
from jmp_lite.linen import with_policy

# Every model takes `(params, *batch)` and returns a loss and what is to be kept.
Loss = Callable[..., tuple[jax.Array, Any]]
Sizes = dict[str, Any]  # of a model
MakeModel = Callable[[Sizes, str], Any]  # a flax module, of a dtype
MakeShapes = Callable[[Sizes], tuple[Any, ...]]

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

_CHOSEN = 2  # experts of a token
_BALANCE = 0.01  # of the loss that balances experts
_MLP = ("gate", "up", "down")


def transformer_loss(dtype: str, sizes: Sizes) -> Loss:
    def loss(params, tokens):
        heads = sizes["heads"]
        return transformer.loss_fn(params, tokens, heads, jnp.dtype(dtype)), ()

    return loss


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


def cnn_loss(dtype: str, sizes: Sizes, policy: str = "") -> Loss:
    model: Any = _resnet(sizes, dtype)
    if policy:
        model = with_policy(model, policy)

    def loss(params, batch_stats, images, labels):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, images, mutable=["batch_stats"])
        return cross_entropy(logits, labels), updated["batch_stats"]

    return loss


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


def llama_loss(
    dtype: str,
    sizes: Sizes,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda layer: layer,
) -> Loss:
    """Return the cross entropy of the next token, of a Llama or a mixture of experts.

    RMSNorm, rotary positions, fewer heads for keys and values, SwiGLU; the head is not
    tied to the embedding. Layers may be stacked in one, as `transformer.stack` does.

    Args:
      dtype: the compute dtype.
      sizes: as in `SIZES`.
      around: what is around each layer, such as `jax.checkpoint`.

    References:
      Touvron et al., LLaMA: open and efficient foundation language models, 2023,
        https://arxiv.org/abs/2302.13971
    """
    half = jnp.dtype(dtype)

    def loss(params, tokens):
        angles = angles_of(tokens.shape[1], sizes["width"] // sizes["heads"])

        @around
        def layer_fn(carry, layer):
            x, balance = carry
            with jax.named_scope("attention"):
                h = _rms_norm(x, layer["norm_1"])
                x = x + _attention(h, layer, angles, sizes)
            with jax.named_scope("mlp"):
                h = _rms_norm(x, layer["norm_2"])
                if "router" in layer:
                    h, term = _experts(h, layer, sizes)
                    balance += _BALANCE * term
                else:
                    h = _swiglu(h, *(layer[k].astype(half) for k in _MLP))
                return (x + h, balance), None

        carry = params["embedding"].astype(half)[tokens], jnp.float32(0)
        if "layers" in params:
            carry, _ = jax.lax.scan(layer_fn, carry, params["layers"])
        else:
            for i in range(sizes["layers"]):
                carry, _ = layer_fn(carry, params[f"layer_{i}"])
        x, balance = carry
        with jax.named_scope("head"):
            logits = _rms_norm(x, params["norm"]) @ params["head"].astype(half)
            return cross_entropy(logits[:, :-1], tokens[:, 1:]) + balance, ()

    return loss


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


def _rms_norm(x, gain):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-5)
    return (y * gain).astype(x.dtype)


def angles_of(length, features):
    """Return what the position turns a pair of features by: `[S, features / 2]`."""
    frequencies = 10_000 ** (-jnp.arange(0, features, 2) / features)
    return jnp.arange(length)[:, None] * frequencies[None]


def rotate(x, angles):
    """Turn pairs of features, of heads `[B, S, K, ..., D]`, by the angles of `S`."""
    angles = jnp.expand_dims(angles, range(1, x.ndim - 2))
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(x, layer, angles, sizes):
    """Attend to what came before; each key and value has several queries."""
    batch, length, width = x.shape
    heads, groups = sizes["heads"], sizes["kv_heads"]
    q, k, v = (
        (x @ layer[name].astype(x.dtype)).reshape(batch, length, *shape, width // heads)
        for name, shape in (
            ("query", (groups, heads // groups)),
            ("key", (groups,)),
            ("value", (groups,)),
        )
    )
    q, k = rotate(q, angles), rotate(k, angles)
    logits = jnp.einsum("bsghd,btgd->bghst", q, k) * (width // heads) ** -0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    logits = jnp.where(mask, logits.astype(jnp.float32), -1e9)
    probabilities = jax.nn.softmax(logits).astype(x.dtype)
    h = jnp.einsum("bghst,btgd->bsghd", probabilities, v)
    return h.reshape(batch, length, width) @ layer["out"].astype(x.dtype)


def _swiglu(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _experts(x, layer, sizes):
    """Send each token to two experts, as GShard does; return a loss that balances them.

    A sequence is a group: an expert has room for its share of it, times `capacity`.
    Tokens that find no room are left out, second choices first.

    References:
      Lepikhin et al., GShard: scaling giant models with conditional computation and
        automatic sharding, 2020, https://arxiv.org/abs/2006.16668
    """
    half, experts = x.dtype, sizes["experts"]
    room = math.ceil(sizes["capacity"] * _CHOSEN * x.shape[1] / experts)
    logits = (x @ layer["router"].astype(half)).astype(jnp.float32)
    probabilities = jax.nn.softmax(logits)
    gates, chosen = jax.lax.top_k(probabilities, _CHOSEN)
    gates = (gates / gates.sum(-1, keepdims=True)).astype(half)

    taken, combine = 0, jnp.zeros((), half)
    for i in range(_CHOSEN):
        mask = jax.nn.one_hot(chosen[..., i], experts, dtype=jnp.int32)
        place = taken + jnp.cumsum(mask, axis=1) - mask
        taken = taken + mask.sum(1, keepdims=True)
        place = jax.nn.one_hot((place * mask).sum(-1), room, dtype=half)
        gate = gates[..., i, None] * mask.astype(half)
        combine = combine + gate[..., :, None] * place[..., None, :]
    dispatch = (combine > 0).astype(half)

    gate, up, down = (layer[name].astype(half) for name in _MLP)
    h = jnp.einsum("bsec,bsd->becd", dispatch, x)
    gated = jax.nn.silu(jnp.einsum("becd,edf->becf", h, gate))
    h = jnp.einsum("becf,efd->becd", gated * jnp.einsum("becd,edf->becf", h, up), down)
    share = jax.nn.one_hot(chosen[..., 0], experts).mean(1)
    balance = experts * (share * probabilities.mean(1)).sum(-1).mean()
    return jnp.einsum("bsec,becd->bsd", combine, h), balance


def _resnet(sizes: Sizes, dtype: str) -> image_models.ResNet:
    # In float32 the dtypes are those of the inputs, which a policy may cast.
    half = None if dtype == "float32" else jnp.dtype(dtype)
    return image_models.ResNet(sizes["blocks"], sizes["width"], sizes["classes"], half)


# Shapes: of the parameters, of what is kept from step to step, and of the batch.


def _transformer_shapes(sizes: Sizes) -> tuple[Any, ...]:
    params = transformer.init(sizes["layers"], sizes["width"], sizes["vocabulary"])
    return params, (), zero_tokens(sizes)


def _mlp_shapes(sizes: Sizes) -> tuple[Any, ...]:
    widths, batch = [784, sizes["width"], sizes["width"], 10], sizes["batch"]
    pairs = itertools.pairwise(widths)
    params = [(jnp.zeros((n, m)), jnp.zeros(m)) for n, m in pairs]
    return params, (), jnp.zeros((batch, 784)), integers(batch)


def _shapes_of(make_model: MakeModel, make_batch: MakeShapes) -> MakeShapes:
    """Return the shapes of a flax model, from those of what it takes and of a batch."""

    def make_shapes(sizes):
        inputs, batch = make_batch(sizes)
        variables = make_model(sizes, "float32").init(jax.random.key(0), *inputs)
        return variables["params"], variables.get("batch_stats", ()), *batch

    return make_shapes


def labelled_images(sizes: Sizes) -> tuple[Any, ...]:
    images = zero_images(sizes)
    return (images,), (images, integers(sizes["batch"]))


def _noisy_images(sizes: Sizes) -> tuple[Any, ...]:
    images = noise = zero_images(sizes)
    times = labels = integers(sizes["batch"])
    given = (times, labels) if "classes" in sizes else (times,)
    return (images, *given), (images, noise, *given)


def zero_images(sizes: Sizes) -> jax.Array:
    side, channels = sizes["image"], sizes.get("channels", 3)
    return jnp.zeros((sizes["batch"], side, side, channels))


def _speech(sizes: Sizes) -> tuple[Any, ...]:
    batch, frames = sizes["batch"], sizes["frames"]
    spectra = jnp.zeros((batch, frames, sizes["features"]))
    return (spectra,), (spectra, integers(batch, frames // 4))


def _volumes(sizes: Sizes) -> tuple[Any, ...]:
    shape = (sizes["batch"], *3 * [sizes["volume"]])
    volumes = jnp.zeros((*shape, 1))
    return (volumes,), (volumes, integers(*shape))


def _graph(sizes: Sizes) -> tuple[Any, ...]:
    nodes, edges = sizes["nodes"], sizes["edges"]
    senders = receivers = integers(edges)
    graph = jnp.zeros((nodes, 12)), jnp.zeros((edges, 7)), senders, receivers
    return graph, (*graph, jnp.zeros((nodes, sizes["outputs"])))


def _points(sizes: Sizes) -> tuple[Any, ...]:
    times = places = forces = jnp.zeros((sizes["points"], 1))
    return (times, places), (times, places, forces)


def integers(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


def _llama_shapes(sizes: Sizes) -> tuple[Any, ...]:
    width, hidden, words = sizes["width"], sizes["hidden"], sizes["vocabulary"]
    kv_width = width * sizes["kv_heads"] // sizes["heads"]
    experts = (sizes["experts"],) if "experts" in sizes else ()
    layer = {
        "norm_1": (width,),
        "query": (width, width),
        "key": (width, kv_width),
        "value": (width, kv_width),
        "out": (width, width),
        "norm_2": (width,),
        "gate": (*experts, width, hidden),
        "up": (*experts, width, hidden),
        "down": (*experts, hidden, width),
        **({"router": (width, *experts)} if experts else {}),
    }
    params = {
        "embedding": (words, width),
        "norm": (width,),
        "head": (width, words),
        **{f"layer_{i}": layer for i in range(sizes["layers"])},
    }
    return transformer.zeros(params), (), zero_tokens(sizes)


def _scanned_llama_shapes(sizes: Sizes) -> tuple[Any, ...]:
    params, kept, tokens = _llama_shapes(sizes)
    return transformer.stack(params), kept, tokens


def _lstm_shapes(sizes: Sizes) -> tuple[Any, ...]:
    width, words = sizes["width"], sizes["vocabulary"]
    params = {
        "embedding": (words, width),
        "input": (width, 4 * width),
        "recurrent": (width, 4 * width),
        "bias": (4 * width,),
        "head": (width, words),
    }
    tokens = zero_tokens(sizes | {"length": sizes["steps"] + 1})
    return transformer.zeros(params), (), tokens


def zero_tokens(sizes: Sizes) -> jax.Array:
    return integers(sizes["batch"], sizes["length"])


class Model(NamedTuple):
    """A model that is compiled.

    Attributes:
      title: its name on the pages.
      make_loss: takes a dtype and sizes, returns the loss.
      make_shapes: takes sizes; returns the parameters, what is kept from step to step,
        and the batch, as zeros.
    """

    title: str
    make_loss: Callable[..., Loss]
    make_shapes: MakeShapes

    def shapes(self, sizes: Sizes) -> tuple[Any, ...]:
        """Return the shapes of what `make_shapes` makes."""
        return jax.eval_shape(lambda: self.make_shapes(sizes))


def flax_model(
    title: str,
    module: Any,
    make_batch: MakeShapes,
    error: Callable[..., jax.Array] = _labels_error,
) -> Model:
    """Return a flax model, whose fields are its sizes.

    Args:
      title: its name on the pages.
      module: the class of the model.
      make_batch: takes sizes; returns the inputs of the model, and a batch.
      error: takes the model as a function, and a batch; returns the loss.
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

    return Model(title, make_loss, _shapes_of(make_model, make_batch))


# By the names that arguments and results have.
MODELS: dict[str, Model] = {
    "transformer": Model("transformer", transformer_loss, _transformer_shapes),
    "mlp": Model("MLP", mlp_loss, _mlp_shapes),
    "cnn": Model("ResNet-50", cnn_loss, _shapes_of(_resnet, labelled_images)),
    "unet": flax_model("U-Net", image_models.UNet, _noisy_images, _noise_error),
    "vit": flax_model("ViT-S/16", image_models.ViT, labelled_images),
    "llama": Model("Llama", llama_loss, _llama_shapes),
    "moe": Model("mixture of experts", llama_loss, _llama_shapes),
    "lstm": Model("LSTM", lstm_loss, _lstm_shapes),
    "llama in a scan": Model("Llama in a scan", llama_loss, _scanned_llama_shapes),
    "conformer": flax_model("conformer", families.Conformer, _speech),
    "convnext": flax_model("ConvNeXt", families.ConvNeXt, labelled_images),
    "unet3d": flax_model("3D U-Net", families.UNet3D, _volumes),
    "dit": flax_model("DiT", families.DiT, _noisy_images, _noise_error),
    "gnn": flax_model("graph network", families.MeshGraphNet, _graph, _target_error),
    "pinn": flax_model("PINN", families.Field, _points, _burgers_error),
}
