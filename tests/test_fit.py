"""The line in one call: what a fitted step takes, what `fit` leaves behind, and what it refuses."""

from __future__ import annotations

import json
import random
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import reforward as rf
from reforward import _fit
from reforward._cli import main
from reforward._fit import fit_report
from reforward._measure.room import total_bytes
from reforward._profile import DryRun, profile_step
from reforward._verify import Proof
from untouched import fingerprint


def small_gpt() -> tuple[nn.Module, rf.Step]:
    """Mostly activations: static memory is a tenth of the plain peak."""
    model, loss = models.gpt(layers=3, width=32, batch=2, time=64)
    return model.train(), rf.Step(loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def deep_gpt() -> tuple[nn.Module, rf.Step]:
    """Deep enough that a quarter of its activations can be met."""
    model, loss = models.gpt(layers=10, width=32, batch=2, time=64)
    return model.train(), rf.Step(loss, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def share_of_activations(model: nn.Module, step: rf.Step, share: float) -> int:
    """A budget: static memory and a share of what the plain step takes above it."""
    plain = rf.measure(model, step, repeats=1)
    return plain.static_bytes + int(share * (plain.peak_bytes - plain.static_bytes))


# What a fitted step takes
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "percents", [(40,), *(pytest.param(some, marks=pytest.mark.slow) for some in [(80, 60, 25), (50, 30)])], ids=str
)
def test_the_planned_step_stays_within_the_budget(percents: tuple[int, ...], monkeypatch: Any) -> None:
    model, step = deep_gpt()
    plain = rf.measure(model, step, repeats=1)
    profiled = profile_step(model, step)  # once for all budgets
    monkeypatch.setattr(_fit, "profile_step", lambda *args, **options: profiled)
    for percent in percents:
        budget = plain.static_bytes + (plain.peak_bytes - plain.static_bytes) * percent // 100
        plan = rf.fit(model, step, budget)
        measured = rf.measure(model, step, repeats=1)
        rf.detach(model)
        assert measured.peak_bytes <= budget
        assert plan.predicted_peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)
        assert plan.budget_bytes == budget
        assert plan.model_type == "GPT"
        assert plan.predicted_seconds > plan.predicted_plain_seconds > 0
    assert rf.verify(model, step, plan).differences == ()


@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_models_with_buffers_and_workspaces(name: str) -> None:
    model, loss = getattr(models, name)(width=16, size=32)
    step = rf.Step(loss)
    budget = share_of_activations(model, step, 0.75)
    plan = rf.fit(model, step, budget)
    measured = rf.measure(model, step, repeats=1)
    assert measured.peak_bytes <= budget
    assert plan.predicted_peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05)
    assert plan.nodes


@pytest.mark.slow
def test_a_transformers_model() -> None:
    model, loss = models.build("gpt2")
    budget = share_of_activations(model, rf.Step(loss), 0.6)
    plan = rf.fit(model, loss, budget)
    assert {region.path for region in plan.regions()} <= {f"transformer.h.{index}" for index in range(3)}
    assert rf.measure(model, loss, repeats=1).peak_bytes <= budget


def test_one_plan_holds_for_every_length() -> None:
    model, _ = models.gpt(layers=4, width=32)
    batches = [torch.randint(0, models.VOCABULARY, shape) for shape in ((4, 32), (4, 64), (1, 48))]
    step = rf.Step(
        lambda ids: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        batches,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    plain = [rf.measure(model, step, variant=v, repeats=1).peak_bytes for v in range(3)]
    budget = int(0.6 * max(plain))
    plan = rf.fit(model, step, budget)
    peaks = [rf.measure(model, step, variant=v, repeats=1).peak_bytes for v in range(3)]
    assert max(peaks) <= budget < max(plain)
    assert plan.predicted_peak_bytes == pytest.approx(max(peaks), rel=0.02)


def test_a_budget_above_the_plain_peak_recomputes_nothing() -> None:
    model, step = small_gpt()
    plan = rf.fit(model, step, "1GiB")
    assert plan.nodes == ()
    assert plan.predicted_peak_bytes == plan.predicted_plain_peak_bytes
    assert plan.budget_bytes == 2**30


def test_budgets_in_words() -> None:
    model, step = small_gpt()
    plan = rf.fit(model, step, "60%")
    assert plan.budget_bytes == int(0.6 * plan.predicted_plain_peak_bytes)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    rest = rf.fit(model, step.loss_fn, "60%device")
    assert rest.budget_bytes == int(0.6 * total_bytes(torch.device("cpu")))
    assert rest.nodes == (), "the plan that was on the model is replaced"
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_the_plan_of_a_wrapped_model_is_one_for_the_model() -> None:
    model, step = small_gpt()
    plan = rf.fit(nn.DataParallel(model), step, "1GiB")
    assert plan.model_type == "GPT"
    assert rf.attach(model, plan) is plan


def test_a_plan_that_takes_more_than_predicted_is_made_again(monkeypatch: Any) -> None:
    """Where dry runs see too little, measurements decide."""
    right = _fit.dry_runs

    def optimistic(*args: Any, **options: Any) -> list[DryRun]:
        return [replace(found, peak_bytes=int(0.9 * found.peak_bytes)) for found in right(*args, **options)]

    model, step = small_gpt()
    budget = share_of_activations(model, step, 0.7)
    monkeypatch.setattr(_fit, "dry_runs", optimistic)
    plan = rf.fit(model, step, budget)
    assert rf.measure(model, step, repeats=1).peak_bytes <= budget
    assert plan.predicted_peak_bytes < 0.95 * budget


# What it leaves behind
# ---------------------------------------------------------------------------------------------------------


def trained(steps: int, fitted_before: int | None) -> dict[str, Any]:
    """What training leaves of a model that draws and counts, with `fit` called before one of its steps or never."""
    torch.manual_seed(0)
    random.seed(0)
    model, batch = Mixed(), torch.randn(256, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = rf.Step(lambda: model(batch).square().mean(), optimizer=optimizer)
    losses = []
    for index in range(steps):
        if index == fitted_before:
            budget = share_of_activations(model, step, 0.75)
            before = fingerprint(model, optimizer)
            plan = rf.fit(model, step, budget)
            assert plan.nodes
            rf.detach(model)
            assert fingerprint(model, optimizer) == before
            rf.attach(model, plan)
        losses.append(step.run().item())
    return {
        "losses": losses,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "streams": (torch.get_rng_state(), random.getstate()),
        "gradients": [p.grad for p in model.parameters()],
    }


class Mixed(nn.Module):
    """Blocks with everything that a step changes: dropout, Python's stream, running statistics."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(8, 32)
        self.layers = nn.ModuleList(MixedBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return x


class MixedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 128), nn.BatchNorm1d(128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.norm(self.up(x))) * random.uniform(0.9, 1.1)
        return x + self.down(F.dropout(h, 0.1, self.training))


@pytest.mark.parametrize("fitted_before", [0, 2], ids=["before training", "amid training"])
def test_training_goes_on_as_if_fit_had_not_been_called(fitted_before: int) -> None:
    never, fitted = trained(4, None), trained(4, fitted_before)
    assert never["losses"] == fitted["losses"]
    torch.testing.assert_close(fitted, never, rtol=0, atol=0)


def test_gradients_that_are_there_stay() -> None:
    model, step = small_gpt()
    step.run(optimize=False)
    before = fingerprint(model, step.optimizer)
    rf.fit(model, step, "80%")
    rf.detach(model)
    assert fingerprint(model, step.optimizer) == before


# The report
# ---------------------------------------------------------------------------------------------------------


def test_the_report_of_a_step_that_fits() -> None:
    model, step = small_gpt()
    before = fingerprint(model, step.optimizer)
    told: list[float] = []
    report = fit_report(model, step, "70%", progress=lambda text, share: told.append(share))
    assert fingerprint(model, step.optimizer) == before, "the plan isn't put on"
    assert told[-1] > 0.9
    assert report.proof.scope == "whole step"
    assert report.proof.differences == ()
    assert report.proof.gradients == len(list(model.parameters()))
    assert report.measured_plain.peak_bytes == pytest.approx(report.predicted_plain.peak_bytes, rel=0.02)
    assert report.measured_planned.peak_bytes == pytest.approx(report.predicted_planned.peak_bytes, rel=0.02)
    assert report.measured_planned.peak_bytes <= report.budget_bytes == report.plan.budget_bytes
    assert report.breakdown.total == report.predicted_plain.peak_bytes
    assert report.solver_status == "optimal"
    assert all(point.peak_bytes <= point.budget_bytes for point in report.frontier)
    assert [p.budget_bytes for p in report.frontier] == sorted(p.budget_bytes for p in report.frontier)
    assert [p.seconds for p in report.frontier] == sorted((p.seconds for p in report.frontier), reverse=True)


def test_a_plain_step_that_may_not_fit_is_never_run(monkeypatch: Any) -> None:
    model, step = small_gpt()
    monkeypatch.setattr(_fit, "usable_bytes", lambda device: step_bytes // 2)
    step_bytes = rf.measure(model, step, repeats=1).peak_bytes
    ran: list[bool] = []
    model.register_forward_pre_hook(
        lambda module, args: ran.append(torch.is_grad_enabled() and "forward" not in vars(model.layers[0]))  # pyright: ignore
    )
    report = fit_report(model, step, "60%")
    assert report.measured_plain is None
    assert report.proof.scope == "region by region"
    assert report.proof.differences == ()
    assert len(ran) > 5


def test_explain_sums_to_the_peak() -> None:
    model, step = small_gpt()
    before = fingerprint(model, step.optimizer)
    parts = rf.explain(model, step)
    assert fingerprint(model, step.optimizer) == before
    measured = rf.measure(model, step, repeats=1)
    assert parts.total == pytest.approx(measured.peak_bytes, rel=0.001)
    assert parts.parameters == parts.optimizer_state == sum(p.nbytes for p in model.parameters())
    assert list(parts.blocks) == [f"layers.{index}" for index in range(3)]
    assert type(parts) is type(measured.breakdown)


# What it refuses
# ---------------------------------------------------------------------------------------------------------


def resnet() -> tuple[nn.Module, rf.Step]:
    model, loss = models.resnet(width=16)
    return model, rf.Step(loss)


@pytest.mark.parametrize("make", [small_gpt, pytest.param(resnet, marks=pytest.mark.slow)])
def test_the_smallest_budget_that_is_named_can_be_met(make: Callable[[], tuple[nn.Module, rf.Step]]) -> None:
    model, step = make()
    before = fingerprint(model, step.optimizer)
    static = rf.measure(model, step, repeats=1).static_bytes
    with pytest.raises(rf.BudgetError, match=r"the smallest peak is .*It is reached in") as refused:
        rf.fit(model, step, static)
    assert fingerprint(model, step.optimizer) == before
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    assert refused.value.budget_bytes == static < smallest
    rf.fit(model, step, smallest)
    assert rf.measure(model, step, repeats=1).peak_bytes <= smallest


def tiny() -> tuple[nn.Module, rf.Step]:
    model, batch = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4))), torch.randn(2, 4)
    return model, rf.Step(lambda: model(batch).square().mean())


def refused(model: nn.Module, step: rf.Step, budget: int) -> rf.BudgetError:
    with pytest.raises(rf.BudgetError) as error:
        rf.fit(model, step, budget)
    assert error.value.smallest_bytes > budget == error.value.budget_bytes
    return error.value


def test_the_smallest_budget_of_a_tiny_model_can_be_met() -> None:
    model, step = tiny()
    smallest = refused(model, step, 1).smallest_bytes
    rf.fit(model, step, smallest)
    assert rf.measure(model, step, repeats=1).peak_bytes <= smallest


def test_a_budget_that_a_measurement_refused_is_told_what_was_measured(monkeypatch: Any) -> None:
    model, step = tiny()
    rf.fit(model, step, refused(model, step, 1).smallest_bytes)
    peak = rf.measure(model, step, repeats=1).peak_bytes
    right = _fit.dry_runs
    monkeypatch.setattr(_fit, "dry_runs", lambda *a, **k: [replace(r, peak_bytes=peak - 200) for r in right(*a, **k)])
    error = refused(model, step, peak - 100)
    assert f"({error.smallest_bytes} bytes, as measured; {peak - 200} B were predicted)" in str(error)
    rf.fit(model, step, error.smallest_bytes)
    assert rf.measure(model, step, repeats=1).peak_bytes <= error.smallest_bytes


@pytest.mark.parametrize(
    "budget", [float("nan"), 0, -1, "-5GiB", "abc", "", "0%", "nan%", "5 furlongs", float("inf"), True, None]
)
def test_a_budget_that_is_none(budget: Any) -> None:
    model, step = small_gpt()
    before = fingerprint(model, step.optimizer)
    with pytest.raises(rf.InputError):
        rf.fit(model, step, budget)
    assert fingerprint(model, step.optimizer) == before


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "blocks is empty"),
        (["layers.0"], "'layers.0' isn't a block; write blocks=find_blocks"),
        (rf.find_blocks(nn.Sequential(nn.LSTM(2, 2), nn.LSTM(2, 2))), "GPT has no block '0'"),
    ],
    ids=["empty", "paths", "another model's"],
)
@pytest.mark.parametrize("function", [rf.explain, lambda *a, **k: rf.fit(*a, "1GiB", **k)], ids=["explain", "fit"])
def test_what_are_no_blocks(function: Callable[..., Any], blocks: Any, message: str) -> None:
    model, step = small_gpt()
    before = fingerprint(model, step.optimizer)
    with pytest.raises(rf.InputError, match=message):
        function(model, step, blocks=blocks)
    assert fingerprint(model, step.optimizer) == before


@pytest.mark.parametrize("function", [rf.explain, lambda *a: rf.fit(*a, "1GiB")], ids=["explain", "fit"])
def test_what_is_no_model_or_step(function: Callable[..., Any]) -> None:
    model, step = small_gpt()
    with pytest.raises(rf.InputError, match=r"the model must be a torch\.nn\.Module, not None"):
        function(None, step)
    with pytest.raises(rf.StepError, match="must be callable, not None"):
        function(model, None)


@pytest.mark.parametrize("accumulate", [0, 1.5, True, "2", None])
def test_micro_batches_are_counted(accumulate: Any) -> None:
    with pytest.raises(rf.StepError, match=f"at least 1, not {accumulate!r}"):
        rf.Step(lambda: torch.ones(1), accumulate=accumulate)


def test_what_is_no_optimizer() -> None:
    model, step = small_gpt()
    assert rf.Step(step.loss_fn, optimizer=torch.optim.LBFGS(model.parameters())).optimizer is not None
    with pytest.raises(rf.StepError, match=r"must be a torch\.optim\.Optimizer, not 'adamw'"):
        rf.Step(step.loss_fn, optimizer="adamw")


def no_scalar() -> tuple[nn.Module, Any]:
    model, _ = models.gpt(layers=2)
    return model, lambda: model(torch.zeros(1, 8, dtype=torch.long))


def no_tensor() -> tuple[nn.Module, Any]:
    model, loss = models.gpt(layers=2)
    return model, lambda: loss().item


def another_model() -> tuple[nn.Module, Any]:
    return models.gpt(layers=2).model, models.gpt(layers=2).loss


def on_meta() -> tuple[nn.Module, Any]:
    model, loss = models.gpt(layers=2)
    return model.to("meta"), loss


def no_parameters() -> tuple[nn.Module, Any]:
    model, batch = nn.Sequential(nn.ReLU(), nn.ReLU()), torch.randn(4, requires_grad=True)
    return model, lambda: model(batch).sum()


def all_frozen() -> tuple[nn.Module, Any]:
    model, loss = models.gpt(layers=2)
    return model.requires_grad_(False), loss


@pytest.mark.filterwarnings("ignore:.*without values")
def test_a_model_that_looks_at_values_gets_a_plan() -> None:
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(32, 2), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            chosen, y = self.gate(x).argmax(-1), x
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero().squeeze(1)
                y = y.index_add(0, rows, torch.dropout(expert(x[rows]).relu(), 0.1, True))
            return y

    model, batch = nn.Sequential(*(Mixture() for _ in range(4))), torch.randn(1024, 32)

    def step() -> Tensor:
        return model(batch).square().mean()

    before = fingerprint(model)
    plan = rf.fit(model, step, "80%")
    rf.detach(model)
    assert fingerprint(model) == before
    plain = rf.measure(model, step).peak_bytes
    with rf.attached(model, plan):
        assert rf.measure(model, step).peak_bytes <= 0.8 * plain
    assert plan.predicted_plain_peak_bytes == pytest.approx(plain, rel=0.001)


def draws_from_elsewhere() -> tuple[nn.Module, Any]:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            scale = 1.5 if rf.is_replaying() else 1.0
            return super().forward(super().forward(input).relu() * scale)

    model, batch = nn.Sequential(*(Noisy(64, 64) for _ in range(4))), torch.randn(256, 64)
    return model, lambda: model(batch).square().mean()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (no_scalar, rf.StepError, r"scalar loss tensor, not a tensor of shape \(1, 8, 64\)"),
        (no_tensor, rf.StepError, "scalar loss tensor, not <built-in method item"),
        (another_model, rf.StepError, "never calls a block of GPT"),
        (on_meta, rf.ReforwardError, "meta device"),
        (no_parameters, rf.InputError, "Sequential has no parameters"),
        (all_frozen, rf.StepError, "doesn't require grad"),
        (draws_from_elsewhere, rf.ReplayMismatchError, "block '.': its replay computes other values"),
    ],
)
def test_a_step_that_cannot_be_fitted(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    model, step = make()
    before = None if any(p.is_meta for p in model.parameters()) else fingerprint(model)
    with pytest.raises(error, match=message):
        rf.fit(model, step, "60%")
    if before is not None:
        assert fingerprint(model) == before
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_a_plan_that_changes_results_is_not_put_on(monkeypatch: Any) -> None:
    model, step = small_gpt()
    differing = Proof(
        scope="region by region", losses=1, gradients=1, buffers=0, rng_states=1, differences=("gradient head.weight",)
    )
    monkeypatch.setattr(_fit, "verify_regions", lambda *args: differing)
    before = fingerprint(model, step.optimizer)
    with pytest.raises(rf.ReplayMismatchError, match=r"would change the results .* gradient head\.weight differ"):
        rf.fit(model, step, "1GiB")
    assert fingerprint(model, step.optimizer) == before


def test_a_plan_that_was_on_the_model_survives_a_failure() -> None:
    model, step = small_gpt()
    plan = rf.attach(model, rf.every(2))
    before = [name for name, module in model.named_modules() if "forward" in vars(module)]
    with pytest.raises(rf.BudgetError):
        rf.fit(model, step, 1000)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == before
    assert plan.nodes


# The command
# ---------------------------------------------------------------------------------------------------------

SCRIPT = """
    import sys

    import torch
    from torch import nn

    import reforward as rf

    def make():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        batch, optimizer = torch.randn(256, 32), torch.optim.SGD(model.parameters(), lr=0.1)
        return model, rf.Step(lambda: model(batch).square().mean(), optimizer=optimizer)

    def no_scalar():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return model, rf.Step(lambda: model(torch.ones(2, 4)))

    def failing(what, calls=0):
        model, step = make()
        counter = iter(range(10**6))

        def loss():
            if next(counter) >= calls:
                what()
            return step.loss_fn()

        return model, rf.Step(loss, optimizer=step.optimizer)

    def raises():
        return failing(lambda: {}["missing"])

    def exits():
        return failing(sys.exit)

    def has_another_shape():
        return failing(lambda: torch.ones(2, 3) @ torch.ones(2, 3))

    def fails_later():
        return failing(lambda: 1 / 0 if torch.is_grad_enabled() else None, calls=1)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no way back")

    def fails_backward():
        model, step = make()
        return model, rf.Step(lambda: Failing.apply(step.loss_fn()))
"""


@pytest.fixture
def script(tmp_path: Any, monkeypatch: Any) -> Any:
    (tmp_path / "fit_script.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_command_fits_proves_and_trains(script: Any, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    assert main(["fit", "--model", "fit_script:make", "--budget", "70%", "--steps", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["proof"]["identical"] is True
    assert len(document["training"]) == 2
    plan = rf.Plan.from_json(script / "reforward-out/plan.json")
    assert plan.nodes
    assert plan.predicted_peak_bytes <= plan.budget_bytes == document["budget_bytes"]
    assert main(["verify", "reforward-out/plan.json", "--model", "fit_script:make", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proof"]["differences"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "fit_script:make", "--budget", "1kB"], 3, "the smallest peak is"),
        (["--model", "fit_script:make", "--budget", "nan"], 2, "can't read 'nan' as bytes"),
        (["--model", "fit_script:no_scalar", "--steps", "0"], 2, "scalar loss tensor"),
    ],
)
def test_the_command_says_what_is_wrong(
    script: Any, capsys: Any, arguments: list[str], code: int, message: str
) -> None:
    assert main(["fit", *arguments]) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (script / "reforward-out/plan.json").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", r"the step of fit_script:raises failed: KeyError: 'missing' \(.*fit_script\.py, line \d+\)\n"),
        ("exits", r"the step of fit_script:exits failed: SystemExit \(.*fit_script\.py, line \d+\)\n"),
        ("has_another_shape", r"failed: RuntimeError: mat1 and mat2 shapes .* \(.*fit_script\.py, line \d+\)\n"),
    ],
)
@pytest.mark.parametrize("command", [["fit"], ["explain"], ["verify", "plan.json"]], ids=lambda command: command[0])
def test_a_step_that_fails_by_itself(script: Any, capsys: Any, command: list[str], function: str, message: str) -> None:
    (script / "plan.json").write_text('{"nodes": []}')
    assert main([*command, "--model", f"fit_script:{function}"]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert "Traceback" not in err
    assert not (script / "reforward-out/plan.json").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [("fails_later", "ZeroDivisionError: division by zero"), ("fails_backward", "ValueError: no way back")],
)
def test_a_step_whose_forward_does_not_fail_again(script: Any, capsys: Any, function: str, message: str) -> None:
    (script / "plan.json").write_text('{"nodes": []}')
    assert main(["verify", "plan.json", "--model", f"fit_script:{function}"]) == 2
    err = capsys.readouterr().err
    assert re.search(rf"the step of fit_script:{function} failed: {message} \(.*fit_script\.py, line \d+\)\n", err), err
    assert "Traceback" not in err
