"""The diagrams of the pages, as SVG: questions, and below each the answers.

    python docs/diagrams.py     # `make figures`: write docs/images anew

They are narrow, so that a phone shows them at their size, and have a dark form.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).parent / "images"

_WIDTH, _INDENT, _LINE, _GAP = 380, 44, 19, 10
_STYLE = """\
text { fill: #222; font: 13px system-ui, sans-serif; }
.bold { font-weight: bold; }
.page { fill: #fff; stroke: none; }
rect { fill: #f4f5fb; stroke: #8a8fb0; }
.question { fill: #dfe3fa; }
path { fill: none; stroke: #8a8fb0; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e6e6; }
  rect { fill: #23252f; stroke: #7c82a8; }
  .page { fill: #1e2129; }
  .question { fill: #343a5e; }
  path { stroke: #7c82a8; }
}"""


class Box(NamedTuple):
    """A question with boxes below it, or an answer without."""

    text: str
    """Lines; bold if they begin with `*`."""
    below: tuple["Box", ...] = ()
    edge: str = ""
    """What is written at the line to the box, 3 letters at most."""


LOSS_SCALE = [
    Box(
        "gradients finite?",
        (
            Box(
                "period reached?",
                (
                    Box("*COUNT\ncounter + 1", edge="no"),
                    Box(
                        "*GROW\nscale × factor, at most max_loss_scale\n"
                        "counter = bad_steps = 0",
                        edge="yes",
                    ),
                ),
                "yes",
            ),
            Box(
                "hysteresis reached?",
                (
                    Box("*WAIT\nbad_steps + 1, counter = 0", edge="no"),
                    Box(
                        "*BACK OFF\nscale × backoff_factor,\nat least min_loss_scale\n"
                        "counter = bad_steps = 0",
                        edge="yes",
                    ),
                ),
                "no",
            ),
        ),
    )
]

WHICH = [
    Box(
        "Which device?",
        (
            Box("CPU, older GPU:\n*float32; half to test"),
            Box("GPU 7.0, 7.5 (V100, T4, RTX 20):\n*mixed_float16, scale_aware(tx)"),
            Box("TPU, GPU from 8.0 on (A100, RTX 30):\n*mixed_bfloat16, no loss scale"),
            Box(
                "GPU from 8.9 on, TPU v7, large products:\n"
                "*try mixed_fp8; compare loss and time"
            ),
        ),
    ),
    Box(
        "What is the model?",
        (
            Box("a loss in float32, of any library:\n*autocast"),
            Box("nnx modules; a policy for each module:\n*with_policy"),
            Box("your own casts:\n*cast_to_compute"),
        ),
    ),
    Box(
        "Short of memory? What fills it?",
        (
            Box("activations:\n*jax.checkpoint"),
            Box("optimiser state:\n*low_precision_state"),
            Box("parameters, gradients:\n*master_weights or stochastic_rounding"),
        ),
    ),
]

DIAGRAMS = {
    "loss_scale_states.svg": ("One step of a dynamic loss scale", LOSS_SCALE),
    "which.svg": ("Which dtype, which method, which memory", WHICH),
}


def draw(title: str, boxes: list[Box]) -> str:
    """Return a diagram as the text of an SVG file."""
    parts, end = [], _GAP / 2
    for box in boxes:
        *drawn, end = _draw(box, 1, end)
        parts += drawn
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {end:g}" '
        f'width="{_WIDTH}" height="{end:g}" role="img">\n<title>{title}</title>\n'
        f"<style>\n{_STYLE}\n</style>\n"
        f'<rect class="page" width="100%" height="100%"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _draw(box: Box, x: float, y: float) -> Iterator[str | float]:
    """Yield the elements of a box and of those below it; then where these end."""
    lines = box.text.split("\n")
    height = len(lines) * _LINE + 8
    kind = ' class="question" rx="12"' if box.below else ' rx="2"'
    yield (
        f'<rect{kind} x="{x:g}" y="{y:g}" width="{_WIDTH - x - 1:g}" '
        f'height="{height:g}"/>'
    )
    for i, line in enumerate(lines):
        bold = ' class="bold"' if line.startswith("*") else ""
        at = f'x="{x + 10:g}" y="{y + (i + 1) * _LINE - 1:g}"'
        yield f"<text{bold} {at}>{escape(line.removeprefix('*'))}</text>"
    stem, start, end = x + 12, y + height, y + height + _GAP
    for below in box.below:
        middle = end + _LINE / 2 + 4
        yield f'<path d="M{stem:g} {start:g}V{middle:g}H{x + _INDENT:g}"/>'
        if below.edge:
            yield f'<text x="{stem + 4:g}" y="{middle - 4:g}">{below.edge}</text>'
        for part in _draw(below, x + _INDENT, end):
            if isinstance(part, str):
                yield part
            else:
                end = part
    yield end


if __name__ == "__main__":
    for name, (title, boxes) in DIAGRAMS.items():
        (IMAGES / name).write_text(draw(title, boxes), encoding="utf-8")
        print(IMAGES / name)
