"""The dry run: the peak that it predicts against the one that the allocator counts, and what it leaves behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from profiled import TECHNIQUES, case, dry_of
from torch import Tensor, nn

import models
import reforward as rf
from reforward._profile import dry as dry_module
from reforward._profile import dry_run, dry_runs
from reforward._profile.dry import Knowledge
from untouched import fingerprint

TOLERANCE = {"gpt": 0.002, "gpt_sdpa": 0.002, "resnet": 0.01, "unet": 0.01, "lstm": 0.03}


def dry(model: nn.Module, step: rf.Step, plan: Any = None, variant: int = 0):
    with rf.attached(model, rf.none() if plan is None else plan):
        return dry_run(model, step, rf.find_blocks(model), variant=variant)


# What it predicts
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("technique", sorted(TECHNIQUES))
@pytest.mark.parametrize("name", sorted(TOLERANCE))
def test_the_peak_of_every_technique(name: str, technique: str) -> None:
    predicted, measured = dry_of(name, technique), case(name).measured(TECHNIQUES[technique])
    assert predicted.static_bytes == measured.static_bytes
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=TOLERANCE[name])
    assert sum(predicted.breakdown.values()) == predicted.peak_bytes


def test_workspaces_are_what_a_dry_run_alone_cannot_see() -> None:
    measured = case("resnet").measured(rf.none()).peak_bytes
    alone = dry(case("resnet").model, case("resnet").step).peak_bytes
    assert alone < 0.98 * measured
    assert dry_of("resnet", "none").peak_bytes == pytest.approx(measured, rel=0.001)


def test_a_replay_holds_no_memory_that_a_dry_run_does_not_see() -> None:
    """Its peak is the step's here, and what it keeps to put random streams back is as large as that of a state."""
    predicted, measured = dry_of("t5", "full"), case("t5").measured(rf.full())
    assert measured.peak_bytes - predicted.peak_bytes < torch.get_rng_state().nbytes // 10


def small_gpt(**sizes: Any) -> models.Case:
    return models.gpt(**{"layers": 3, "width": 32, "batch": 2, "time": 48, **sizes})


def plain_gpt() -> tuple[nn.Module, rf.Step]:
    model, loss = small_gpt()
    return model, rf.Step(loss)


def adamw() -> tuple[nn.Module, rf.Step]:
    model, loss = small_gpt()
    return model, rf.Step(loss, optimizer=torch.optim.AdamW(model.parameters()))


def begun_adamw() -> tuple[nn.Module, rf.Step]:
    model, step = adamw()
    step.run()
    return model, step


def begun_sgd() -> tuple[nn.Module, rf.Step]:
    model, loss = small_gpt()
    step = rf.Step(loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step.run()
    return model, step


def accumulating() -> tuple[nn.Module, rf.Step]:
    model, loss = small_gpt()
    return model, rf.Step(loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)


def with_gradients() -> tuple[nn.Module, rf.Step]:
    """The gradients are there already: nothing grows in backward."""
    model, step = plain_gpt()
    step.run()
    return model, step


def frozen() -> tuple[nn.Module, rf.Step]:
    """Backward never reaches the embedding and the first two blocks."""
    model, loss = small_gpt()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    for module in (model.embedding, model.position, *model.layers[:2]):
        module.requires_grad_(False)
    return model, rf.Step(loss)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank() -> tuple[nn.Module, rf.Step]:
    """Everything is frozen but an adapter in each block."""
    model, loss = small_gpt()
    model.requires_grad_(False)
    for layer in model.layers:
        layer.attention.qkv = LowRank(layer.attention.qkv)
    return model, rf.Step(loss)


def of_two_lengths() -> tuple[nn.Module, rf.Step]:
    model, _ = small_gpt()
    batches = [torch.randint(0, models.VOCABULARY, (2, time)) for time in (24, 48)]
    return model, rf.Step(lambda ids: model(ids).logsumexp(-1).mean(), batches)


class Shared(nn.Module):
    """One block that is called over and over, as in ALBERT; a buffer counts its calls."""

    def __init__(self):
        super().__init__()
        self.inlet, self.block = nn.Linear(8, 32), models.Layer(32, 4, 0.1, False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for _ in range(4):
            self.calls += 1
            x = self.block(x)
        return x.square().mean()


def shared() -> tuple[nn.Module, rf.Step]:
    model, batch = Shared(), torch.randn(2, 48, 8)
    return model, rf.Step(model, [batch])


SETTINGS: list[Callable[[], tuple[nn.Module, rf.Step]]] = [
    plain_gpt, adamw, begun_adamw, begun_sgd, accumulating, with_gradients, frozen, low_rank, of_two_lengths, shared,
]  # fmt: skip


@pytest.mark.parametrize("plan", [rf.none(), rf.full()], ids=["plain", "full"])
@pytest.mark.parametrize("make", SETTINGS)
def test_the_peak_in_every_setting(make: Callable[[], tuple[nn.Module, rf.Step]], plan: Any) -> None:
    model, step = make()
    model.train()
    for variant in range(step.variants):
        predicted = dry(model, step, plan, variant)
        with rf.attached(model, plan):
            measured = rf.measure(model, step, variant=variant, repeats=1)
        assert predicted.static_bytes == measured.static_bytes
        assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.002)


class Apply(nn.Module):
    """A linear layer and a function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear, self.function = nn.Linear(32, 32), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "three branches": lambda y: y.cos() + y.exp() + y * 2,
    "a shared gradient": lambda y: y + y.exp() + y.cos(),
    "steps": lambda y: torch.stack([y[:, i].exp() for i in range(32)], 1),
    "turned": lambda y: (y.t() @ y).sum() + y.exp() + y.sin(),
}


@pytest.mark.parametrize("plan", [rf.none(), rf.full()], ids=["plain", "full"])
@pytest.mark.parametrize("branches", BRANCHES)
def test_gradients_of_branches_are_summed_in_place(branches: str, plan: Any) -> None:
    """A scan over time (Mamba's) adds to one gradient at every step."""
    model, batch = nn.Sequential(*(Apply(BRANCHES[branches]) for _ in range(2))), torch.randn(512, 32)
    step = rf.Step(lambda: model(batch).sum())
    with rf.attached(model, plan):
        predicted = dry_run(model, step, rf.find_blocks(model, Apply)).peak_bytes
        assert predicted == pytest.approx(rf.measure(model, step, repeats=1).peak_bytes, rel=0.0001)


class Experts(nn.Module):
    """Three matrices, each for its third of the rows."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, out))

    def forward(self, x: Tensor) -> Tensor:
        offsets = (torch.arange(1, 4) * (len(x) // 3)).int()
        return F.grouped_mm(x, self.weight, offs=offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_count_every_row_once(dtype: torch.dtype) -> None:
    model, batch = nn.Sequential(Experts(32, 64), Experts(64, 32)).to(dtype), torch.randn(48, 32, dtype=dtype)
    run = dry(model, rf.Step(lambda: model(batch).sin().mean()))
    products = [(s.kind, s.call, s.flops // (2 * 48 * 32 * 64)) for s in run.segments if s.kind != "gap"]
    assert products == [("forward", 0, 1), ("forward", 1, 1), ("backward", 1, 2), ("backward", 0, 1)]


@pytest.mark.slow
def test_a_mixture_of_experts_can_be_fitted() -> None:
    model, loss = models.build("qwen2_moe")
    plan = rf.fit(model, loss, "70%")
    measured = rf.measure(model, loss, repeats=1)
    assert plan.predicted_peak_bytes == pytest.approx(measured.peak_bytes, rel=0.001)
    assert measured.peak_bytes < 0.7 * (plan.predicted_plain_peak_bytes or 0)


def test_calls_and_who_follows_whom() -> None:
    calls = dry(*shared()).calls
    assert [(call.block.path, call.follows) for call in calls] == [("block", False)] + [("block", True)] * 3
    model, loss = models.build("t5")
    chains = [call.follows for call in dry(model, rf.Step(loss)).calls]
    assert chains == [False, True, False, True], "the decoder's first block isn't given the encoder's output alone"


def test_a_hook_on_a_block_ends_a_chain() -> None:
    """What it returns isn't what the block's forward did, so no run can go through it."""
    model, batch = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(4, 16)
    model[1].register_forward_hook(lambda module, args, output: output * 1.0)
    model[2].register_forward_pre_hook(lambda module, args: None)
    step = rf.Step(lambda: model(batch).square().mean())
    assert [call.follows for call in dry(model, step).calls] == [False, True, False, True]


def test_blocks_without_backward_have_none() -> None:
    run = dry(*frozen())
    assert [s.call for s in run.segments if s.kind == "backward"] == [2]
    assert [s.call for s in run.segments if s.kind == "forward"] == [0, 1, 2]


def test_segments_join_into_the_step() -> None:
    run = dry(*adamw())
    live = run.static_bytes
    peaks = []
    for segment in run.segments:
        peaks.append(live + segment.peak_bytes)
        live += segment.delta_bytes
    assert max(peaks) == run.peak_bytes
    assert live - run.static_bytes < 100, "only the loss outlives a step that ends with an optimizer"


# What it leaves behind
# ---------------------------------------------------------------------------------------------------------


class Busy(nn.Module):
    """A block whose forward changes everything that a module has."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.calls, self.seen, self.last = 0, [], None
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.total += x.detach().sum(0)
        self.last = self.norm(self.linear(x))
        return F.dropout(x + self.last, 0.1)


def busy() -> tuple[nn.Module, rf.Step]:
    model, batch = nn.Sequential(*(Busy() for _ in range(3))), torch.randn(4, 16)
    model[1].norm.register_forward_hook(lambda module, args, output: output * 1.0)
    return model, rf.Step(lambda: model(batch).square().mean(), optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("plan", [rf.none(), rf.full(), rf.segments(1)], ids=["plain", "full", "segment"])
@pytest.mark.parametrize("make", [*SETTINGS, busy])
def test_everything_is_left_as_it_was(make: Callable[[], tuple[nn.Module, rf.Step]], plan: Any) -> None:
    model, step = make()
    with rf.attached(model, plan):
        before = fingerprint(model, step.optimizer)
        dry_run(model, step, rf.find_blocks(model))
        assert fingerprint(model, step.optimizer) == before
    step.run()
    assert fingerprint(model, step.optimizer) != before


# What it refuses
# ---------------------------------------------------------------------------------------------------------


class Looks(nn.Module):
    """A block whose forward looks at what its input holds."""

    def __init__(self, look: Callable[[Tensor], Any]):
        super().__init__()
        self.linear, self.look = nn.Linear(64, 64), look

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.look(y)
        return y


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y.sum().item(),
    "branch": lambda y: 1 if y.mean() > 0 else 2,
    "shape": lambda y: y[y > 0].sum(),
    "numpy": lambda y: y.detach().numpy().sum(),
}


def looking(look: Callable[[Tensor], Any]) -> tuple[nn.Module, rf.Step]:
    model, batch = nn.Sequential(*(Looks(look) for _ in range(2))), torch.randn(256, 64)
    return model, rf.Step(lambda: model(batch).square().mean(), optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("plan", [rf.none(), rf.full()], ids=["plain", "full"])
@pytest.mark.parametrize("look", LOOKS)
def test_a_model_that_looks_at_values_runs_on_its_own_tensors(look: str, plan: Any) -> None:
    model, step = looking(LOOKS[look])
    with rf.attached(model, plan):
        before = fingerprint(model, step.optimizer)
        with pytest.warns(UserWarning, match=r"be run on tensors without values \(.+\), so its memory"):
            result = dry_run(model, step, rf.find_blocks(model))
        assert fingerprint(model, step.optimizer) == before
        assert result.needs_values
        assert result.peak_bytes == pytest.approx(
            rf.measure(model, step).peak_bytes, abs=2048
        )  # scalars, random states


def test_batches_after_one_that_needs_values_are_not_tried_on_fakes(recwarn: pytest.WarningsRecorder) -> None:
    model, _ = looking(LOOKS["item"])
    warnings.simplefilter("always")
    several = rf.Step(lambda batch: model(batch).square().mean(), [torch.randn(256, 64), torch.randn(64, 64)])
    runs = dry_runs(model, several, rf.find_blocks(model))
    assert [run.needs_values for run in runs] == [True, True]
    assert len(recwarn) == 1


def test_nothing_is_run_on_fakes_once_values_are_known_to_be_needed() -> None:
    model, step = looking(LOOKS["item"])
    first = dry_run(model, step, rf.find_blocks(model), knowledge=Knowledge(needs_values=True))
    assert first.needs_values


def test_a_step_on_its_own_tensors_stops_before_it_needs_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = looking(LOOKS["item"])
    before = fingerprint(model, step.optimizer)
    monkeypatch.setattr(dry_module, "usable_bytes", lambda device: 1000)
    with pytest.raises(rf.DryRunError, match=r"Sequential .* real steps, and one needs more than the 1000 B"):
        dry_run(model, step, rf.find_blocks(model))
    assert fingerprint(model, step.optimizer) == before


def test_a_step_that_fails_by_itself_is_refused() -> None:
    model, step = looking(lambda y: y.view(-1, 7))
    before = fingerprint(model, step.optimizer)
    with pytest.raises(rf.DryRunError, match=r"the step of Sequential failed: RuntimeError: shape"):
        dry_run(model, step, rf.find_blocks(model))
    assert fingerprint(model, step.optimizer) == before


class LooksBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient if gradient.sum().item() > 0 else gradient * 2


@pytest.mark.filterwarnings("ignore:.*without values")
def test_a_backward_that_looks_at_values_runs_on_its_own_tensors() -> None:
    model, batch = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2))), torch.randn(4, 16)
    step = rf.Step(lambda: LooksBack.apply(model(batch)).square().mean())  # pyright: ignore[reportOptionalMemberAccess]
    before = fingerprint(model)
    assert dry(model, step).peak_bytes == pytest.approx(rf.measure(model, step).peak_bytes, abs=64)
    assert fingerprint(model) == before


def test_a_step_of_another_model_is_refused() -> None:
    model, _ = small_gpt()
    with pytest.raises(rf.StepError, match="never calls a block of GPT"):
        dry(model, plain_gpt()[1])


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    model, batch = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2))), torch.randn(4, 16)
    with pytest.raises(rf.StepError, match=r"scalar loss tensor, not a tensor of shape \(4, 16\)"):
        dry(model, rf.Step(lambda: model(batch)))
