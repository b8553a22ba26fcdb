"""Write the jaxpr of every program of the corpus under autocast, to compare revisions.

    python tests/tools/corpus_jaxprs.py out/before
    python tests/tools/corpus_jaxprs.py out/after && diff -r out/before out/after

One file per program, kind of half, and what is asked of it: the function, the gradient
of the autocast function, and autocast of the gradient.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import track

# As tests/conftest.py has it; before jax looks.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from autocast_corpus import PROGRAMS, Program
from autocast_corpus.program import POLICIES

from jmp_lite import autocast


def _loss(fun: Any) -> Any:
    def loss(*args):
        outs = jax.tree.leaves(fun(*args))
        floats = [x for x in outs if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(x).astype(jnp.float32) for x in floats)

    return loss


def jaxprs(program: Program, policy: str) -> dict[str, str]:
    """Return the jaxprs of a program as text, without addresses of objects."""
    with program.context():
        fun, args = program.make()
        functions = {"forward": autocast(fun, policy)}
        if "grad_outside" not in program.without:
            functions["grad_outside"] = jax.grad(_loss(autocast(fun, policy)))
            functions["grad_inside"] = autocast(jax.grad(_loss(fun)), policy)
        return {
            name: re.sub(r"0x[0-9a-f]+", "0x", str(jax.make_jaxpr(f)(*args)))
            for name, f in functions.items()
        }


def main(out: Path) -> None:
    """Write the jaxprs into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    for program in track(PROGRAMS, "tracing"):
        for half, policy in POLICIES.items():
            for name, text in jaxprs(program, policy).items():
                (out / f"{program.name}-{half}-{name}.txt").write_text(text + "\n")
    print(f"Wrote {len(list(out.iterdir()))} jaxprs into {out}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
