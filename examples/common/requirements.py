"""To be imported first: says what to install, where a library is missing."""

import importlib

from jmp_lite import extras

with extras.needed("examples"):
    for _library in extras.LIBRARIES["examples"]:
        importlib.import_module(_library)
