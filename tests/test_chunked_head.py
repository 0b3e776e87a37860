"""The chunked head in the whole line: the planner's choice, `fit`, `verify`, the command and its reports."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import made_up
import models
import reforward as rf
from reforward._cli import main
from reforward._fit import fit_report
from reforward._report import files, tables
from reforward._runtime import chunked_loss
from reforward._runtime.chunked_loss import Criterion
from reforward._solve import simulate
from reforward._verify import TOLERANCES
from untouched import fingerprint


@pytest.fixture(autouse=True)
def few_numbers_of_chunks(request: Any, monkeypatch: Any) -> None:
    """A dry run for each takes a second."""
    if "heads_when_asked" not in request.node.name:
        monkeypatch.setattr("reforward._profile.head.CHUNKS", (4, 8))


def gpt() -> tuple[nn.Module, rf.Step]:
    """Its logits weigh more than its blocks."""
    torch.manual_seed(0)
    model, loss = models.gpt(layers=2, width=32, batch=2, time=64, vocabulary=2000, sdpa=True)
    return model.train(), rf.Step(loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


# fit
# ---------------------------------------------------------------------------------------------------------


def test_fit_may_chunk_the_head() -> None:
    model, step = gpt()
    plain = rf.measure(model, step, repeats=1).peak_bytes
    before = fingerprint(model, step.optimizer)
    with pytest.raises(rf.BudgetError, match=r'allow="chunked_head".* would make it fit') as refusal:
        rf.fit(model, step, plain // 3)
    assert fingerprint(model, step.optimizer) == before
    promised = int(re.search(r"\((\d+) bytes, as measured\), and loss", str(refusal.value))[1])  # pyright: ignore[reportOptionalSubscript]
    assert promised <= plain // 3 < (refusal.value.smallest_bytes or 0)
    plan = rf.fit(model, step, plain // 3, allow="chunked_head")
    assert plan.head is not None
    assert plan.exactness == "rounding"
    measured = rf.measure(model, step, repeats=1)
    assert measured.peak_bytes <= plain // 3
    assert plan.predicted_peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)
    losses = [step.run().item() for _ in range(4)]
    assert losses[-1] < losses[0]
    rf.detach(model)
    assert rf.Plan.from_json(plan.to_json()) == plan


def test_nothing_is_chunked_that_needn_t_be() -> None:
    model, step = gpt()
    assert rf.fit(model, step, "110%", allow="chunked_head").exactness == "bitwise"


def headless() -> tuple[nn.Module, rf.Step]:
    """A model without a linear layer outside of its blocks."""
    model, loss = models.build("unet")
    return model, rf.Step(loss)


@pytest.mark.parametrize("make", [pytest.param(gpt, marks=pytest.mark.slow), headless])
def test_no_advice_that_does_not_help(make: Any) -> None:
    model, step = make()
    with pytest.raises(rf.BudgetError, match="no plan fits") as refusal:
        rf.fit(model, step, 1000)
    assert "allow=" not in str(refusal.value)


@pytest.mark.parametrize(
    ("make", "allow", "message"),
    [
        (gpt, "chunked", "allow must be 'chunked_head', not 'chunked'"),
        (
            lambda: (models.build("unet").model, rf.Step(models.build("unet").loss)),
            "chunked_head",
            "UNet has no nn.Lin",
        ),
    ],
)
def test_what_cannot_be_allowed(make: Any, allow: Any, message: str) -> None:
    model, step = make()
    with pytest.raises(rf.InputError, match=message):
        rf.fit(model, step, "60%", allow=allow)


def test_a_step_without_a_cross_entropy() -> None:
    model, step = gpt()
    ids = torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(rf.InputError, match=r"never gives the logits of head 'head' to torch\.nn\.functional\.cross_e"):
        with pytest.warns(UserWarning, match="computed whole"):
            rf.fit(model, rf.Step(lambda: model(ids).logsumexp(-1).mean()), "60%", allow="chunked_head")
    assert step.optimizer is not None


@pytest.mark.slow
def test_a_profile_has_heads_when_asked() -> None:
    model, step = gpt()
    profile = rf.profile(model, step, allow="chunked_head")
    assert [cost.head.chunks for cost in profile.heads] == [4, 8, 16, 32]
    peaks = [simulate(profile, rf.Plan(nodes=(), head=cost.head)).peak_bytes for cost in profile.heads]
    assert max(peaks) < simulate(profile, rf.Plan(nodes=())).peak_bytes
    for cost, peak in zip(profile.heads, peaks, strict=True):
        with rf.attached(model, rf.chunked_head(chunks=cost.head.chunks)):
            assert peak == pytest.approx(rf.measure(model, step, repeats=1).peak_bytes, rel=0.02)
    assert rf.profile(model, step).heads == ()
    with pytest.raises(rf.InputError, match="allow must be"):
        rf.profile(model, step, allow="heads")  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_the_report_of_a_fit() -> None:
    model, step = gpt()
    plain = rf.measure(model, step, repeats=1).peak_bytes
    report = fit_report(model, step, plain // 3, allow="chunked_head")
    assert report.plan.head is not None
    assert report.proof.differences == ()
    assert report.proof.exactness == "rounding"
    assert report.predicted_planned.peak_bytes == pytest.approx(report.measured_planned.peak_bytes, rel=0.02)
    assert report.predicted_plain.peak_bytes == pytest.approx(plain, rel=0.02)
    document = files.fit_document("gpt", report, [], timelines=False)
    assert document["plan"]["exactness"] == "rounding"
    assert document["proof"]["identical"] is False
    assert document["proof"]["exactness"] == "rounding"
    assert document["proof"]["largest_difference"] <= document["proof"]["tolerance"]
    assert {point["exactness"] for point in document["frontier"]} == {"bitwise", "rounding"}


# verify
# ---------------------------------------------------------------------------------------------------------


def test_the_proof_of_a_bitwise_plan_is_bitwise() -> None:
    model, step = gpt()
    proof = rf.verify(model, step, rf.full())
    assert (proof.exactness, proof.tolerance, proof.largest_difference) == ("bitwise", None, None)


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float64, False), (torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
)
def test_the_tolerance_is_that_of_the_coarsest_type(dtype: torch.dtype, autocast: bool) -> None:
    model, step = gpt()
    model = model.to(dtype)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return step.loss_fn()

    proof = rf.verify(model, rf.Step(loss), rf.chunked_head(chunks=8))
    assert proof.differences == ()
    assert proof.tolerance == TOLERANCES[torch.bfloat16 if autocast else dtype]
    assert proof.largest_difference is not None
    assert proof.largest_difference <= proof.tolerance


@pytest.mark.parametrize("scope", ["whole step", pytest.param("region by region", marks=pytest.mark.slow)])
def test_a_wrong_head_is_found(scope: str, monkeypatch: Any) -> None:
    """A mean over one row too many: a difference of less than a per cent."""
    model, step = gpt()
    plain = rf.measure(model, step, repeats=1).peak_bytes
    total = Criterion.total
    monkeypatch.setattr(Criterion, "total", lambda self, target: total(self, target) + 1)
    if scope == "whole step":
        proof = rf.verify(model, step, rf.chunked_head())
        assert proof.differences[0].startswith("loss")
        assert any(re.match(r"gradient head\.weight|gradient embedding\.weight", name) for name in proof.differences)
        assert proof.largest_difference is not None
        assert 1e-3 < proof.largest_difference < 1e-1
    else:
        with pytest.raises(rf.ReplayMismatchError, match="weight of head"):
            rf.fit(model, step, plain // 3, allow="chunked_head")


def test_a_difference_in_another_stream_is_found(monkeypatch: Any) -> None:
    """Only loss and gradients are compared to rounding."""
    model, step = gpt()

    def drawing(*args: Any) -> torch.Tensor:
        torch.rand(1)
        return chunked_loss(*args)

    monkeypatch.setattr("reforward._runtime.logits.chunked_loss", drawing)
    assert rf.verify(model, step, rf.chunked_head()).differences == ("RNG state torch CPU",)


# Reports and the command
# ---------------------------------------------------------------------------------------------------------


def printed(what: Any) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(what)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_tables_say_that_a_plan_is_equal_to_rounding() -> None:
    plan = rf.Plan(nodes=(), head=rf.Head(path="lm_head", chunks=16))
    text = printed(tables.plan_table(plan, ["h.0"]))
    assert "loss head in 16 chunks" in text
    assert "exactness: rounding" in text
    assert "exactness" not in printed(tables.plan_table(rf.Plan(nodes=()), ["h.0"]))
    proof = made_up.proof(exactness="rounding", tolerance=2e-5, largest_difference=3.4e-7)
    text = printed(tables.proof_text(proof))
    assert "losses and gradients equal to rounding (largest relative difference 3.4e-07, tolerance 2e-05)" in text
    assert "all else bit-identical" in text
    assert files.proof_document(proof)["identical"] is False


SCRIPT = """
import torch, models, reforward as rf

def make():
    torch.manual_seed(0)
    model, loss = models.gpt(layers=2, width=32, batch=2, time=64, vocabulary=2000, sdpa=True)
    return model.train(), rf.Step(loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
"""


@pytest.mark.slow
def test_the_command(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "head_script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["fit", "--model", "head_script:make", "--budget", "33%", "--steps", "2"]
    assert main([*arguments, "--allow", "chunked_head", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["exactness"] == "rounding"
    assert len(document["training"]) == 2
    assert main(["verify", "reforward-out/plan.json", "--model", "head_script:make"]) == 0
    assert "equal to rounding" in capsys.readouterr().out
    assert main([*arguments, "--allow", "heads"]) == 2
    assert "Traceback" not in capsys.readouterr().err
