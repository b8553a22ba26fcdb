"""To be imported first: says what to install, where a library is missing."""

from examples.common.libraries import need

LIBRARIES = ("orbax.checkpoint", "flax", "matplotlib", "rich", "typer", "mlxtend")
need("examples", *LIBRARIES)
