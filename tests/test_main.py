"""The command line: arguments, exit statuses, and what goes to which stream."""

import json
import re
import runpy
import subprocess
import sys

import jax
import pytest

import jmp_lite
from jmp_lite.__main__ import main
from jmp_lite._src import compat, doctor


def exit_status(*args: str) -> object:
    """Return how the program ends; argparse exits by itself."""
    try:
        return main(args)
    except SystemExit as exit:
        return exit.code


@pytest.fixture
def quick(monkeypatch):
    """Time nothing."""

    def measure_rates(seconds, on_progress):
        for share in (0.25, 0.5, 1.0):
            on_progress(share)
        return (doctor.Rate("float32", 256, 1.0, 1.0),)

    monkeypatch.setattr(doctor, "measure_rates", measure_rates)


def test_json_or_tables_are_all_that_goes_to_stdout(capfd, quick):
    assert exit_status("doctor", "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["devices"] == ["8 × cpu: cpu"]
    assert err == ""  # no terminal: no progress
    assert exit_status("doctor") == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "8 × cpu: cpu" in text
    assert "products of 256 × 256" in text and "Train with get_policy(" in text


def test_progress_is_shown_on_a_terminal_and_wiped_out(capsys, monkeypatch, quick):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert exit_status("doctor", "--json") == 0
    out, err = capsys.readouterr()
    json.loads(out)
    shown = [f"timing matrix products: {share}" for share in ("25%", "50%")]
    assert err.split("\r\033[K") == ["", *shown, ""]


@pytest.mark.parametrize(
    ("raised", "status", "expected"),
    [(RuntimeError("none"), 1, "no device.*none"), (KeyboardInterrupt(), 130, "^$")],
    ids=["an error", "Ctrl-C"],
)
def test_what_stops_it_is_no_traceback(raised, status, expected, capsys, monkeypatch):
    def stop():
        raise raised

    monkeypatch.setattr(jax, "local_devices", stop)
    assert exit_status("doctor") == status
    out, err = capsys.readouterr()
    assert out == "" and re.search(expected, err) and err.count("\n") == (status == 1)


def test_without_a_command_there_is_help_and_the_version_is_that_of_the_package(capsys):
    assert exit_status() == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: jmp-lite ") and "doctor" in out
    assert exit_status("--version") == 0
    assert capsys.readouterr().out == f"jmp_lite {jmp_lite.__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["docter"], "invalid choice: 'docter'"),
        (["doctor", "--seconds", "soon"], "argument --seconds: invalid float value"),
        (["doctor", "--jason"], "unrecognized arguments: --jason"),
        (["completion"], "arguments are required: shell"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(args, message, capsys):
    assert exit_status(*args) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("jmp-lite ", {"doctor", "memory", "completion"}),
        ("jmp-lite doctor --", {"--help", "--json", "--seconds"}),
        ("jmp-lite completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes_arguments(line, expected, capsys):
    assert exit_status("completion", "bash") == 0
    # What bash does when Tab is pressed at the end of the line.
    press_tab = f"""
COMP_LINE={line!r} COMP_WORDS=({line}) COMP_CWORD={line.count(" ")}
[[ {line!r} == *" " ]] && COMP_WORDS+=("")
$(complete -p jmp-lite | sed 's/.*-F \\([^ ]*\\) .*/\\1/') jmp-lite
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    script = capsys.readouterr().out + press_tab
    result = subprocess.run(["bash"], input=script, capture_output=True, text=True)
    assert set(result.stdout.split()) == expected, result.stderr


def test_the_version_is_checked_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version__", "0.7.2")
    with pytest.raises(ImportError, match="and jax 0.7.2 is installed"):
        runpy.run_path(compat.__file__)
