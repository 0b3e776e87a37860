"""The policies that are tried on a block come from the calls in it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from profiled import case
from torch import Tensor, nn

import reforward as rf
from reforward import Modules, Ops, Recompute
from reforward._profile import profile_step
from reforward._profile.inside import policies_inside
from reforward._runtime import SeenCall


def call(family: str, *places: tuple[str, int], kept: int = 8, flops: int = 1) -> SeenCall:
    return SeenCall(family=family, places=(("", 0), *places), kept_bytes=kept, seconds=1.0, flops=flops)


def selected(*calls: SeenCall, path: str = "layers.0") -> set[Ops | Modules]:
    return {selector for policy in policies_inside(path, calls) for selector in policy.save}


def test_a_call_is_named_by_the_submodule_that_makes_it() -> None:
    calls = [call("matmul", ("layers.0.up", 0), kept=4), call("matmul", ("layers.0.down", 0))]
    assert policies_inside("layers.0", calls) == (
        Recompute(save=[Ops(family="matmul", within="*.up")]),
        Recompute(save=[Ops(family="matmul")]),
    )


def test_of_several_calls_in_one_submodule_each_has_a_number() -> None:
    inside, out = "layers.0.attention", Ops(family="matmul", within="*.attention.out")
    calls = [
        call("matmul", (inside, 0)),
        call("matmul", (inside, 1)),
        call("matmul", (inside, 2), (f"{inside}.out", 0), kept=4),
    ]
    assert policies_inside("layers.0", calls) == (
        Recompute(save=[out]),
        Recompute(save=[out, Ops(family="matmul", within="*.attention", nth=0)]),
        Recompute(save=["matmul"]),
    )


def test_a_call_in_the_block_itself_has_a_number() -> None:
    calls = [SeenCall(family="conv", places=(("", n),), kept_bytes=8 + n, seconds=1.0, flops=1) for n in range(2)]
    assert policies_inside("net", calls) == (
        Recompute(save=[Ops(family="conv", nth=0)]),
        Recompute(save=[Ops(family="conv")]),
    )


def test_experts_are_alike() -> None:
    calls = [call("matmul", (f"layers.0.experts.{n}.up", 0)) for n in range(3)]
    calls.append(call("attention", ("layers.0.attention", 0), kept=1))
    assert policies_inside("layers.0", calls)[-1] == Recompute(save=["matmul", "attention"])
    assert len(policies_inside("layers.0", calls)) == 2, "one step keeps all experts"


def test_what_spares_little_or_is_never_computed_again_is_left() -> None:
    cheap = SeenCall(family="norm", places=(("", 0),), kept_bytes=8, seconds=0.01, flops=0)
    late = call("matmul", ("layers.0.down", 0), kept=0)
    dear = call("matmul", ("layers.0.up", 0))
    assert selected(cheap, dear, late) == {Ops(family="matmul")}


class PreNorm(nn.Module):
    """A pre-norm transformer block; (batch, time, 32) → the same."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@pytest.fixture(scope="module")
def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[PreNorm() for _ in range(3)])


def test_a_pre_norm_block_offers_what_people_make_by_hand(blocks: nn.Sequential) -> None:
    """Neither products nor attention recomputed in 64 % of the bytes; the up-projection recomputed, too, in 40 %."""
    x = torch.randn(2, 256, 32)
    profile = profile_step(blocks, rf.Step(lambda: blocks(x).square().mean())).profile
    options = profile.calls[1].options
    plain = options[0].forward_delta_bytes
    least = {o.replay_flops: o.forward_delta_bytes / plain for o in reversed(options)}
    tokens = 2 * 256
    assert least[0] == 1.0
    assert min(o.forward_delta_bytes / plain for o in options if not o.replay_flops) <= 0.64
    assert min(o.forward_delta_bytes / plain for o in options if o.replay_flops <= 2 * tokens * 32 * 128) <= 0.40
    assert options[1].policy == Recompute()
    assert options[1].forward_delta_bytes <= plain / 10


def test_options_of_a_whole_model_keep_more_and_more() -> None:
    for one in case("gpt").profiled.profile.calls:
        flops = [option.replay_flops for option in one.options[1:]]
        kept = [option.forward_delta_bytes for option in one.options[1:]]
        assert flops == sorted(flops, reverse=True)
        assert kept == sorted(kept)


def test_the_layers_of_a_sequential_are_told_apart() -> None:
    calls = [call("matmul", (f"layers.0.{n}", 0), kept=4 + n) for n in (1, 3)]
    assert policies_inside("layers.0", calls) == (
        Recompute(save=[Ops(family="matmul", within="*.1")]),
        Recompute(save=[Ops(family="matmul")]),
    )
