"""The committed results: which there are, and the command that measures each."""

import json
import re
from typing import Any

from examples.common.results import COMMITTED, ROOT

# Models whose steps were timed on a GPU, in the order of the tables.
TIMED = "transformer", "cnn", "unet", "vit", "llama", "lstm", "mlp"


def load(name: str) -> dict[str, Any]:
    return json.loads((COMMITTED / name).read_text(encoding="utf-8"))


def list_names() -> list[str]:
    """Return the names of all results; what was logged in each step is left out."""
    paths = (x for x in COMMITTED.rglob("*.json") if x.name != "history.json")
    return sorted(str(path.relative_to(COMMITTED)) for path in paths)


def command(name: str) -> str:
    """Return what measured a result, so that it writes into the committed ones."""
    folder, _, _ = name.rpartition("/")
    # What is compiled is in the folder of its device by itself.
    out = COMMITTED / ("" if folder.endswith("-compiled") else folder)
    measured = re.sub(r" --out \S+", "", load(name)["settings"]["command"])
    return f"{measured} --out {out.relative_to(ROOT)}"
