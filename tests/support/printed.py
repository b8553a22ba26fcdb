"""What a terminal shows of a table, for the tests of reports."""

import io
from typing import Any

from rich.console import Console


def printed(table: Any, width: int = 160) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return file.getvalue()
