"""The tracker against the allocator, on real tensors and on fake ones."""

from __future__ import annotations

import gc
import weakref
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models import OWN, Case, build, gpt
from reforward import Step
from reforward._measure.trace import Trace, record
from reforward._measure.tracker import OpEvent, StorageTracker, Tag
from reforward._measure.workspace import OpKey, OutputSizes, Workspaces

FLOAT = 4
CPU = torch.device("cpu")
CASES = {**OWN, "gpt_sdpa_flash": lambda: gpt(sdpa=True, dropout=0.0)}


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def case_of(name: str) -> Case:
    case = CASES[name]()
    case.model.train()
    Step(case.loss).run()  # what is made once and kept
    clear(case.model)
    return case


def recorded(case: Case) -> Trace:
    trace = record(Step(case.loss).run, device=CPU, shapes=True)
    clear(case.model)
    return trace


def tracked(case: Case, tracker: StorageTracker) -> StorageTracker:
    tracker.ignore([*case.model.parameters(), *case.model.buffers()])
    with tracker:
        Step(case.loss).run(phase=tracker.in_phase)
    clear(case.model)
    return tracker


def allocator_peak(trace: Trace) -> int:
    return max(accumulate(event.bytes for event in trace.memory))


@pytest.mark.parametrize("name", sorted(CASES))
def test_tracker_with_workspaces_agrees_with_the_allocator(name: str) -> None:
    case = case_of(name)
    trace = recorded(case)
    tracker = tracked(case, StorageTracker(workspace=Workspaces.from_trace(trace).lookup))
    assert tracker.peak_bytes == pytest.approx(allocator_peak(trace), rel=0.001)
    assert tracker.live_bytes == 0


@pytest.mark.parametrize("name", ["resnet", "lstm", "unet"])
def test_without_workspaces_it_misses_what_kernels_need(name: str) -> None:
    case = case_of(name)
    trace = recorded(case)
    assert tracked(case, StorageTracker()).peak_bytes < 0.99 * allocator_peak(trace)


def test_workspace_of_a_convolution_by_its_own_trace() -> None:
    """The table holds the highest bytes inside the op beyond what is live before and after, nothing else."""
    net, x = nn.Conv2d(16, 16, 3, padding=1, bias=False), torch.randn(2, 16, 20, 20)
    with torch.no_grad():
        net(x)
        trace = record(lambda: net(x), device=CPU, shapes=True)
    inside = max(accumulate(event.bytes for event in trace.memory))
    table = Workspaces.from_trace(trace)
    aten = torch.ops.aten
    found = table.lookup(aten.convolution.default, (x, net.weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
    assert found == inside - x.numel() * FLOAT
    assert table.lookup(aten.convolution.default, (x[:1], net.weight)) == 0
    assert table.lookup(aten.convolution.default, (x.double(), net.weight.double())) == 0


def test_merged_keeps_the_larger() -> None:
    small, large = OpKey("aten::mm", ()), OpKey("aten::bmm", ())
    merged = Workspaces({small: 1, large: 9}).merged(Workspaces({small: 5}), Workspaces({large: 2}))
    assert merged.bytes_by_op == {small: 5, large: 9}


@pytest.mark.parametrize("name", sorted(OWN))
def test_fake_tensors_give_the_same_peak(name: str) -> None:
    case = case_of(name)
    real = tracked(case, StorageTracker())
    with OutputSizes() as sizes:
        Step(case.loss).run()
    with FakeTensorMode(allow_non_fake_inputs=True):
        case = build(name)
        fake = StorageTracker(output_bytes=sizes.lookup)
        fake.ignore([*case.model.parameters(), *case.model.buffers()])
        with fake:
            Step(case.loss).run(phase=fake.in_phase)
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.002)


def test_frees_are_seen_when_they_happen() -> None:
    with StorageTracker() as tracker:
        a = torch.ones(100)
        b = a * 2
        assert tracker.live_bytes == 2 * 100 * FLOAT
        view = a.view(10, 10)
        del a
        assert tracker.live_bytes == 2 * 100 * FLOAT  # the view holds the storage
        del view
        assert tracker.live_bytes == 100 * FLOAT
    del b
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 2 * 100 * FLOAT


def test_frees_by_autograd_are_seen_within_backward() -> None:
    w, seen = torch.randn(8, 8, requires_grad=True), []
    with StorageTracker(on_op=lambda event: seen.append(event.after_bytes)) as tracker:
        x = w
        for _ in range(6):
            x = x.sin()
        loss = x.sum()
        del x
        held, begin = tracker.live_bytes, len(seen)
        loss.backward()
    # Each sine keeps its input: five of our making. They go one by one, so never are all there with their gradients.
    assert held == 5 * 64 * FLOAT + FLOAT
    assert max(seen[begin:]) <= held + 3 * 64 * FLOAT
    del loss
    assert tracker.live_bytes == 64 * FLOAT  # w.grad


def test_existing_tensors_and_their_views_never_count() -> None:
    announced, met = torch.ones(100), torch.ones(100)
    tracker = StorageTracker()
    tracker.ignore([announced])
    with tracker:
        views = [announced.view(10, 10), met.t(), met.detach(), announced.add_(1)]
        assert tracker.live_bytes == 0
        tracker.ignore([announced, views[1]])
        late = torch.ones(10)
        tracker.ignore([late])
        assert tracker.live_bytes == 0


def test_constants_made_from_python_values_count() -> None:
    with StorageTracker() as tracker:
        constant = torch.tensor([1.0, 2.0, 3.0])
    assert tracker.live_bytes == constant.numel() * FLOAT


def test_resizing_is_followed() -> None:
    with StorageTracker() as tracker:
        x = torch.ones(10)
        x.resize_(100)
        assert tracker.live_bytes == 100 * FLOAT
        x.untyped_storage().resize_(200 * FLOAT)
        total = x.sum()
        assert tracker.live_bytes == 201 * FLOAT
        del total
        x.untyped_storage().resize_(0)  # as FSDP frees a parameter; seen at the next use
        x.detach()
        assert tracker.live_bytes == 0


def test_tags_sum_to_the_live_bytes_and_follow_retag() -> None:
    with StorageTracker() as tracker:
        with tracker.in_phase("forward"):
            tracker.label = "layers.0"
            a = torch.ones(10)
            tracker.label = "layers.0.mlp"
            b = torch.ones(20)
            tracker.label = ""
        with tracker.in_phase("backward"):
            c = torch.ones(30)
        here = torch.ones(40)
    assert tracker.live_by_tag == {
        Tag("forward", "layers.0"): a.numel() * FLOAT,
        Tag("forward", "layers.0.mlp"): b.numel() * FLOAT,
        Tag("backward", ""): c.numel() * FLOAT,
        Tag("", ""): here.numel() * FLOAT,
    }
    assert tracker.peak_by_tag == tracker.live_by_tag
    tracker.retag(c, Tag("forward", "layers.0"))
    assert tracker.live_by_tag[Tag("forward", "layers.0")] == 40 * FLOAT
    assert sum(tracker.live_by_tag.values()) == tracker.live_bytes == 100 * FLOAT


def test_marks_give_the_peak_since_the_one_before() -> None:
    with StorageTracker(workspace=lambda func, args, outputs: 1000 if "mm" in func.name() else 0) as tracker:
        x = torch.ones(10, 10)
        tracker.mark("begin")
        y = x @ x
        del y
        middle = tracker.mark("after product")
        end = tracker.mark("end")
    assert (middle.live_bytes, middle.peak_bytes) == (400, 800 + 1000)
    assert (end.live_bytes, end.peak_bytes) == (400, 400)
    assert [mark.name for mark in tracker.marks] == ["begin", "after product", "end"]
    assert (tracker.peak_bytes, tracker.peak_workspace_bytes) == (1800, 1000)


def test_on_op_tells_shapes_and_bytes() -> None:
    events: list[OpEvent] = []
    x = torch.ones(2, 3)
    with StorageTracker(on_op=events.append) as tracker, tracker.in_phase("forward"):
        y = F.linear(x, torch.ones(4, 3))
    last = events[-1]
    assert last.op.name() in ("aten::mm", "aten::linear")
    assert last.tag == Tag("forward", "")
    assert last.shapes[0] == (2, 3)
    assert last.after_bytes - last.before_bytes == y.numel() * FLOAT


def test_other_devices_are_left_out() -> None:
    with StorageTracker(device="cpu") as tracker:
        here = torch.ones(10)
        there = torch.ones(1000, device="meta")
        assert tracker.live_bytes == here.numel() * FLOAT
        assert there.view(10, 100).shape == (10, 100)
    assert tracker.live_bytes == here.numel() * FLOAT


def test_sparse_tensors_count_their_parts() -> None:
    with StorageTracker() as tracker:
        x = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (5,), check_invariants=True)
        y = x * 2.0
    assert y.shape == (5,)
    assert tracker.live_bytes >= 2 * FLOAT


def test_tracker_dies_while_its_storages_live() -> None:
    with StorageTracker() as tracker:
        x = torch.ones(10)
    gone = weakref.ref(tracker)
    del tracker
    gc.collect()
    assert gone() is None
    del x
