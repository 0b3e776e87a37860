"""profile: puts dry runs and real costs together into a Profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from reforward._blocks import Block, modules_by_path
from reforward._errors import DryRunError, InputError
from reforward._plan import Plan, Region
from reforward._policy import Policy, Recompute, Save
from reforward._profile.dry import BlockCall, DryRun, Knowledge, Segment, check_same_calls, dry_run, dry_runs
from reforward._profile.real import BlockSeconds, RealCosts, kind_of, learn_variant, real_costs, signature
from reforward._profile_type import CallCost, Event, OptionCost, Profile
from reforward._runtime import attached
from reforward._step import Step
from reforward._techniques import blocks_of, check_blocks, none

Progress = Callable[[str, float], None]

# A linear operation's backward does two products for the one of its forward; what isn't in a block is taken to be of
# that kind.
_BACKWARD_PER_FORWARD = 2.0


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A profile with what it was made from.

    Attributes:
        profile: what the solver sees.
        blocks: the blocks found.
        plain: the dry run without a plan, of the heaviest batch.
        calls: the block calls of each batch.
        costs: what real kernels told.
        variant: the heaviest batch.
    """

    profile: Profile
    blocks: tuple[Block, ...]
    plain: DryRun
    calls: tuple[tuple[BlockCall, ...], ...]
    costs: RealCosts
    variant: int


def profile_step(
    model: nn.Module,
    step: Step,
    *,
    blocks: Sequence[Block] | None = None,
    progress: Progress = lambda text, share: None,
) -> Profiled:
    """The step in numbers, and what they were made from; `profile` says what may be wrong with it."""
    given = blocks_of(model) if blocks is None else check_blocks(blocks, model)
    # What overwrites its input can't be computed again from it, so it isn't a block here.
    found = tuple(block for block in given if not block.overwrites_input)
    if not found:
        raise InputError(f"every block overwrites its input ({given[0].path!r}, ...), so none can be computed again")
    with attached(model, none()):
        progress("dry run of the plain step", 0.0)
        first = dry_runs(model, step, found)
        variant = max(range(step.variants), key=lambda index: first[index].peak_bytes)
        progress("timing the blocks", 0.2)
        needs_values = any(run.needs_values for run in first)
        costs = real_costs(model, step, first[variant].calls, variant, Knowledge(needs_values=needs_values))
        for other in range(step.variants):
            if other != variant:
                known = learn_variant(model, step, first[other].calls, other, costs.knowledge)
                costs = replace(costs, knowledge=known)
    policies = _policies_by_path(model, found, costs)
    runs: list[DryRun] = []
    rounds = max(map(len, policies.values()))
    for number in range(rounds):
        progress("dry runs of the options", 0.5 + 0.5 * number / rounds)
        chosen = {path: some[min(number, len(some) - 1)] for path, some in policies.items()}
        with attached(model, Plan(nodes=tuple(Region(path=path, policy=policy) for path, policy in chosen.items()))):
            runs.append(dry_run(model, step, found, variant=variant, knowledge=costs.knowledge))
            check_same_calls(model, first[variant].calls, runs[-1].calls)
    made = _assemble(model, found, runs, policies, costs)
    return Profiled(
        profile=made,
        blocks=found,
        plain=runs[0],
        calls=tuple(run.calls for run in first),
        costs=costs,
        variant=variant,
    )


def _policies_by_path(model: nn.Module, blocks: Sequence[Block], costs: RealCosts) -> dict[str, tuple[Policy, ...]]:
    """The policies of each block; the n-th of all are tried in one dry run."""
    by_path = modules_by_path(model)
    return {b.path: costs.policies.get(kind_of(by_path[b.path]), (Save(), Recompute())) for b in blocks}


def _assemble(
    model: nn.Module,
    blocks: Sequence[Block],
    runs: Sequence[DryRun],
    policies: dict[str, tuple[Policy, ...]],
    costs: RealCosts,
) -> Profile:
    lone = lone_forwards(runs[0])
    runs = [joined(run, lone) for run in runs]
    plain = runs[0]
    by_path = modules_by_path(model)
    numbers: dict[object, int] = {}
    calls: list[CallCost] = []
    chain = -1
    tables = [_by_call(run) for run in runs]
    late = [_late_bytes(run, plain) for run in runs]
    for index, call in enumerate(plain.calls):
        chain += not call.follows
        key = signature(by_path[call.block.path], call)
        tried = [
            _Tried(policy=policy, table=table, late_bytes=after[index], seconds=costs.blocks[key][policy])
            for policy, table, after in zip(policies[call.block.path], tables, late, strict=False)
        ]
        options = _options(index, tried)
        number = numbers.setdefault((key, call.output_bytes, options), len(numbers))
        calls.append(
            CallCost(
                path=call.block.path,
                module_type=call.block.module_type,
                chain=chain,
                output_bytes=call.output_bytes,
                options=options,
                signature=number,
            )
        )
    return Profile(
        static_bytes=plain.static_bytes,
        parameter_bytes=plain.parameter_bytes,
        gradient_bytes=plain.gradient_bytes,
        optimizer_bytes=plain.optimizer_bytes,
        calls=tuple(calls),
        events=events_of(plain, costs),
        blocks=tuple(block.path for block in blocks),
    )


def lone_forwards(plain: DryRun) -> set[int]:
    """Calls after whose forward nothing runs until that of the next one of their chain; at most, something is freed."""
    following = [segment for segment in plain.segments if segment.kind != "gap" or segment.flops or segment.peak_bytes]
    return {
        one.call
        for one, other in pairwise(following)
        if one.kind == other.kind == "forward" and other.call == one.call + 1 and plain.calls[other.call].follows
    }


def joined(run: DryRun, calls: set[int]) -> DryRun:
    """The run with the gap after these calls' forward as a part of it: a replay frees what is freed there, too."""
    segments: list[Segment] = []
    for segment in run.segments:
        before = segments[-1] if segments else segment
        if segment.kind == "gap" and before.kind == "forward" and before.call in calls:
            peak = max(before.peak_bytes, before.delta_bytes + segment.peak_bytes)
            segments[-1] = replace(before, delta_bytes=before.delta_bytes + segment.delta_bytes, peak_bytes=peak)
        else:
            segments.append(segment)
    return replace(run, segments=tuple(segments))


def _by_call(run: DryRun) -> dict[tuple[str, int], Segment]:
    table: dict[tuple[str, int], Segment] = {}
    for segment in run.segments:
        key = segment.kind, segment.call
        if segment.kind != "gap" and key in table:
            raise DryRunError(
                f"block {run.calls[segment.call].block.path!r} has two {segment.kind} passes in one call;"
                " profile a step whose backward goes through each block once"
            )
        table[key] = segment
    return table


def _late_bytes(run: DryRun, plain: DryRun) -> Counter[int]:
    """What the gap after a call's forward leaves more under a policy than it does plainly, by call.

    The policy is why: a region holds an argument that otherwise is freed there (positive), or it doesn't hold the
    block's output, so that it can be freed (negative).
    """
    late = _gap_after_forward(run)
    late.subtract(_gap_after_forward(plain))
    return late


def _gap_after_forward(run: DryRun) -> Counter[int]:
    """Change of live bytes from the end of a call's forward to the begin of what comes next, in the same phase."""
    found: Counter[int] = Counter()
    for before, gap in pairwise(run.segments):
        if before.kind == "forward" and gap.kind == "gap" and gap.phase == "forward":
            found[before.call] += gap.delta_bytes
    return found


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """A policy of one call's block, and what it was seen to need.

    Attributes:
        table: the dry run with the policy, by kind of segment and call.
        late_bytes: `_late_bytes` of the call.
        seconds: of real runs.
    """

    policy: Policy
    table: dict[tuple[str, int], Segment]
    late_bytes: int
    seconds: BlockSeconds


def _options(index: int, tried: Sequence[_Tried]) -> tuple[OptionCost, ...]:
    """The options of one call; only the plain one if its backward never runs.

    The gaps of the profile are those of the plain step, so what a policy changes in the gap after a call is put down to
    the call: what it holds longer, to its forward; what is freed earlier, to its backward, which errs to the safe side
    in between.
    """
    plain_backward = tried[0].table.get(("backward", index))
    options: list[OptionCost] = []
    for one in tried:
        ahead, back, seconds = one.table[("forward", index)], one.table.get(("backward", index)), one.seconds
        if back is None and options:
            break
        longer, earlier = max(one.late_bytes, 0), min(one.late_bytes, 0)
        option = OptionCost(
            policy=one.policy,
            forward_delta_bytes=ahead.delta_bytes + longer,
            forward_peak_bytes=ahead.peak_bytes,
            backward_delta_bytes=back.delta_bytes + earlier if back else 0,
            backward_peak_bytes=max(back.peak_bytes + earlier, 0) if back else 0,
            forward_seconds=seconds.forward,
            backward_seconds=seconds.backward if back else 0.0,
            replay_seconds=seconds.replay if back else 0.0,
            replay_flops=back.flops - plain_backward.flops if back and plain_backward else 0,
        )
        options.append(option)
    return tuple(options)


def events_of(plain: DryRun, costs: RealCosts, *, extra_seconds: float = 0.0) -> tuple[Event, ...]:
    """The trace; the seconds outside of blocks are shared out over the gaps of a phase by the work in them.

    Args:
        plain: the step with its blocks plain, gaps joined as in the profile.
        extra_seconds: what the forward takes longer outside of blocks than it did when it was timed.
    """
    outside = costs.outside_seconds
    seconds = {
        "forward": outside + extra_seconds,
        "backward": outside * _BACKWARD_PER_FORWARD,
        "optimizer": costs.optimizer_seconds,
    }
    gaps = [segment for segment in plain.segments if segment.kind == "gap"]
    weights = {phase: sum(_weight(gap) for gap in gaps if gap.phase == phase) for phase in seconds}
    return tuple(
        Event(kind=segment.kind, call=segment.call)
        if segment.kind != "gap"
        else Event(
            kind="gap",
            name=segment.phase,
            delta_bytes=segment.delta_bytes,
            peak_bytes=segment.peak_bytes,
            seconds=seconds[segment.phase] * _weight(segment) / weights[segment.phase],
        )
        for segment in plain.segments
    )


def _weight(gap: Segment) -> float:
    return 1.0 + gap.flops + gap.peak_bytes
