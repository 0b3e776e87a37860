"""Forward hooks inside a block: those that do something run again in the replay, those that only look don't."""

import io
import warnings

import pytest
import same
import torch
from test_replay import Stack, stack
from torch import nn
from torch.nn.utils import weight_norm

import reforward as rf


def inner(model):
    return [module for block in model.layers for name, module in block.named_modules() if name]


def watched(model):
    """Notes every hook that fires, before and after, on all modules inside the blocks."""
    seen = []
    for number, module in enumerate(inner(model)):
        module.register_forward_pre_hook(lambda m, args, n=number: seen.append(("pre", n)))
        module.register_forward_hook(lambda m, args, kwargs, out, n=number: seen.append(("post", n)), with_kwargs=True)
    return seen


def test_observers_fire_once_in_their_order():
    fired = []
    for plan in (None, rf.full(), rf.segments(1), rf.selective(save="matmul")):
        model = stack(2)
        if plan is not None:
            rf.attach(model, plan)
        seen = watched(model)
        model(torch.ones(4, 8)).sum().backward()
        fired.append(seen)
    assert fired[0]
    assert fired[1:] == [fired[0]] * 3


@pytest.mark.parametrize("plan", [rf.full(), rf.segments(1), rf.selective(save="matmul")], ids=repr)
def test_what_observers_write_outside_is_written_once(plan):
    model, log = stack(2), io.StringIO()  # what it holds can't be put back
    for number, module in enumerate(inner(model)):
        module.register_forward_hook(lambda m, args, out, n=number: log.write(f"{n} ") and None)
    rf.attach(model, plan)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
    assert sorted(log.getvalue().split()) == sorted(2 * [str(n) for n in range(len(inner(model)))])


def test_hooks_that_return_values_or_write_to_their_module_are_replayed():
    def build():
        model = stack(2)
        for module in inner(model):
            module.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
            module.register_forward_hook(lambda m, args, out: out.sin())

            def scale(m, args):
                m.calls = getattr(m, "calls", 0) + 1

            module.register_forward_pre_hook(scale)
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    def calls(model):
        return [module.calls for module in inner(model)]

    for plan in (rf.full(), rf.segments(1), rf.segments(1, nested=1), rf.selective(save="matmul")):
        same.assert_same(build, plan)
        model, loss = same.built(build)
        rf.attach(model, plan)
        loss().backward()
        assert set(calls(model)) == {1}


def test_a_hook_that_swaps_a_parameter_is_replayed_and_one_that_ends_what_another_began_gets_its_turn():
    def build():
        model = stack(2)
        for block in model.layers:
            block.up = weight_norm(block.up)  # a pre-hook that computes the weight

            def begin(module, args):
                module.is_open = True

            def end(module, args, output):
                assert module.is_open
                module.is_open = False

            block.register_forward_pre_hook(begin)
            block.register_forward_hook(end)
            block.down.register_forward_pre_hook(begin)
            block.down.register_forward_hook(end)
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        same.assert_same(build, rf.full())
        model, loss = same.built(build)
    rf.attach(model, rf.full())
    loss().backward()
    assert [block.down.is_open for block in model.layers] == [False, False]


def test_hooks_added_or_removed_after_the_forward_dont_change_the_replay():
    model = stack(1)
    x = torch.randn(4, 8)
    handle = model.layers[0].up.register_forward_hook(lambda m, args, out: out * 2)
    torch.manual_seed(0)
    expected = torch.autograd.grad(model(x).sum(), model.layers[0].up.weight)[0]
    rf.attach(model, rf.full())
    torch.manual_seed(0)
    loss = model(x).sum()
    handle.remove()
    late = model.layers[0].up.register_forward_hook(lambda m, args, out: out * 0)
    assert torch.equal(torch.autograd.grad(loss, model.layers[0].up.weight)[0], expected)
    assert list(model.layers[0].up._forward_hooks) == [late.id]


def test_a_hook_that_removes_itself_and_hooks_of_all_modules():
    seen = []

    def build():
        model = stack(2)
        for block in model.layers:

            def once(m, args):
                m.handle.remove()
                return (args[0] + 1,)

            block.up.handle = block.up.register_forward_pre_hook(once)
        x = torch.randn(4, 8)
        return model, lambda: model(x).square().sum()

    same.assert_same(build, rf.full())
    everywhere = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m)))
    try:
        model = stack(2)
        rf.attach(model, rf.full())
        model(torch.ones(4, 8)).sum().backward()
    finally:
        everywhere.remove()
    assert seen.count(nn.Linear) == 4
    assert seen.count(Stack) == 1


def test_an_error_in_forward_or_replay_leaves_the_hooks_as_they_were():
    model = stack(1)
    block = model.layers[0]

    def hook(module, args):
        if module.fails:
            raise KeyError("hook")

    handle = block.up.register_forward_pre_hook(hook)
    before = dict(block.up._forward_pre_hooks)
    rf.attach(model, rf.full())
    block.up.fails = True
    with pytest.raises(KeyError, match="hook"):
        model(torch.ones(4, 8))
    assert dict(block.up._forward_pre_hooks) == before
    handle.remove()


def test_a_hook_added_to_a_block_that_had_none_before_does_not_run_in_the_replay():
    model = stack(1).eval()
    x = torch.randn(4, 8)
    expected = torch.autograd.grad(model(x).sum(), model.layers[0].up.weight)[0]
    rf.attach(model, rf.full())
    model(x).sum().backward()
    loss = model(x).sum()
    model.layers[0].up.register_forward_hook(lambda m, args, out: out * 2)
    assert torch.equal(torch.autograd.grad(loss, model.layers[0].up.weight)[0], expected)


def test_hooks_of_modules_that_are_held_unregistered_fire_once():
    seen = []

    class Holds(type(stack(1).layers[0])):
        def __init__(self):
            super().__init__()
            self.extra = [nn.Linear(8, 8)]
            self.extra[0].register_forward_hook(lambda m, args, out: seen.append(1))

        def forward(self, x):
            return super().forward(self.extra[0](x))

    model = Stack(Holds())
    rf.attach(model, rf.full())
    model(torch.ones(4, 8)).sum().backward()
    assert seen == [1]
