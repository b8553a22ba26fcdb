"""What compiling for other devices needs: says what to install, where it is missing.

The other benchmarks need what the examples need.
"""

import importlib

from jmp_lite import extras

for _extra in ("numerics", "flax"):  # flax itself imports rich
    with extras.needed(_extra):
        for _library in extras.LIBRARIES[_extra]:
            importlib.import_module(_library)
