"""The ResNet that benchmarks compile: as flax is written, or cast with `dtype=`."""

import functools
from typing import Any

import flax.linen as nn


class ResNet(nn.Module):
    """Bottleneck blocks and BatchNorm: ResNet-50 with blocks of (3, 4, 6, 3).

    Attributes:
      blocks: how many blocks each stage has.
      width: channels of the first stage inside a block; four times as many outside.
      classes: how many logits.
      dtype: the `dtype` of every layer; None leaves it to the inputs.
    """

    blocks: tuple[int, ...]
    width: int
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, dtype=self.dtype
        )
        x = nn.relu(norm()(conv(self.width, (7, 7), strides=2)(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, count in enumerate(self.blocks):
            width = self.width * 2**stage
            for block in range(count):
                strides = 2 if stage and not block else 1
                y = nn.relu(norm()(conv(width, (1, 1))(x)))
                y = nn.relu(norm()(conv(width, (3, 3), strides=strides)(y)))
                # Every block begins as the identity (Goyal et al., 2017).
                y = conv(4 * width, (1, 1))(y)
                y = norm(scale_init=nn.initializers.zeros)(y)
                if x.shape != y.shape:
                    x = norm()(conv(4 * width, (1, 1), strides=strides)(x))
                x = nn.relu(x + y)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))
