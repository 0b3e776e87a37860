"""The profile: simulated peaks against dry runs of the same plans, and what blocks it calls equal."""

from __future__ import annotations

import pytest
import torch
from profiled import TECHNIQUES, case, dry_of, mixed

import models
import reforward as rf
from reforward._plan import Plan, Region
from reforward._profile import profile_step
from reforward._solve import simulate
from reforward._techniques import resolve_plan
from untouched import fingerprint

# What two neighbours share (the output that a ReLU keeps and the next block takes; T5's position bias) is put down to
# one of them, so the sum is off where they are run differently.
TOLERANCE = {
    "gpt": 0.001,
    "gpt_sdpa": 0.001,
    "unet": 0.001,
    "t5": 0.05,
    "resnet": 0.05,
    "lstm": 0.001,
    "encoder": 0.015,
}
PLANS = ["none", "full", "every 2", "segments", "nested", "mixed"]


NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "t5" else ()) for name in sorted(TOLERANCE)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_simulated_peaks_are_those_of_dry_runs(name: str, plan: str) -> None:
    model, _, profiled = case(name)
    resolved = mixed(case(name)) if plan == "mixed" else resolve_plan(model, TECHNIQUES[plan])
    simulated = simulate(profiled.profile, resolved)
    assert simulated.peak_bytes == pytest.approx(dry_of(name, plan).peak_bytes, rel=TOLERANCE[name])


@pytest.mark.parametrize("name", NAMES)
def test_every_option_adds_up(name: str) -> None:
    """The n-th options of all blocks are profiled together: the sum is exact, and nothing is left at the end."""
    model, _, profiled = case(name)
    policies = {call.path: [option.policy for option in call.options] for call in profiled.profile.calls}
    assert all(some[0] == rf.Save() for some in policies.values())
    assert any(some[1:2] == [rf.Recompute()] for some in policies.values())
    for number in range(max(map(len, policies.values()))):
        chosen = {path: some[min(number, len(some) - 1)] for path, some in policies.items()}
        resolved = resolve_plan(model, Plan(nodes=tuple(Region(path=p, policy=q) for p, q in chosen.items())))
        simulated, dry = simulate(profiled.profile, resolved), case(name).dry(resolved)
        assert simulated.peak_bytes == pytest.approx(dry.peak_bytes, rel=0.001)
        end = simulated.moments[-1].live_after_bytes
        assert end - simulated.static_bytes < 100, "only the loss outlives the step"
        assert simulated.replay_flops == sum(s.flops for s in dry.segments) - sum(
            s.flops for s in profiled.plain.segments
        )


@pytest.mark.slow
def test_encoder_and_decoder_are_chains_of_their_own() -> None:
    calls = case("t5").profiled.profile.calls
    assert [(call.path, call.chain) for call in calls] == [
        ("encoder.block.0", 0),
        ("encoder.block.1", 0),
        ("decoder.block.0", 1),
        ("decoder.block.1", 1),
    ]


def test_skips_cut_chains() -> None:
    """What a UNet does between two stages (pooling, concatenation) ends a chain."""
    chains: dict[int, list[str]] = {}
    for call in case("unet").profiled.profile.calls:
        chains.setdefault(call.chain, []).append(call.path)
    stages = ["down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1"]
    assert [paths[0].partition(".resnets")[0] for paths in chains.values()] == stages
    assert [len(paths) for paths in chains.values()] == [2, 2, 1, 2, 2]


def test_equal_blocks_have_equal_signatures() -> None:
    assert {call.signature for call in case("gpt").profiled.profile.calls} == {0}
    by_path = {call.path: call for call in case("resnet").profiled.profile.calls}
    assert by_path["layer1.1"].signature != by_path["layer2.1"].signature
    alike = by_path["layer1.0"].options, by_path["layer1.1"].options
    assert [o.policy for o in alike[0]] == [o.policy for o in alike[1]]
    assert alike[0][:2] == alike[1][:2], "what a block keeps can change when its neighbour's memory is freed"


def test_what_recomputing_costs() -> None:
    for call in case("gpt").profiled.profile.calls:
        plain, full, *selective = call.options
        assert full.forward_delta_bytes < plain.forward_delta_bytes / 4
        assert plain.replay_seconds == plain.replay_flops == 0
        assert full.replay_flops > max(option.replay_flops for option in selective)
        assert full.replay_seconds > 0
        assert all(full.forward_delta_bytes < o.forward_delta_bytes < plain.forward_delta_bytes for o in selective)


def test_static_memory_in_parts() -> None:
    model, loss = models.gpt(layers=2)
    step = rf.Step(loss, optimizer=torch.optim.AdamW(model.parameters()))
    parameters = sum(p.nbytes for p in model.parameters())
    profile = rf.profile(model, step)
    assert profile.parameter_bytes == profile.gradient_bytes == parameters
    assert profile.optimizer_bytes == pytest.approx(2 * parameters, rel=0.001)
    assert step.optimizer is not None
    assert not step.optimizer.state, "counted although the training hasn't begun"
    assert profile.blocks == tuple(block.path for block in rf.find_blocks(model))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_frozen_block_has_only_the_plain_option(accumulate: int) -> None:
    model, loss = models.gpt(layers=3, width=32)
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    for module in (model.embedding, model.position, model.layers[0]):
        module.requires_grad_(False)
    profile = rf.profile(model, rf.Step(loss, accumulate=accumulate))
    assert [len(call.options) > 1 for call in profile.calls] == [False, True, True] * accumulate
    assert [event.call % 3 for event in profile.events if event.kind == "backward"] == [2, 1] * accumulate


def test_the_heaviest_batch_is_profiled() -> None:
    model, _ = models.gpt(layers=2)
    batches = [torch.randint(0, models.VOCABULARY, (2, time)) for time in (16, 48, 32)]
    profiled = profile_step(model, rf.Step(lambda ids: model(ids).logsumexp(-1).mean(), batches))
    assert profiled.variant == 1
    longest = rf.profile(model, rf.Step(lambda: model(batches[1]).logsumexp(-1).mean()))
    assert [call.output_bytes for call in profiled.profile.calls] == [call.output_bytes for call in longest.calls]


@pytest.mark.parametrize("begun", [False, True], ids=["before training", "amid training"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
def test_everything_is_left_as_it_was(name: str, begun: bool) -> None:
    model, loss = {"gpt": lambda: models.gpt(layers=2), "resnet": lambda: models.resnet(depth=1), "lstm": models.lstm}[
        name
    ]()
    optimizer = torch.optim.AdamW(model.parameters())
    step = rf.Step(loss, optimizer=optimizer)
    if begun:
        step.run()
        step.run(optimize=False)
    before = fingerprint(model, optimizer)
    reported: list[float] = []
    profile_step(model, step, progress=lambda text, share: reported.append(share))
    assert fingerprint(model, optimizer) == before
    assert reported == sorted(reported)
