"""What compiling for other devices needs: says what to install, where it is missing.

The other benchmarks need what the examples need.
"""

from examples.common.libraries import need

need("numerics", "matplotlib", "rich")
need("flax", "flax")  # which itself imports rich
need("examples", "typer")
