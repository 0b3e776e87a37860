"""Synthetic profiles: numbers like those of a decoder, small enough to check every plan by hand."""

from __future__ import annotations

from reforward._policy import Ops, Recompute, Save
from reforward._profile_type import CallCost, Event, OptionCost, Profile

UNIT = 1 << 20


def option(policy, *, kept: int, gradient: int, plain: int, seconds: float, replay: float, peak: int | None = None):
    """An option that keeps `kept` bytes (output included) of a block whose plain forward leaves `plain`."""
    replayed = 0 if policy == Save() else plain - kept
    return OptionCost(
        policy=policy,
        forward_delta_bytes=kept,
        forward_peak_bytes=kept + UNIT // 2 if peak is None else peak,
        backward_delta_bytes=gradient - kept,
        backward_peak_bytes=max(replayed + UNIT, gradient - kept + UNIT),
        forward_seconds=seconds,
        backward_seconds=2 * seconds,
        replay_seconds=replay * seconds,
        replay_flops=round(replay * seconds * 1e9),
    )


def block(
    index: int,
    *,
    plain: int = 16,
    full: int = 1,
    selective: dict[int, float] | None = None,
    gradient: int = UNIT,
    seconds: float = 1.0,
    chain: int = 0,
    path: str | None = None,
) -> CallCost:
    """A block whose plain forward leaves `plain` units; `selective` maps kept units to the share that is recomputed."""
    common = {"gradient": gradient, "plain": plain * UNIT, "seconds": seconds}
    options = [
        option(Save(), kept=plain * UNIT, replay=0.0, **common),
        option(Recompute(), kept=full * UNIT + 512, replay=1.0, **common),
    ]
    names = ("attention", "matmul", "norm", "elementwise", "conv", "random")
    for name, (kept, replay) in zip(names, (selective or {}).items(), strict=False):
        options.append(option(Recompute(save=(Ops(family=name),)), kept=kept * UNIT + 512, replay=replay, **common))
    return CallCost(
        path=path or f"layers.{index}",
        module_type="Layer",
        chain=chain,
        output_bytes=UNIT * min(full, 1),
        options=tuple(options),
    )


def step(calls: list[CallCost], *, head: int = 8 * UNIT, static: int = 20 * UNIT, optimizer: int = 2 * UNIT) -> Profile:
    """Forward through all calls, a loss head, backward in reverse order, the optimizer."""
    count = len(calls)
    events = [
        Event(kind="gap", name="forward", delta_bytes=UNIT, peak_bytes=UNIT, seconds=0.1),
        *(Event(kind="forward", call=index) for index in range(count)),
        Event(kind="gap", name="backward", delta_bytes=UNIT // 2, peak_bytes=head, seconds=1.0),
        *(Event(kind="backward", call=index) for index in reversed(range(count))),
        Event(kind="gap", name="optimizer", delta_bytes=-UNIT, peak_bytes=optimizer, seconds=0.2),
    ]
    return Profile(
        static_bytes=static,
        parameter_bytes=static // 4,
        gradient_bytes=sum(c.options[0].forward_delta_bytes + c.options[0].backward_delta_bytes for c in calls),
        optimizer_bytes=static // 2,
        calls=tuple(calls),
        events=tuple(events),
        blocks=tuple(dict.fromkeys(call.path for call in calls)),
    )


def decoder(count: int, *, selective: bool = True, head: int = 8 * UNIT, **block_changes) -> Profile:
    """`count` equal blocks of 16 units with two selective options."""
    kinds = {4: 0.6, 8: 0.25} if selective else None
    return step([block(index, selective=kinds, **block_changes) for index in range(count)], head=head)
