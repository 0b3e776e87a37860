"""Profile + plan → timeline of bytes and seconds: the one oracle for solvers, tests and plots.

A region costs what its option says. A run has no cost of its own: its members run forward as if each recomputed
everything, without the boundaries between them; its first backward event runs them again from the first input, each
under its own policy, and stops before the last output is kept. A run inside a run does the same one level down.

What a run keeps of a member beside its output (the state of the random generators) is held until that member's
backward ends, once for every run around it, so that the bytes of a run add up to the bytes of its calls without a
plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reforward._errors import InputError, PlanError
from reforward._plan import Head, Node, Plan, Region, Run, leaves
from reforward._profile_type import CallCost, Event, HeadCost, OptionCost, Profile

#: What a node does, without names: the index of an option for one call, a tuple of shapes for a run.
Shape = int | tuple["Shape", ...]

FULL = 1  # index of Recompute() among a call's options


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one event adds. `peak_bytes`: the highest live bytes during it, relative to its begin, at least 0."""

    delta_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    replay_flops: int = 0

    def then(self, after: Effect) -> Effect:
        """Both, one after the other."""
        return Effect(
            delta_bytes=self.delta_bytes + after.delta_bytes,
            peak_bytes=max(self.peak_bytes, self.delta_bytes + after.peak_bytes),
            seconds=self.seconds + after.seconds,
            replay_flops=self.replay_flops + after.replay_flops,
        )


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One event of a simulated step; bytes are absolute."""

    event: Event
    live_before_bytes: int
    peak_bytes: int
    live_after_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step.

    Attributes:
        static_bytes: live before the step.
        moments: one per event of the profile, in order.
        peak_bytes: highest live bytes of the step.
        peak_event: index of the moment at which it is reached first; -1 if no event goes above the static bytes.
        seconds: duration of the step.
        replay_flops: floating-point operations of everything that runs a second time.
    """

    static_bytes: int
    moments: tuple[Moment, ...]
    peak_bytes: int
    peak_event: int
    seconds: float
    replay_flops: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A shape put on consecutive calls of one chain."""

    calls: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True)
class Trace:
    """Where each call of a profile runs: index of its forward event and of its backward event, where it has one.

    Raises:
        InputError: a call has two of either.
    """

    profile: Profile
    forward: dict[int, int] = field(init=False)
    backward: dict[int, int] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "forward", self._first("forward"))
        object.__setattr__(self, "backward", self._first("backward"))

    def _first(self, kind: str) -> dict[int, int]:
        found: dict[int, int] = {}
        for index, event in enumerate(self.profile.events):
            if event.kind == kind:
                if event.call in found:
                    path = self.profile.calls[event.call].path
                    raise InputError(
                        f"one call of block {path!r} has two {kind} events; profile a step that runs each once"
                    )
                found[event.call] = index
        return found


def simulate(profile: Profile, plan: Plan) -> Timeline:
    """Runs the plan on the profile's numbers. Blocks that the plan doesn't name save everything.

    Raises:
        PlanError: a node names an unknown block, a policy without a cost, or a run of calls that aren't consecutive;
            the head wasn't profiled in so many chunks.
    """
    trace = Trace(profile if plan.head is None else profile.under(_head_cost(profile, plan.head)))
    placements = [placement for node in plan.nodes for placement in place(trace, node)]
    return run_placements(trace, placements)


def _head_cost(profile: Profile, head: Head) -> HeadCost:
    for cost in profile.heads:
        if (cost.head.path, cost.head.chunks) == (head.path, head.chunks):
            return cost
    raise PlanError(f"the head {head.path!r} wasn't profiled in {head.chunks} chunks; run the step dry instead")


def run_placements(trace: Trace, placements: Iterable[Placement]) -> Timeline:
    """The timeline of placements; calls that none covers save everything."""
    effects: dict[int, Effect] = {}
    covered: set[int] = set()
    for placement in placements:
        covered.update(placement.calls)
        effects.update(placement_effects(trace, placement))
    for call in range(len(trace.profile.calls)):
        if call not in covered:
            effects.update(placement_effects(trace, Placement(calls=(call,), shape=0)))
    return _accumulate(trace.profile, effects)


def placement_effects(trace: Trace, placement: Placement) -> dict[int, Effect]:
    """What a placement adds, by index of the event."""
    costs = [trace.profile.calls[call] for call in placement.calls]
    if isinstance(placement.shape, int):
        option = costs[0].options[placement.shape]
        forward, backward = [_forward(option)], [_backward(option)]
    else:
        forward, backward = run_forward(costs), _run_backward(costs, placement.shape)
    effects: dict[int, Effect] = {}
    for call, ahead, back in zip(placement.calls, forward, backward, strict=True):
        if call in trace.forward:
            effects[trace.forward[call]] = ahead
        if call in trace.backward:
            effects[trace.backward[call]] = back
    return effects


def gap_effect(event: Event) -> Effect:
    """What a gap adds, whatever the plan."""
    peak = max(event.peak_bytes, event.delta_bytes, 0)
    return Effect(delta_bytes=event.delta_bytes, peak_bytes=peak, seconds=event.seconds)


def run_forward(costs: Sequence[CallCost]) -> list[Effect]:
    """Forward of a run, call by call: each input but the first is freed once it is consumed."""
    effects = []
    for index, cost in enumerate(costs):
        consumed = Effect(delta_bytes=-costs[index - 1].output_bytes if index else 0)
        effects.append(_forward(cost.options[FULL]).then(consumed))
    return effects


def replay(costs: Sequence[CallCost], shape: tuple[Shape, ...]) -> Effect:
    """The members of a run, run again from its first input, each under its own policy."""
    total = Effect()
    for member, member_costs in members(costs, shape):
        single = isinstance(member, int)
        steps = [_forward(member_costs[0].options[member])] if single else run_forward(member_costs)
        for cost, step in zip(member_costs, steps, strict=True):
            total = total.then(step).then(_again(cost.options[FULL]))
    return total.then(Effect(delta_bytes=-costs[-1].output_bytes))


def members(costs: Sequence[CallCost], shape: tuple[Shape, ...]) -> list[tuple[Shape, Sequence[CallCost]]]:
    """Each member of a run with the costs of its calls."""
    result, start = [], 0
    for member in shape:
        stop = start + width(member)
        result.append((member, costs[start:stop]))
        start = stop
    return result


def width(shape: Shape) -> int:
    """How many calls a shape covers."""
    return 1 if isinstance(shape, int) else sum(map(width, shape))


def place(trace: Trace, node: Node) -> list[Placement]:
    """Where a node of a plan acts: once per call of its module, or once per pass through its run.

    Raises:
        PlanError: as in `simulate`.
    """
    if isinstance(node, Region):
        calls = _calls_of(trace.profile, {node.path})
        return [Placement(calls=(call,), shape=_shape(trace.profile, [call], node)) for call in calls]
    paths = [leaf.path for leaf in leaves(node)]
    calls = _calls_of(trace.profile, set(paths))
    passes = [tuple(calls[start : start + len(paths)]) for start in range(0, len(calls), len(paths))]
    return [placed for one in passes for placed in _place_run(trace, node, paths, one)]


def _place_run(trace: Trace, node: Run, paths: list[str], calls: tuple[int, ...]) -> list[Placement]:
    """One pass through a run. Calls that backward never reaches (frozen ones, at its begin) run as without a plan."""
    _check_run(trace, paths, calls)
    shape: Shape | None = _shape(trace.profile, list(calls), node)
    frozen = next((i for i, call in enumerate(calls) if call in trace.backward), len(calls))
    placed = [Placement(calls=(call,), shape=0) for call in calls[:frozen]]
    for _ in range(frozen):
        shape = _without_first(shape) if shape is not None else None
    if shape is not None:
        placed.append(Placement(calls=calls[frozen:], shape=shape))
    return placed


def _without_first(shape: Shape) -> Shape | None:
    if isinstance(shape, int):
        return None
    first = _without_first(shape[0])
    return (shape[1:] or None) if first is None else (first, *shape[1:])


def _check_run(trace: Trace, paths: list[str], calls: tuple[int, ...]) -> None:
    profile, name = trace.profile, f"the run {paths[0]} … {paths[-1]}"
    if [profile.calls[call].path for call in calls] != paths:
        called = ", ".join(profile.calls[call].path for call in calls)
        raise PlanError(
            f"{name} doesn't match the order in which its blocks are called ({called}); give each its own region"
        )
    if calls != tuple(range(calls[0], calls[0] + len(calls))) or len({profile.calls[call].chain for call in calls}) > 1:
        raise PlanError(
            f"{name} isn't one chain of consecutive calls, so its later blocks can't be run again from its first input;"
            " split the run where the chain breaks"
        )
    if blind := [cost.path for cost in map(profile.calls.__getitem__, calls) if len(cost.options) <= FULL]:
        raise PlanError(f"{name} holds {blind[0]!r}, which wasn't profiled under Recompute(); leave it out of the run")
    order = [trace.backward[call] for call in calls if call in trace.backward]
    if order != sorted(order, reverse=True):
        raise PlanError(f"the backward of {name} doesn't go in reverse order; give each block its own region")


def _calls_of(profile: Profile, paths: set[str]) -> list[int]:
    calls = [index for index, cost in enumerate(profile.calls) if cost.path in paths]
    if missing := sorted(paths - {profile.calls[call].path for call in calls} - set(profile.blocks)):
        raise PlanError(f"the plan names {missing[0]!r}, which the profiled step doesn't know; profile the model again")
    return calls


def _shape(profile: Profile, calls: list[int], node: Node) -> Shape:
    if isinstance(node, Run):
        rest = iter(calls)
        return tuple(_shape(profile, [next(rest) for _ in leaves(member)], member) for member in node.members)
    cost = profile.calls[calls[0]]
    for index, option in enumerate(cost.options):
        if option.policy == node.policy:
            return index
    raise PlanError(f"block {node.path!r} wasn't profiled under {node.policy!r}; profile it with that option")


def _forward(option: OptionCost) -> Effect:
    delta = option.forward_delta_bytes
    peak = max(option.forward_peak_bytes, delta, 0)
    return Effect(delta_bytes=delta, peak_bytes=peak, seconds=option.forward_seconds)


def _backward(option: OptionCost) -> Effect:
    return Effect(
        delta_bytes=option.backward_delta_bytes,
        peak_bytes=max(option.backward_peak_bytes, option.backward_delta_bytes, 0),
        seconds=option.backward_seconds + option.replay_seconds,
        replay_flops=option.replay_flops,
    )


def _again(full: OptionCost) -> Effect:
    """What a forward costs more as a replay: its operations count, and its time is that of a measured replay."""
    return Effect(seconds=full.replay_seconds - full.forward_seconds, replay_flops=full.replay_flops)


def _run_backward(costs: Sequence[CallCost], shape: tuple[Shape, ...]) -> list[Effect]:
    """Backward of a run, by call in the order of the forwards; the replay is part of the last call's."""
    effects: list[Effect] = []
    for member, member_costs in members(costs, shape):
        if isinstance(member, int):
            effects.append(_backward(member_costs[0].options[member]))
        else:
            effects += _run_backward(member_costs, member)
    for index, cost in enumerate(costs):
        kept = cost.options[FULL].forward_delta_bytes - cost.output_bytes
        effects[index] = effects[index].then(Effect(delta_bytes=-kept))
    effects[-1] = replay(costs, shape).then(effects[-1])
    return effects


def _accumulate(profile: Profile, effects: Mapping[int, Effect]) -> Timeline:
    live = peak = profile.static_bytes
    peak_event, seconds, flops, moments = -1, 0.0, 0, []
    for index, event in enumerate(profile.events):
        effect = gap_effect(event) if event.kind == "gap" else effects[index]
        moment = Moment(
            event=event,
            live_before_bytes=live,
            peak_bytes=live + effect.peak_bytes,
            live_after_bytes=live + effect.delta_bytes,
            seconds=effect.seconds,
        )
        moments.append(moment)
        if moment.peak_bytes > peak:
            peak, peak_event = moment.peak_bytes, index
        live = moment.live_after_bytes
        seconds += effect.seconds
        flops += effect.replay_flops
    return Timeline(
        static_bytes=profile.static_bytes,
        moments=tuple(moments),
        peak_bytes=peak,
        peak_event=peak_event,
        seconds=seconds,
        replay_flops=flops,
    )
