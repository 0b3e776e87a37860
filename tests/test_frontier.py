"""The curve of a live model, as data, as files and from the command line."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import reforward as rf
from reforward._cli import main
from reforward._report import files, tables
from untouched import fingerprint

SCRIPT = """
    import torch
    from torch import nn

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    def make():
        return Loss(), torch.ones(16, 8)
"""


@pytest.fixture(scope="module")
def curve() -> rf.Frontier:
    model, loss = models.build("gpt")
    return rf.frontier(model, loss, points=5, measured=True)


def test_more_memory_never_takes_longer(curve: rf.Frontier) -> None:
    peaks = [point.peak_bytes for point in curve.points]
    seconds = [point.seconds for point in curve.points]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert curve.smallest_bytes <= peaks[0] < peaks[-1] == curve.plain.peak_bytes
    assert curve.points[-1].plan.nodes == ()


def test_points_are_measured_as_predicted(curve: rf.Frontier) -> None:
    for point in [*curve.points, *curve.techniques]:
        assert point.measured is not None
        assert point.measured.peak_bytes == pytest.approx(point.peak_bytes, rel=0.02)


def test_techniques_need_no_less_than_the_bound(curve: rf.Frontier) -> None:
    assert [point.name for point in curve.techniques][:2] == ["rf.full()", "rf.every(2)"]
    assert all(point.peak_bytes >= curve.smallest_bytes for point in curve.techniques)


def test_nothing_is_changed() -> None:
    model, loss = models.build("gpt")
    before = fingerprint(model)
    assert all(point.measured is None for point in rf.frontier(model, loss, points=2).points)
    assert fingerprint(model) == before
    assert not any("forward" in module.__dict__ for module in model.modules())


class Apart(nn.Module):
    """Something happens between the blocks, so they form no run; (batch, 8) → the same."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


def test_runs_that_a_model_does_not_allow_are_left_out() -> None:
    model, x = Apart(), torch.randn(4, 8)
    found = rf.frontier(model, lambda: model(x).sum(), points=2)
    assert [point.name for point in found.techniques] == ["rf.full()", "rf.every(2)", "rf.every(3)"]


@pytest.mark.parametrize("points", [1, 0, -3, 2.5, "4", None])
def test_bad_numbers_of_points(points: Any) -> None:
    model, loss = models.build("gpt")
    with pytest.raises(rf.InputError, match="points must be a whole number of at least 2"):
        rf.frontier(model, loss, points=points)


def test_no_model() -> None:
    nothing: Any = None
    with pytest.raises(rf.InputError):
        rf.frontier(nothing, lambda: torch.zeros(()))


def test_files(curve: rf.Frontier, tmp_path: Path) -> None:
    written = files.write_frontier(tmp_path, "gpt", curve, remark=pytest.fail)
    assert [path.name for path in written] == ["frontier.json", "frontier.png"]
    document = json.loads((tmp_path / "frontier.json").read_text())
    plans = [rf.Plan.from_json(json.dumps(point["plan"])) for point in document["points"]]
    assert plans == [point.plan for point in curve.points]
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert tables.frontier_table(curve) is not None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "frontier_script.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["frontier", "--model", "frontier_script:make", "--points", "3", "--out", "here"]
    assert main(command) == 0
    assert "fastest plan" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["frontier.json", "frontier.png"]
    assert main([*command, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) == 3
    assert main(["frontier", "--points", "1"]) == 2
