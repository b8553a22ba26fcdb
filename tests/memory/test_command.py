"""The command line: what is loaded, printed and returned, and what errors say."""

import json
import sys

import pytest

from jmp_lite.__main__ import main

MODULE = """
import jax, jax.numpy as jnp

def step(params, x):
    return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x))

def loss(params, x):
    return jnp.sum(jnp.sin(x @ params["w"]))

def make_step():
    shape = jax.ShapeDtypeStruct
    params = {"w": shape((256, 256), "float32"), "b": shape((), "float32")}
    return step, (params, shape((64, 256), "float32"))

def make_nothing():
    return step

def make_wrong():
    return step, (3,)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_model", None)


def test_a_step_is_loaded_from_this_folder_and_measured(capfd):
    path = list(sys.path)
    assert main(["memory", "my_model:make_step", "--donate", "0"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("peak: ") and "parameters" in out
    assert err == "" and sys.path == path


@pytest.mark.parametrize(("limit", "status"), [("1GB", 0), ("0.1MB", 3)])
def test_the_exit_status_says_whether_it_fits(limit, status, capfd):
    args = ["memory", "my_model:make_step", "--device", "cpu", "--fits", limit]
    assert main(args) == status
    first = capfd.readouterr().out.splitlines()[0]
    assert first.startswith("no, it does not fit" if status else "yes, it fits")
    assert "compiled for, not run on" in first


def test_json_and_every_row(capfd):
    assert main(["memory", "my_model:make_step", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["arguments"]["parameters"] == 4 * 256**2 + 4
    assert main(["memory", "my_model:make_step", "--every"]) == 0
    assert "argument" in capfd.readouterr().out


@pytest.mark.parametrize("has_rich", [True, False])
def test_progress_is_shown_on_a_terminal(has_rich, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["memory", "my_model:make_step", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("peak: ") and "compiling for cpu" in err
    erase_line = "\x1b[2K"
    assert err.endswith(erase_line if has_rich else " ...\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["my_model"], "Expected package.module:function, got 'my_model'"),
        (["no_model:make_step"], "There is no module 'no_model' here"),
        (["my_model:make"], "my_model has no function 'make'"),
        (["my_model:make_nothing"], "returns a step and a tuple of its arguments, got"),
        (["my_model:make_wrong"], "missing a required argument: 'x'"),
        (["my_model:make_step", "--fits", "24"], "a limit with its unit"),
    ],
)
def test_mistakes_are_one_line_and_status_1(args, message, capsys):
    assert main(["memory", *args]) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_an_unknown_device_is_refused_with_those_that_are_known(capsys):
    with pytest.raises(SystemExit):
        main(["memory", "my_model:make_step", "--device", "h300"])
    assert "rtx4090" in capsys.readouterr().err
