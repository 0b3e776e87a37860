"""The chunked loss head: what it computes, what it does with other uses of the logits, what it refuses."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import reforward as rf
from reforward._measure.tracker import StorageTracker
from reforward._profile import dry_run
from reforward._runtime.logits import Logits
from reforward._verify import TOLERANCES

WIDTH, VOCABULARY, BATCH, TIME = 8, 23, 2, 9


class Model(nn.Module):
    """Norm and head; features (batch, time, width) → logits."""

    def __init__(self, bias: bool = False, vocabulary: int = VOCABULARY, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


def made(bias: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Model, Tensor, Tensor]:
    """A model, its input and its targets, some of which are ignored."""
    torch.manual_seed(0)
    model = Model(bias).to(dtype)
    target = torch.randint(0, VOCABULARY, (BATCH, TIME))
    target[0, :3] = -100
    return model, torch.randn(BATCH, TIME, WIDTH, dtype=dtype, requires_grad=True), target


def chunked(chunks: int = 5) -> Any:
    return rf.chunked_head(chunks=chunks, head="head")


Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


def flat(logits: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **kwargs)


def results(model: nn.Module, hidden: Tensor, target: Tensor, step: Step, what: Any = None) -> dict[str, Tensor]:
    """Loss and gradients of a step, plainly or under a plan; a loss of several elements is weighed."""
    model.zero_grad(set_to_none=True)
    hidden.grad = None
    with rf.attached(model, what) if what is not None else nullcontext():
        loss = step(model, hidden, target)
        (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    found = {name: p.grad for name, p in [*model.named_parameters(), ("input", hidden)] if p.grad is not None}
    return {"loss": loss.detach()} | {name: gradient.clone() for name, gradient in found.items()}


def assert_equal_to_rounding(expected: dict[str, Tensor], got: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == got[name].dtype
        assert tensor.shape == got[name].shape
        apart = (tensor.double() - got[name].double()).abs().max()
        assert apart <= TOLERANCES[dtype] * tensor.double().abs().max(), f"{name}: {apart}"


def compared(
    step: Step,
    chunks: int = 5,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    to: torch.dtype | None = None,
) -> None:
    """The step gives the same plainly and in chunks, and its logits were never made whole."""
    model, hidden, target = made(bias, dtype)
    expected = results(model, hidden, target, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal_to_rounding(expected, results(model, hidden, target, step, chunked(chunks)), to or dtype)


# What it computes
# ---------------------------------------------------------------------------------------------------------

OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": torch.linspace(0.5, 2, VOCABULARY)},
    "all": {"weight": torch.linspace(0.5, 2, VOCABULARY), "label_smoothing": 0.2, "reduction": "sum"},
    "all, mean": {"weight": torch.linspace(0.5, 2, VOCABULARY), "label_smoothing": 0.2},
    "all, none": {"weight": torch.linspace(0.5, 2, VOCABULARY), "label_smoothing": 0.2, "reduction": "none"},
}


def with_options(options: dict[str, Any], dtype: torch.dtype) -> Step:
    weight = options.get("weight")
    options = options if weight is None else {**options, "weight": weight.to(dtype)}

    def step(model: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
        ignore = options.get("ignore_index", -100)
        return flat(model(hidden), torch.where(target == -100, ignore, target), **options)

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_of_the_loss(options: str, dtype: torch.dtype) -> None:
    compared(with_options(OPTIONS[options], dtype), bias=True, dtype=dtype)


@pytest.mark.parametrize("chunks", [1, 2, 7, 18, 100])
def test_any_number_of_chunks(chunks: int) -> None:
    compared(lambda model, hidden, target: flat(model(hidden), target), chunks)


LAYOUTS: dict[str, Step] = {
    "view": lambda m, h, t: F.cross_entropy(m(h).view(-1, VOCABULARY), t.view(-1)),
    "reshape": lambda m, h, t: F.cross_entropy(m(h).reshape((BATCH * TIME, -1)), t.reshape(-1)),
    "shifted": lambda m, h, t: flat(m(h)[:, :-1], t[:, 1:]),
    "shifted, contiguous": lambda m, h, t: F.cross_entropy(
        m(h)[..., :-1, :].contiguous().view(-1, VOCABULARY), t[..., 1:].contiguous().view(-1)
    ),
    "float": lambda m, h, t: flat(m(h).float(), t),
    "double": lambda m, h, t: flat(m(h).to(torch.float64), t),
    "same device": lambda m, h, t: flat(m(h).to("cpu").type_as(h), t),
    "class dimension second": lambda m, h, t: F.cross_entropy(m(h).transpose(1, 2), t),
    "class dimension second, none": lambda m, h, t: F.cross_entropy(m(h).mT, t, reduction="none"),
    "permuted": lambda m, h, t: F.cross_entropy(m(h).permute(0, 2, 1).float(), t),
    "moved there and back": lambda m, h, t: flat(m(h).movedim(-1, 0).movedim(0, -1), t),
    "supervised rows": lambda m, h, t: F.cross_entropy(m(h)[t != -100], t[t != -100]),
    "rows by number": lambda m, h, t: F.cross_entropy(m(h)[1, torch.tensor([4, 5])], t[1, [4, 5]]),
    "rows by number and all classes": lambda m, h, t: flat(m(h)[..., torch.tensor([4, 5]), :], t[:, [4, 5]]),
    "one sequence": lambda m, h, t: F.cross_entropy(m(h)[1], t[1]),
    "squeezed": lambda m, h, t: F.cross_entropy(m(h[:1]).squeeze(0), t[0]),
    "module": lambda m, h, t: nn.CrossEntropyLoss()(m(h).flatten(0, 1), t.flatten()),
    "soft cap": lambda m, h, t: flat(torch.tanh(m(h) / 3.0) * 3.0, t),
    "scaled": lambda m, h, t: flat(2 * m(h) * 0.25, t),
    "twice": lambda m, h, t: flat((z := m(h)), t) + 0.5 * flat(z[:, :4], t[:, :4], reduction="sum"),
    "keyword": lambda m, h, t: F.cross_entropy(target=t.flatten(), input=m(h).flatten(0, 1)),
    "scaled loss": lambda m, h, t: flat(m(h), t) / 7 * 1024,
    "small targets": lambda m, h, t: flat(m(h), t.clamp(0).to(torch.uint8)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_every_way_to_the_loss(layout: str, bias: bool) -> None:
    compared(LAYOUTS[layout], bias=bias)


@pytest.mark.parametrize("cast", [False, True], ids=["", "float"])
@pytest.mark.parametrize("options", ["mean", "sum", "none", "all, mean"])
def test_under_autocast(options: str, cast: bool) -> None:
    inner = with_options(OPTIONS[options], torch.float32)

    def step(model: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return inner((lambda h: model(h).float()) if cast else model, hidden, target)  # pyright: ignore[reportArgumentType]

    compared(step, bias=True, to=torch.bfloat16)


def test_the_loss_may_be_taken_outside_of_autocast() -> None:
    def step(model: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(hidden)
        return flat(logits.float(), target)

    compared(step, to=torch.bfloat16)


@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "weight and bias"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    model, hidden, target = made(bias=True)
    model.norm.requires_grad_(frozen != "input")
    hidden.requires_grad_(frozen != "input")
    model.head.weight.requires_grad_("weight" not in frozen)
    assert model.head.bias is not None
    model.head.bias.requires_grad_("bias" not in frozen)
    for options in ("mean", "none"):
        step = with_options(OPTIONS[options], torch.float32)
        expected = results(model, hidden, target, step)
        assert_equal_to_rounding(expected, results(model, hidden, target, step, chunked()), torch.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_of_no_row(smoothing: float) -> None:
    model, hidden, target = made()

    def step(model: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
        return flat(model(hidden), torch.full_like(target, -100), label_smoothing=smoothing)

    expected, got = results(model, hidden, target, step), results(model, hidden, target, step, chunked())
    assert got.pop("loss").isnan()
    assert expected.pop("loss").isnan()
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_gradients_of_float16_survive_a_scaler() -> None:
    """Gradients too small for float16 are scaled up before they are rounded, as in the plain step."""
    torch.manual_seed(0)
    model, rows = Model(vocabulary=4096).half(), 512
    hidden, target = (
        torch.randn(1, rows, WIDTH, dtype=torch.float16, requires_grad=True),
        torch.randint(4096, (1, rows)),
    )
    scale = 2.0**12

    def step(model: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
        return flat(model(hidden).float(), target) * scale

    expected = results(model, hidden, target, step)
    assert expected["input"].abs().max() > 0
    assert_equal_to_rounding(expected, results(model, hidden, target, step, chunked()), torch.float16)


NAMES = ["gpt", "gpt_sdpa", "lstm", "gpt2", "llama"]


@pytest.mark.parametrize("blocks", [rf.none(), rf.full(), rf.segments(2)], ids=["plain", "full", "segments"])
@pytest.mark.parametrize("name", NAMES)
def test_models_with_their_blocks_recomputed(name: str, blocks: Any) -> None:
    if name in ("gpt2", "llama"):
        pytest.importorskip("transformers")
    model, loss = models.build(name)
    proof = rf.verify(model, rf.Step(loss, accumulate=2), rf.chunked_head(chunks=3, blocks=blocks))
    assert proof.differences == ()
    assert proof.exactness == "rounding"
    assert proof.tolerance == TOLERANCES[torch.float32]
    assert proof.largest_difference is not None
    assert proof.largest_difference <= proof.tolerance
    assert proof.gradients == sum(p.requires_grad for p in model.parameters())


def test_random_models() -> None:
    """Sizes, layouts and options drawn at random."""
    draw = torch.Generator().manual_seed(1)

    def one_of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=draw))]

    for _ in range(40):
        width, vocabulary, time = one_of(1, 3, 16), one_of(2, 11, 64), one_of(1, 5, 33)
        dtype = one_of(torch.float32, torch.float64)
        model = Model(one_of(False, True), vocabulary, width).to(dtype)
        hidden = torch.randn(one_of(1, 3), time, width, dtype=dtype, generator=draw).requires_grad_()
        target = torch.randint(0, vocabulary, hidden.shape[:-1], generator=draw)
        options = {"reduction": one_of("mean", "sum", "none"), "label_smoothing": one_of(0.0, 0.3)}
        moved = one_of(False, True)

        def step(
            model: nn.Module, hidden: Tensor, target: Tensor, options: Any = options, moved: Any = moved
        ) -> Tensor:
            logits = model(hidden)
            return F.cross_entropy(logits.mT, target, **options) if moved else flat(logits, target, **options)

        expected = results(model, hidden, target, step)
        got = results(model, hidden, target, step, chunked(one_of(1, 2, 5, 40)))
        assert_equal_to_rounding(expected, got, dtype)


# Transformers
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["gpt2", "llama"])
def causal(request: Any) -> tuple[Any, Tensor]:
    pytest.importorskip("transformers")
    return models.build(request.param).model, torch.randint(3, models.VOCABULARY, (2, 24))


def test_the_loss_is_transformers_own(causal: tuple[Any, Tensor]) -> None:
    model, ids = causal
    for more in ({}, {"num_items_in_batch": torch.tensor(17)}):
        torch.manual_seed(0)
        expected = model(input_ids=ids, labels=ids, use_cache=False, **more).loss
        with rf.attached(model, rf.chunked_head(chunks=4)):
            torch.manual_seed(0)
            got = model(input_ids=ids, labels=ids, use_cache=False, **more)
        assert type(got.logits) is Logits, "the loss took them without making them"
        assert abs(got.loss.item() - expected.item()) < 1e-5


def test_logits_that_are_read_after_the_loss_are_the_logits(causal: tuple[Any, Tensor]) -> None:
    model, ids = causal
    torch.manual_seed(0)
    expected = model(input_ids=ids, labels=ids, use_cache=False).logits
    with rf.attached(model, rf.chunked_head(chunks=4)):
        torch.manual_seed(0)
        output = model(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        assert output.logits.shape == expected.shape
        assert output.logits.dtype == expected.dtype
        with pytest.warns(UserWarning, match="head 'lm_head' were used by argmax, so they were computed whole"):
            assert torch.equal(output.logits.argmax(-1), expected.argmax(-1))
        assert torch.equal(output.logits + 0, expected)  # and is warned of once


def test_a_call_without_labels_gives_usable_logits(causal: tuple[Any, Tensor]) -> None:
    model, ids = causal
    model.eval()
    expected = model(input_ids=ids, use_cache=False).logits
    with rf.attached(model, rf.chunked_head()):
        with torch.no_grad():
            plain = model(input_ids=ids, use_cache=False).logits
        assert type(plain) is Tensor
        assert torch.equal(plain, expected)
        with pytest.warns(UserWarning, match="computed whole"):
            (gradient,) = torch.autograd.grad(
                model(input_ids=ids, use_cache=False).logits.square().sum(), model.lm_head.weight
            )
    assert torch.equal(gradient, torch.autograd.grad(expected.square().sum(), model.lm_head.weight)[0])


def test_generation_is_plain(causal: tuple[Any, Tensor]) -> None:
    model, ids = causal
    model.eval()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with rf.attached(model, rf.chunked_head()):
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


# Other uses of the logits
# ---------------------------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    """A loss of somebody's own, of which torch's overrides see nothing."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits + 0)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0] * ctx.saved_tensors[0]


USES: dict[str, Step] = {
    "z-loss": lambda m, h, t: flat((z := m(h)), t) + z.logsumexp(-1).square().mean(),
    "z-loss first": lambda m, h, t: (z := m(h)).logsumexp(-1).square().mean() + flat(z, t),
    "log_softmax": lambda m, h, t: F.nll_loss(F.log_softmax(m(h), -1).flatten(0, 1), t.flatten()),
    "soft targets": lambda m, h, t: F.cross_entropy(m(h).flatten(0, 1), torch.softmax(h.detach() @ m.head.weight.detach().t(), -1).flatten(0, 1)),  # noqa: E501
    "a part of the vocabulary": lambda m, h, t: flat(m(h)[..., :20], t.clamp(max=19)),
    "sum": lambda m, h, t: m(h).sum(),
    "autograd function": lambda m, h, t: Square.apply(m(h)),  # pyright: ignore[reportReturnType]
    "backward through them": lambda m, h, t: (m(h) * torch.ones(VOCABULARY)).mean(),
    "into another": lambda m, h, t: torch.zeros(BATCH, TIME, VOCABULARY).copy_(m(h)).square().mean(),
    "list": lambda m, h, t: torch.stack([m(h), m(h)]).mean(),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_any_other_use_takes_the_whole_logits(use: str) -> None:
    model, hidden, target = made(bias=True)
    expected = results(model, hidden, target, USES[use])
    with pytest.warns(UserWarning, match=r"the logits of head 'head' were used by .*, so they were computed whole"):
        got = results(model, hidden, target, USES[use], chunked())
    assert_equal_to_rounding(expected, got, torch.float32)


def test_numbers_that_are_read() -> None:
    model, hidden, _ = made()
    expected = model(hidden).detach()
    rf.attach(model, chunked())
    with pytest.warns(UserWarning, match="used by tolist"):
        assert model(hidden).tolist() == expected.tolist()
    logits = model(hidden)
    assert (logits.detach().numpy() == expected.numpy()).all()
    assert repr(logits.detach()) == repr(expected)
    assert logits[0, 0, 0].item() == expected[0, 0, 0].item()
    assert torch.equal(copy.deepcopy(logits.detach()), expected)
    assert torch.equal(pickle.loads(pickle.dumps(logits.detach() + 0)), expected)
    assert (len(logits), logits.numel(), logits.dim()) == (BATCH, expected.numel(), 3)
    assert logits.requires_grad
    assert not logits.detach().requires_grad


def test_accuracy_without_gradients_beside_the_loss() -> None:
    model, hidden, target = made()
    expected = (model(hidden).argmax(-1) == target).float().mean()
    rf.attach(model, chunked())
    logits = model(hidden)
    flat(logits, target).backward()
    with torch.no_grad(), pytest.warns(UserWarning, match="used by argmax"):
        assert (logits.argmax(-1) == target).float().mean() == expected


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda logits: logits.mul_(2), "mul_"),
        (lambda logits: logits.__setitem__((0, 0), 1.0), "__setitem__"),
        (lambda logits: torch.add(logits, 1, out=logits), "add"),
        (lambda logits: F.relu(logits, inplace=True), "relu"),
        (lambda logits: F.dropout(logits, 0.1, True, True), "dropout"),
        (lambda logits: logits.register_hook(print), "register_hook"),
        (lambda logits: logits.retain_grad(), "retain_grad"),
        (lambda logits: torch.autograd.grad(logits.sum(), logits), "grad"),
        (lambda logits: setattr(logits, "data", torch.zeros(1)), "data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:the logits of head")
def test_what_cannot_be_seen_is_refused(act: Callable[[Tensor], object], name: str) -> None:
    model, hidden, _ = made()
    rf.attach(model, chunked())
    with pytest.raises(rf.HeadError, match=rf"head 'head' are computed in chunks, so {name} can't act on them"):
        act(model(hidden))


def test_an_operator_in_place_is_refused() -> None:
    model, hidden, _ = made()
    rf.attach(model, chunked())
    logits = model(hidden)
    with pytest.raises(rf.HeadError, match="can't act on them"):
        logits += 1


def test_logits_that_are_gone_are_refused() -> None:
    model, hidden, target = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rf.attach(model, chunked())
    logits = model(hidden)
    flat(logits, target).backward()
    optimizer.step()
    with pytest.raises(rf.MutationError, match="parameters of head 'head' were changed after its forward"):
        logits.argmax(-1)
    with pytest.raises(rf.MutationError, match="parameters of head 'head' were changed"):
        flat(logits, target)
    activations = torch.randn(BATCH, TIME, WIDTH)
    logits = model.head(activations)
    activations.zero_()
    with pytest.raises(rf.MutationError, match="input of head 'head' was changed in place"):
        flat(logits, target)


def test_a_weight_whose_memory_is_gone_is_refused() -> None:
    model, hidden, target = made()
    rf.attach(model, chunked())
    logits = model(hidden)
    model.head.weight.untyped_storage().resize_(0)  # as FSDP does after a module's forward
    with pytest.raises(rf.MutationError, match="parameters of head 'head' were freed after its forward"):
        flat(logits, target)


# Backward
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_through_a_graph_that_was_kept(reduction: str) -> None:
    model, hidden, target = made()

    def step(model: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
        loss = flat(model(hidden), target, reduction=reduction).sum()
        (3 * loss).backward(retain_graph=True)
        return loss

    expected = results(model, hidden, target, step)
    assert_equal_to_rounding(expected, results(model, hidden, target, step, chunked()), torch.float32)


def test_a_second_backward_through_a_graph_that_is_gone() -> None:
    model, hidden, target = made()
    rf.attach(model, chunked())
    loss = flat(model(hidden), target)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    model, hidden, target = made()
    rf.attach(model, chunked())
    loss = flat(model(hidden), target)
    with pytest.raises(rf.HeadError, match=r"loss of head 'head' .* can't be differentiated twice .* rf\.suspended"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    with rf.suspended(model):
        (first,) = torch.autograd.grad(flat(model(hidden), target), hidden, create_graph=True)
        first.square().sum().backward()


def test_gradients_accumulate() -> None:
    model, hidden, target = made()

    def step(model: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
        for part in range(BATCH):
            (flat(model(hidden[part : part + 1]), target[part : part + 1]) / BATCH).backward()
        return flat(model(hidden), target)

    expected = results(model, hidden, target, step)
    assert_equal_to_rounding(expected, results(model, hidden, target, step, chunked()), torch.float32)


def test_hooks_on_the_weight_see_its_gradient_once() -> None:
    model, hidden, target = made()
    rf.attach(model, chunked())
    seen: list[Tensor] = []
    model.head.weight.register_hook(seen.append)
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))  # pyright: ignore[reportArgumentType]
    flat(model(hidden), target).backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


def test_under_data_parallelism(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, hidden, target = made()
        step: Step = lambda m, h, t: flat(m(h), t)  # noqa: E731
        expected = results(model, hidden, target, step)
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            rf.attach(model, chunked())
            parallel = nn.parallel.DistributedDataParallel(model, **options)
            # Otherwise DDP passes the outputs through a function of its own, which a loss in chunks mustn't go past.
            with pytest.warns(UserWarning, match="computed whole") if options else nullcontext():
                got = {k.removeprefix("module."): v for k, v in results(parallel, hidden, target, step).items()}
            assert_equal_to_rounding(expected, got, torch.float32)
    finally:
        torch.distributed.destroy_process_group()


def test_inside_a_checkpoint_of_torch() -> None:
    def step(model: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
        loss = torch.utils.checkpoint.checkpoint(lambda h: flat(model(h), target), hidden, use_reentrant=False)
        assert isinstance(loss, Tensor)
        return loss

    compared(step)


def test_transforms_run_the_head_plainly() -> None:
    model, hidden, target = made()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return flat(torch.func.functional_call(model, weights, (hidden.detach(),)), target)

    expected = torch.func.grad(loss)(weights)
    with rf.attached(model, chunked()):
        got = torch.func.grad(loss)(weights)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_compiled_head_is_refused(order: str) -> None:
    model, hidden, _ = made()
    if order == "before":
        model.compile(backend="aot_eager")
        with pytest.raises(rf.AttachError, match="the head 'head' is compiled, and a loss in chunks can't be"):
            rf.attach(model, chunked())
        return
    rf.attach(model, chunked())
    with pytest.raises(Exception, match="the head 'head' is compiled, and a loss in chunks can't be"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(hidden)


# On and off
# ---------------------------------------------------------------------------------------------------------


def test_it_leaves_no_trace() -> None:
    model, _, _ = made()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    keys = [*model.state_dict()]
    plan = rf.attach(model, chunked())
    assert plan.head == rf.Head(path="head", chunks=5, module_type="Linear")
    assert plan.exactness == "rounding"
    assert [*model.state_dict()] == keys
    assert isinstance(model.head, nn.Linear)
    rf.detach(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_their_own_head(copied: Callable[[Model], Model]) -> None:
    model, hidden, target = made()
    rf.attach(model, chunked())
    other = copied(model)
    with torch.no_grad():
        other.head.weight.zero_()
    assert flat(other(hidden), target).item() == pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), rel=1e-5)
    assert type(other(hidden)) is Logits
    rf.detach(other)
    assert type(other(hidden)) is Tensor
    assert type(model(hidden)) is Logits


def test_suspended_and_training_only() -> None:
    model, hidden, _ = made()
    rf.attach(model, rf.chunked_head(head="head", blocks=rf.none()))
    assert type(model(hidden)) is Logits
    with rf.suspended(model):
        assert type(model(hidden)) is Tensor
    with torch.no_grad():
        assert type(model(hidden)) is Tensor
    with torch.inference_mode():
        assert type(model(hidden.detach())) is Tensor
    model.requires_grad_(False)
    assert type(model(hidden.detach())) is Tensor, "nothing wants a gradient"


def test_training_only_follows_the_blocks() -> None:
    model, _ = models.build("gpt")
    ids = torch.zeros(1, 4, dtype=torch.long)
    rf.attach(model, rf.chunked_head(blocks=rf.full(when="training")))
    assert type(model(ids)) is Logits
    assert type(model.eval()(ids)) is Tensor


def test_a_foreign_forward_is_refused() -> None:
    model, _, _ = made()
    model.head.forward = lambda x: x
    with pytest.raises(rf.AttachError, match="'head' has a forward of its own"):
        rf.attach(model, chunked())


# Bytes
# ---------------------------------------------------------------------------------------------------------


def peak_bytes(weight_gradient: bool, what: Any) -> int:
    """Of the head of the benchmark, forward and backward, without parameters and input: vocabulary 32,000, width 512,
    2,048 tokens. Run dry: `test_dry_runs_of_the_head_are_right` has the measurement beside it."""
    model = Model(vocabulary=32_000, width=512)
    model.head.requires_grad_(weight_gradient)
    hidden, target = torch.randn(1, 2048, 512, requires_grad=True), torch.randint(0, 32_000, (1, 2048))
    with rf.attached(model, what):
        run = dry_run(model, rf.Step(lambda: flat(model(hidden), target)), ())
    return run.peak_bytes - run.static_bytes


@pytest.mark.parametrize(("weight_gradient", "least"), [(True, 5.0), (False, 8.0)])
def test_the_peak_of_the_head_falls(weight_gradient: bool, least: float) -> None:
    assert peak_bytes(weight_gradient, rf.none()) >= least * peak_bytes(weight_gradient, chunked(16))


@pytest.mark.parametrize("options", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["norm and head", "tied"])
def test_dry_runs_of_the_head_are_right(name: str, dtype: torch.dtype, options: str) -> None:
    torch.manual_seed(0)
    if name == "tied":
        model, _ = models.gpt(layers=2, width=32, vocabulary=2000, sdpa=True, dropout=0.0)
        given, width = torch.randint(0, 2000, (2, 64)), 2000
    else:
        model, given, width = Model(vocabulary=2000, width=32), torch.randn(2, 64, 32), 2000
    model = model.to(dtype)
    given = given.to(dtype) if given.is_floating_point() else given
    target = torch.randint(0, width, (2, 64))
    like = next(model.parameters())
    step = rf.Step(lambda: flat(model(given).type_as(like), target, **OPTIONS[options]).mean())
    for what in (rf.chunked_head(chunks=4), rf.chunked_head(chunks=13)):
        with rf.attached(model, what):
            dry = dry_run(model, step, ()).peak_bytes
            assert dry == pytest.approx(rf.measure(model, step, repeats=1).peak_bytes, rel=0.02)
        with rf.attached(model, rf.none()):
            assert dry < dry_run(model, step, ()).peak_bytes


def test_whole_logits_are_never_there() -> None:
    """No storage as large as the logits is made, whichever way the loss is taken."""
    model, hidden, target = made()
    size = BATCH * TIME * VOCABULARY * 4
    rf.attach(model, chunked(6))
    for layout, step in LAYOUTS.items():
        largest = 0

        def note(event: Any) -> None:
            nonlocal largest
            largest = max(largest, event.after_bytes - event.before_bytes)

        with StorageTracker(on_op=note):
            step(model, hidden, target).sum().backward()
        assert largest < size, layout
