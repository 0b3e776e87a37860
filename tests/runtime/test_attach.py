"""The model stays the user's: attaching changes how it runs and nothing else; detaching leaves no trace."""

import copy
import inspect
import io
import pickle
import warnings

import pytest
import same
import torch
from test_replay import Block, Stack, stack
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import models
import reforward as rf

PLAN = {"layers.0": rf.Recompute(save="*.up"), "layers[1:3]": rf.Recompute()}


def contents(model):
    """`__dict__` of every module, with the order of its keys."""
    return [(module, list(module.__dict__.items())) for module in model.modules()]


def assert_untouched(before, model):
    after = contents(model)
    assert len(before) == len(after)
    for (module, items), (same_module, found) in zip(before, after, strict=True):
        assert module is same_module
        assert [key for key, _ in items] == [key for key, _ in found]
        assert all(one is other for (_, one), (_, other) in zip(items, found, strict=True))


def runs(model):
    """How often each block runs in a step."""
    with same.counted(model) as calls:
        model(torch.randn(4, 8)).sum().backward()
    return calls.of(*(f"layers.{i}" for i in range(len(model.layers))))


def test_names_types_and_signature_stay():
    model = stack()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    signature = inspect.signature(model.layers[0].forward)
    rf.attach(model, PLAN)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    assert type(model.layers[0]) is Block
    assert inspect.signature(model.layers[0].forward) == signature
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("plan", [PLAN, rf.full(), rf.segments(1, nested=2)], ids=["rules", "full", "nested"])
def test_detach_leaves_no_trace(plan):
    model = stack(4)
    before = contents(model)
    rf.attach(model, plan)
    model(torch.randn(4, 8)).sum().backward()
    rf.detach(model)
    assert_untouched(before, model)
    rf.detach(model)
    assert runs(model) == [1, 1, 1, 1]


def test_attaching_again_replaces():
    model = stack()
    rf.attach(model, PLAN)
    rf.attach(model, {"layers.1": rf.Recompute()})
    assert runs(model) == [1, 2, 1]
    rf.attach(model, rf.none())
    assert runs(model) == [1, 1, 1]


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved_and_loaded,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("plan", [PLAN, rf.segments(1)], ids=["regions", "run"])
def test_copies_are_attached_and_independent(copied, plan):
    model = stack()
    rf.attach(model, plan)
    model(torch.randn(4, 8)).sum().backward()
    twin = copied(model)
    assert runs(twin) == [2, 2, 2]
    assert all(p is not q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    rf.detach(model)
    assert runs(model) == [1, 1, 1]
    assert runs(twin) == [2, 2, 2]
    rf.detach(twin)
    assert runs(twin) == [1, 1, 1]


def test_a_copy_uses_its_own_weights():
    model = stack()
    rf.attach(model, PLAN)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(torch.ones(4, 8)), torch.ones(4, 8))
    assert not torch.equal(model(torch.ones(4, 8)), torch.ones(4, 8))


def test_attached_brings_back_what_was_there_before():
    model = stack()
    rf.attach(model, {"layers.0": rf.Recompute()})
    with rf.attached(model, {"layers.1": rf.Recompute()}):
        assert runs(model) == [1, 2, 1]
    assert runs(model) == [2, 1, 1]
    rf.detach(model)
    before = contents(model)
    with pytest.raises(KeyError), rf.attached(model, PLAN):
        raise KeyError
    assert_untouched(before, model)


def test_suspended_is_plain_and_what_was_recorded_before_still_replays():
    model = stack()
    rf.attach(model, rf.full())
    loss = model(torch.randn(4, 8)).sum()
    with rf.suspended(model):
        assert runs(model) == [1, 1, 1]
        with same.counted(model) as calls:
            loss.backward()
        assert calls.of("layers.0", "layers.1") == [1, 1]
    assert runs(model) == [2, 2, 2]


@pytest.mark.parametrize("plan", [PLAN, rf.segments(1)], ids=["regions", "run"])
def test_detached_before_backward(plan):
    def gradients(attached):
        same.seed(0)
        model = stack()
        x = torch.randn(4, 8)
        if attached:
            rf.attach(model, plan)
        loss = model(x).square().sum()
        rf.detach(model)
        before = contents(model)
        loss.backward()
        assert_untouched(before, model)
        return [p.grad for p in model.parameters()]

    assert same.equal(gradients(False), gradients(True))


# Transformers' flag


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_flag_of_transformers_is_taken_over_and_given_back(name):
    expected = same.record(*models.build(name), steps=1)
    model, loss = models.build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the name's deprecation
        model.gradient_checkpointing_enable()
    flags = [(m, m.gradient_checkpointing) for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    assert any(flag for _, flag in flags)
    before = contents(model)
    rf.attach(model, rf.full())
    assert not any(m.gradient_checkpointing for m, _ in flags)
    assert same.differences(expected, same.record(model, loss, steps=1)) == []
    rf.detach(model)
    assert all(m.gradient_checkpointing is flag for m, flag in flags)
    assert_untouched(before, model)


# What is refused leaves the model untouched


def meta():
    with torch.device("meta"):
        return stack()


def foreign():
    model = stack()
    model.layers[1].forward = lambda x: x
    return model


def wrapped():
    return Stack(checkpoint_wrapper(Block()), Block())


def wrapped_inside():
    model = stack()
    model.layers[2].up = checkpoint_wrapper(model.layers[2].up)
    return model


@pytest.mark.parametrize(
    ("build", "what", "error", "message"),
    [
        (meta, rf.full(), rf.AttachError, "meta device"),
        (foreign, rf.full(), rf.AttachError, r"'layers\.1'.*lambda"),
        (wrapped, {"layers.0": rf.Recompute()}, rf.AttachError, r"'layers\.0'.*CheckpointWrapper"),
        (wrapped_inside, rf.full(), rf.AttachError, r"'layers\.2\.up'.*CheckpointWrapper"),
        (stack, {"layer.7": rf.Recompute()}, rf.PatternError, r"'layer\.7'"),
        (stack, {"layers.0": rf.Recompute(save="*.nothing")}, rf.PatternError, r"'\*\.nothing'"),
        (stack, {"layers.*": rf.Recompute(), "layers.0": rf.Save()}, rf.PatternError, r"'layers\.0'"),
        (
            stack,
            rf.Plan(nodes=(rf.Region(path="encoder.0", policy=rf.Recompute()),)),
            rf.PlanError,
            r"another model.*'encoder\.0'",
        ),
        (
            stack,
            rf.Plan(nodes=(rf.Region(path="layers.0", policy=rf.Recompute(), module_type="Other"),)),
            rf.PlanError,
            "is a Block, not a Other",
        ),
        (stack, "full", rf.InputError, "'full'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_refused_leaves_the_model_as_it_was(build, what, error, message):
    model = build()
    before = contents(model)
    with pytest.raises(error, match=message):
        rf.attach(model, what)
    assert_untouched(before, model)


def test_a_refused_plan_leaves_the_one_that_is_on():
    model = stack()
    rf.attach(model, {"layers.0": rf.Recompute()})
    with pytest.raises(rf.PatternError):
        rf.attach(model, {"nowhere": rf.Recompute()})
    assert runs(model) == [2, 1, 1]


# Transforms


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("plan", [PLAN, rf.segments(1)], ids=["regions", "run"])
def test_transforms_of_torch_func_run_the_blocks_plainly(plan):
    def results(attached):
        same.seed(0)
        model = stack().eval()
        if attached:
            rf.attach(model, plan)
        weights, x = dict(model.named_parameters()), torch.randn(4, 8)

        def loss(weights, row):
            return torch.func.functional_call(model, weights, row[None]).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        hessian = torch.func.hessian(lambda row: loss(weights, row))(x[0])
        with torch.autograd.forward_ad.dual_level():
            dual = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            forward = torch.autograd.forward_ad.unpack_dual(dual).tangent
        return [*per_sample.values(), tangent, hessian, forward]

    expected, found = results(False), results(True)
    assert same.equal(expected, found)


@pytest.mark.parametrize(
    "use",
    [
        rf.detach,
        lambda model: rf.suspended(model).__enter__(),
        lambda model: rf.attached(model, rf.full()).__enter__(),
        lambda model: rf.attach(model, rf.full()),
    ],
    ids=["detach", "suspended", "attached", "attach"],
)
def test_what_is_no_model_is_refused(use):
    with pytest.raises(rf.InputError, match=r"the model must be a torch\.nn\.Module, not None"):
        use(None)
