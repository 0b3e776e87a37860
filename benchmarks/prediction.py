"""How well peaks and times are predicted: techniques and budgets on the embedded default model, peaks on three others.

    python benchmarks/prediction.py
    python benchmarks/prediction.py --model resnet

A peak is predicted by a dry run of the same runtime before the step has run; times come from single blocks. Both are of
the whole step: forward, backward and, on the default model, AdamW. Budgets are shares of the plain step's activation
peak (what the step allocates on top of parameters and optimizer state). Times are CPU seconds on one thread relative to
the plain step: the medians of interleaved steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import reforward as rf
from _common import Workbench, allocated_peak, arguments, interleaved, models, show, write_json
from reforward._default import default_step
from reforward._report.fold import describe_policy
from reforward._solve import simulate
from reforward._techniques import resolve_plan
from reforward._units import format_bytes

SHARES = (0.80, 0.60, 0.50, 0.40, 0.30, 0.25)
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One technique or budget; time ratios are None where they weren't predicted or measured."""

    model: str
    contender: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_time_ratio: float | None
    measured_time_ratio: float | None

    @property
    def peak_error(self) -> float:
        """Of the prediction, relative to the measurement."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1

    @property
    def time_error(self) -> float | None:
        """Of the prediction, relative to the measurement."""
        if self.predicted_time_ratio is None or self.measured_time_ratio is None:
            return None
        return self.predicted_time_ratio / self.measured_time_ratio - 1


def default() -> tuple[nn.Module, rf.Step]:
    """The embedded model; its step ends with AdamW."""
    run = default_step(device="cpu")
    return run.model, run.step


def own(case: Callable[[], models.Case]) -> Callable[[], tuple[nn.Module, rf.Step]]:
    """One of the tests' models; its step has no optimizer."""

    def make() -> tuple[nn.Module, rf.Step]:
        torch.manual_seed(0)
        model, loss = case()
        return model.train(), rf.Step(loss)

    return make


MODELS: dict[str, Callable[[], tuple[nn.Module, rf.Step]]] = {
    "default": default,
    "resnet": own(lambda: models.resnet(width=16, batch=8, size=64)),
    "lstm": own(lambda: models.lstm(width=128, batch=8, time=64)),
    "unet": own(lambda: models.unet(width=16, batch=4, size=32)),
}


def techniques(workbench: Workbench) -> dict[str, Any]:
    """Plain, and every technique; selections only of what the model has."""
    made = {
        PLAIN: rf.none(),
        "full()": rf.full(),
        "every(2)": rf.every(2),
        'segments("sqrt")': rf.segments("sqrt"),
        "segments(2)": rf.segments(2),
        "segments(4, nested=2)": rf.segments(4, nested=2),
    }
    policies = {option.policy for call in workbench.profiled.profile.calls for option in call.options}
    for policy in sorted(policies, key=repr):
        if isinstance(policy, rf.Recompute) and policy.save:
            made[describe_policy(policy)] = rf.selective(save=policy.save)
    if any(path.endswith(".mlp") for path, _ in workbench.model.named_modules()):
        made['selective(recompute="*.mlp")'] = rf.selective(recompute="*.mlp")
    return made


def contenders(workbench: Workbench) -> dict[str, tuple[rf.Plan, float | None]]:
    """Plans by name, with their predicted time ratio: of the techniques, then for each budget that can be met."""
    profile, plain = workbench.profiled.profile, workbench.planner.plain
    found: dict[str, tuple[rf.Plan, float | None]] = {}
    for name, technique in techniques(workbench).items():
        plan = resolve_plan(workbench.model, technique)
        try:
            ratio = simulate(profile, plan).seconds / plain.seconds
        except rf.PlanError:  # a policy that the profile has no costs for
            ratio = None
        found[name] = plan, ratio
    for share in SHARES:
        try:
            held = workbench.held(profile.static_bytes + int(share * (plain.peak_bytes - profile.static_bytes)))
        except rf.BudgetError as error:
            print(f"budget {share:.0%} can't be met: the smallest peak is {format_bytes(error.smallest_bytes or 0)}")
            continue
        found[f"budget {share:.0%}"] = held.plan, held.predicted_ratio
    return found


def rows_of(name: str, rounds: int) -> list[Row]:
    """Everything about one model; without rounds, no times are measured."""
    model, step = MODELS[name]()
    workbench = Workbench(model, step)
    plans = contenders(workbench)
    predicted = {contender: workbench.dry_peak(plan) for contender, (plan, _) in plans.items()}
    step.run()  # makes the optimizer's state, which the dry run counts already
    measured = {contender: measured_peak(workbench, plan) for contender, (plan, _) in plans.items()}
    times = measured_ratios(workbench, {contender: plan for contender, (plan, _) in plans.items()}, rounds)
    return [
        Row(
            model=name,
            contender=contender,
            predicted_peak_bytes=predicted[contender],
            measured_peak_bytes=measured[contender],
            predicted_time_ratio=ratio,
            measured_time_ratio=times.get(contender),
        )
        for contender, (_, ratio) in plans.items()
    ]


def measured_peak(workbench: Workbench, plan: rf.Plan) -> int:
    """The allocator's peak of the whole step; the model trains one step more."""
    workbench.model.zero_grad(set_to_none=True)
    with rf.attached(workbench.model, plan):
        return workbench.static_bytes + allocated_peak(workbench.step.run)


def measured_ratios(workbench: Workbench, plans: dict[str, rf.Plan], rounds: int) -> dict[str, float]:
    """Medians of interleaved steps, relative to the plain step's. Putting a plan on is timed as well: microseconds."""
    if rounds == 0:
        return {}

    def under(plan: rf.Plan) -> Callable[[], None]:
        def run() -> None:
            workbench.model.zero_grad(set_to_none=True)
            with rf.attached(workbench.model, plan):
                workbench.step.run()

        return run

    seconds = interleaved({name: under(plan) for name, plan in plans.items()}, rounds)
    return {name: taken.median / seconds[PLAIN].median for name, taken in seconds.items()}


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--model", choices=MODELS, nargs="*", default=list(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in options.model:
        rows += rows_of(name, options.rounds if name == "default" else 0)
        shown = [row for row in rows if row.model == name]
        show(
            f"{name}, {options.rounds} rounds" if name == "default" else name,
            ["", "peak, predicted", "measured", "error", "time, predicted", "measured", "error"],
            [
                [
                    row.contender,
                    format_bytes(row.predicted_peak_bytes),
                    format_bytes(row.measured_peak_bytes),
                    f"{row.peak_error:+.2%}",
                    number(row.predicted_time_ratio, ".3f"),
                    number(row.measured_time_ratio, ".3f"),
                    number(row.time_error, "+.1%"),
                ]
                for row in shown
            ],
        )
    write_json(options.json, rows)


def number(value: float | None, spec: str) -> str:
    """Formatted, or a dash where there is none."""
    return "–" if value is None else format(value, spec)


if __name__ == "__main__":
    main()
