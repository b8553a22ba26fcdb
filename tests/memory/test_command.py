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

def make_flat():
    return step, {"w": jnp.ones((8, 8))}, jnp.ones((8, 8))

def make_wrong():
    return step, (3,)

def make_with_data():
    from my_data import SIZE
    def step(x):
        from my_data import again
        return x
    return step, (jnp.ones(SIZE),)

def make_error():
    raise ValueError("my own error")

def make_shapes():
    return (lambda w, x: w @ x), (jnp.ones((3, 4)), jnp.ones((3, 4)))

def make_lost():
    import no_such_library
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "my_data.py").write_text("SIZE = again = 3", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds this folder
    yield
    for name in ("my_model", "my_data"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["make_step", "make_with_data"])
def test_a_step_is_loaded_from_this_folder_and_measured(name, capfd):
    assert main(["memory", f"my_model:{name}", "--donate", "0"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("peak: ") and "argument" in out and err == ""


@pytest.mark.parametrize(("limit", "status"), [("1gb", 0), ("1kB", 3)])
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


def test_progress_is_shown_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["memory", "my_model:make_step", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("peak: ")
    assert err == "tracing my_model:make_step ...\ncompiling for cpu ...\n"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("make_error", ValueError, "^my own error$"),
        ("make_shapes", TypeError, "dot_general requires contracting"),
        ("make_lost", ModuleNotFoundError, "no_such_library"),
    ],
)
def test_what_a_program_raises_keeps_its_type_file_and_line(name, error, message):
    with pytest.raises(error, match=message) as caught:
        main(["memory", f"my_model:{name}"])
    assert any("my_model.py" in str(entry.path) for entry in caught.traceback)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["my_model"], "got 'my_model': write my_model:make_step, in the folder"),
        (["my_model.py:f"], "got 'my_model.py:f': write my_model:make_step, in"),
        (["../my_model:f"], "got '../my_model:f': write my_model:make_step, in"),
        (["no_model:make_step"], "There is no module 'no_model' here"),
        (["my_model:make"], "my_model has no function 'make'"),
        (["my_model:make_nothing"], "returns a step and a tuple of its arguments, got"),
        (["my_model:make_flat"], "got function, dict, ArrayImpl: write return step, ("),
        (["my_model:make_wrong"], "missing a required argument: 'x'"),
        (["my_model:make_step", "--donate", "7"], "has 7, and step is given 2 arg"),
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
