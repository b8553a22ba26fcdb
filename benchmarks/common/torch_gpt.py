"""The benchmarks' transformer in PyTorch, as its users have it: torch.amp, compiled.

Attention is torch's own, which picks a fused kernel; the model is otherwise that of
`benchmarks.common.transformer`. torch is no dependency: without it nothing is measured.
"""

import importlib
from collections.abc import Callable
from typing import Any

PRECISIONS = ("float32", "bfloat16", "float16")


def why_not() -> str:
    """Return why torch cannot be measured here, "" where it can."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


class Done:
    """The state of a torch step, which changes in place."""

    def __init__(self, synchronize: Callable[[], None]):
        self.block_until_ready = synchronize


def start(
    precision: str, sizes: dict[str, int], *, device: str = "cuda"
) -> tuple[Callable[[Any], Any], Any, int | None]:
    """Return a train step `state -> state`, its state, and its peak memory in bytes.

    Args:
      precision: one of `PRECISIONS`; float16 with a GradScaler.
      sizes: layers, width, heads, vocabulary, batch, length.
      device: "cuda"; on "cpu" nothing is compiled, to see that it runs.
    """
    torch: Any = importlib.import_module("torch")
    functional, is_cuda = torch.nn.functional, device == "cuda"
    held = torch.cuda.memory_allocated() if is_cuda else 0  # by what was before
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    model = _transformer(torch, sizes).to(device)
    compiled = torch.compile(model) if is_cuda else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, enabled=precision == "float16")
    shape = sizes["batch"], sizes["length"]
    tokens = torch.randint(sizes["vocabulary"], shape, device=device)

    def step(state):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(
            device, getattr(torch, precision), enabled=precision != "float32"
        ):
            logits = compiled(tokens[:, :-1])
            loss = functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return state

    if not is_cuda:
        return step, Done(lambda: None), None
    torch.cuda.reset_peak_memory_stats()
    state = step(step(Done(torch.cuda.synchronize)))
    return step, state, torch.cuda.max_memory_allocated() - held


def _transformer(torch: Any, sizes: dict[str, int]) -> Any:
    nn, functional = torch.nn, torch.nn.functional
    width, heads = sizes["width"], sizes["heads"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1 = nn.LayerNorm(width, bias=False)
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.norm_2 = nn.LayerNorm(width, bias=False)
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x):
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(h.transpose(1, 2).reshape(batch, length, width))
            h = functional.gelu(self.up(self.norm_2(x)), approximate="tanh")
            return x + self.down(h)

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(sizes["vocabulary"], width)
            nn.init.normal_(self.embedding.weight, std=width**-0.5)
            self.layers = nn.ModuleList([Block() for _ in range(sizes["layers"])])
            self.norm = nn.LayerNorm(width, bias=False)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return functional.linear(self.norm(x), self.embedding.weight)

    return Transformer()
