"""Values that a replay computes are compared with the forward's; an error names block, tensor and line."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_replay import stack
from torch import nn

import reforward as rf
from reforward._runtime.fingerprint import fingerprint


class Shifts(nn.Module):
    """Computes something else when it is told to, in the same shapes, where no fence sees it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x) + shift())


class Routes(nn.Module):
    """Takes the two largest of its outputs."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x):
        return self.gate(x).gather(1, ((x + shift()).argsort(1)[:, :2])).exp()


SHIFT = [torch.zeros(8)]


def shift():
    return SHIFT[0]


@pytest.fixture
def shifted():
    """Changes what `shift` returns."""

    def to(value):
        SHIFT[0] = value

    yield to
    SHIFT[0] = torch.zeros(8)


def step(model, between=lambda: None):
    loss = model(torch.linspace(-1, 1, 32).reshape(4, 8)).sum()
    between()
    loss.backward()


def test_the_first_replay_that_computes_other_values_is_refused_and_names_block_tensor_and_line(shifted):
    model = nn.Sequential(Shifts(), Shifts())
    rf.attach(model, {"1": rf.Recompute()})
    with pytest.raises(
        rf.ReplayMismatchError, match=r"block '1'.*other values.*\(4, 8\).*test_check.py:\d+: return torch.tanh"
    ):
        step(model, lambda: shifted(torch.full((8,), 1e-6)))


@pytest.mark.parametrize(("check", "refused"), [("first", False), ("always", True), ("off", False)])
def test_first_compares_until_a_replay_was_right_and_always_always(shifted, check, refused):
    model = nn.Sequential(Shifts())
    rf.attach(model, {"0": rf.Recompute()}, check=check)
    step(model)
    if refused:
        with pytest.raises(rf.ReplayMismatchError, match="block '0'"):
            step(model, lambda: shifted(torch.ones(8)))
    else:
        step(model, lambda: shifted(torch.ones(8)))


@pytest.mark.parametrize(("check", "refused"), [("first", True), ("off", False)])
def test_routing_is_compared_at_every_step(shifted, check, refused):
    model = nn.Sequential(Routes())
    rf.attach(model, {"0": rf.Recompute()}, check=check)
    for _ in range(3):
        step(model)
    other = torch.linspace(3, -3, 8)
    if refused:
        with pytest.raises(rf.ReplayMismatchError, match=r"torch\.int64"):
            step(model, lambda: shifted(other))
    else:
        step(model, lambda: shifted(other))


@pytest.mark.parametrize("plan", [rf.full(), rf.segments(1), rf.segments(1, nested=2), rf.selective(save="matmul")])
def test_right_replays_are_proven_under_every_technique_and_leave_nothing_behind(plan):
    model = stack(4)
    rf.attach(model, plan, check="always")
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    assert all(layer.forward._learnt.proven for layer in model.layers)
    before = living_tensors()
    model(torch.randn(4, 8)).sum().backward()
    assert living_tensors() == before


def living_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_an_unknown_check_is_refused_and_the_model_untouched():
    model = stack(1)
    with pytest.raises(rf.InputError, match=r"'first', 'always', 'off'.*'never'"):
        rf.attach(model, rf.full(), check="never")
    assert "forward" not in model.layers[0].__dict__


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.bool]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.data())
def test_one_flipped_bit_changes_the_fingerprint(dtype, shape, data):
    numbers = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randint(-100, 100, shape)
    tensor = numbers.to(dtype)
    bits = tensor.clone().view(torch.uint8).view(-1)
    before = fingerprint(tensor)
    position = data.draw(st.integers(0, bits.numel() - 1))
    bits[position] ^= 1 if dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    assert fingerprint(bits.view(dtype).view(shape)) != before


@pytest.mark.parametrize("size", [(3,), (70_000,), (300, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_values_that_change_places_change_the_fingerprint(size, dtype):
    tensor = (torch.arange(torch.Size(size).numel()) % 5).to(dtype).reshape(size)
    other = tensor.flatten().roll(1).reshape(size)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(tensor) != fingerprint(other)


def test_the_fingerprint_of_a_view_is_that_of_its_values():
    base = torch.randn(6, 10, 4)
    for view in (base.transpose(0, 2), base[1:3, ::2], base[:, 3], base.bfloat16()[0, 1:, 1:]):
        assert fingerprint(view) == fingerprint(view.clone(memory_format=torch.preserve_format))
