"""The drift example is alarmed, asks for new advice, and goes on."""

import json

import pytest
import typer
from typer.testing import CliRunner

from examples import drift

pytestmark = [pytest.mark.standard_promotion, pytest.mark.full]


def test_the_stream_outgrows_float16_and_training_goes_on(tmp_path):
    app = typer.Typer()
    app.command()(drift.main)
    args = ["--steps", "12", "--width", "32", "--layers", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert "went beyond 65504: ask numerics.advise again" in found["alarm"]["message"]
    assert "Transformer/" in found["alarm"]["message"]
    assert "results of products stay in float32" in " ".join(found["advice"]["reasons"])
    full, half = found["validation_loss"].values()
    assert half == pytest.approx(full, rel=0.05)
    losses = found["losses"]["float16, measured"]
    assert all(loss == loss for loss in losses[-12:])  # no NaN after the new advice
    assert (tmp_path / "losses.png").exists()
