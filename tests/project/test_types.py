"""What users' type checkers see: as of a wheel, without the checkout beside it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_public_types_are_complete(tmp_path):
    shutil.copytree(ROOT / "jmp_lite", tmp_path / "jmp_lite")
    (tmp_path / "elsewhere").mkdir()
    programs = Path(sys.executable).parent
    # Pyright verifies what the first Python of PATH imports.
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
    }
    command = "pyright", "--verifytypes", "jmp_lite", "--ignoreexternal", "--outputjson"
    found = subprocess.run(
        [programs / command[0], *command[1:]],
        cwd=tmp_path / "elsewhere",
        env=environment,
        capture_output=True,
        text=True,
        check=False,  # 1, where any type is unknown
    )
    score = json.loads(found.stdout)["typeCompleteness"]["completenessScore"]
    # The one class that is not known is a subclass of a named tuple of optax.
    assert score > 0.98, found.stdout
