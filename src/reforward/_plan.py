"""Plan: an ordered forest of regions for one model. Plain data, JSON on disk; what runs it is in `_runtime`.

A node is either a `Region` (one call of one module, under a policy) or a `Run` (consecutive nodes treated as one unit
of recomputation). A run keeps only its first input. When backward reaches it, its members are run again from that
input, and then each member behaves as its own policy says: members that save make a plain segment, members that
recompute nest. Modules that the plan doesn't name save everything.
"""

from __future__ import annotations

import hashlib
import os
import reprlib
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from reforward._errors import InputError, PlanError
from reforward._policy import Data, Policy

FORMAT = 1

# A replay runs inside that of the run around it, some Python frames deeper; a hundred runs leave room below the limit.
_MAX_DEPTH = 100

Exactness = Literal["bitwise", "rounding"]
When = Literal["grad", "training"]


class Region(Data, frozen=True, kw_only=True, tag="region", tag_field="is"):
    """One call of one module.

    Attributes:
        path: canonical module path (`_patterns.canonical`).
        policy: what happens to the values it leaves for backward.
        module_type: class name of the module the plan was made for, checked on attach; None: any.
    """

    path: str
    policy: Policy
    module_type: str | None = None


class Run(Data, frozen=True, kw_only=True, tag="run", tag_field="is"):
    """Consecutive calls recomputed as one unit; each member receives the output of the one before.

    Attributes:
        members: at least one node, in the order of the calls.
    """

    members: tuple[Node, ...]

    def __post_init__(self):
        super().__post_init__()
        if not self.members:
            raise PlanError("a run needs at least one member")
        if _depth(self) > _MAX_DEPTH:
            raise PlanError(f"runs lie more than {_MAX_DEPTH} deep in one another; nest them less")
        paths = [leaf.path for leaf in leaves(self)]
        if twice := _repeated(paths):
            raise PlanError(f"block {twice!r} stands twice in a run; name it once")
        known = {*paths}
        for path in paths:
            for outer in known.intersection(_parents(path)):
                raise PlanError(f"{path!r} lies inside {outer!r}, so it can't be another member of its run; drop one")


Node = Region | Run


class Head(Data, frozen=True, kw_only=True):
    """A loss head in chunks: projection and cross-entropy, so many parts of the rows one after another.

    Attributes:
        path: canonical path of the projection, an `nn.Linear`.
        chunks: in how many parts the rows (tokens) are taken, at least 1.
        module_type: class name of the module the plan was made for, checked on attach; None: any.
    """

    path: str
    chunks: int
    module_type: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.chunks < 1:
            raise PlanError(f"head {self.path!r}: chunks must be at least 1, not {self.chunks}")


def leaves(node: Node) -> Iterator[Region]:
    """The regions of a node, in the order of their calls."""
    if isinstance(node, Region):
        yield node
    else:
        for member in node.members:
            yield from leaves(member)


def _depth(node: Node) -> int:
    return 0 if isinstance(node, Region) else 1 + max(map(_depth, node.members))


def _repeated(paths: Iterable[str]) -> str | None:
    """The first path that occurs a second time."""
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            return path
        seen.add(path)
    return None


def _parents(path: str) -> Iterator[str]:
    """Paths of the modules around one, the nearest first."""
    while path:
        path = path.rpartition(".")[0]
        yield path


class Plan(Data, frozen=True, kw_only=True):
    """An ordered forest of regions for one model, and what is predicted of it.

    Attributes:
        nodes: top-level regions and runs, in the order of their calls.
        head: the loss head, if it is done in chunks.
        model_type: class name of the model the plan was made for.
        when: "grad": blocks act whenever gradients are wanted; "training": only while the block is in training mode.
        exactness: "bitwise": loss, gradients, buffers and random streams as in the plain step; "rounding": loss and
            gradients are equal to rounding, the others as in the plain step. It follows from the head and needn't be
            given: in chunks, sums over rows have another order.
        budget_bytes: the budget that the plan was made for, if any.
        predicted_peak_bytes: predicted peak of the whole step on the device, if it was profiled.
        predicted_seconds: predicted duration of the step, if it was profiled.
        predicted_plain_peak_bytes, predicted_plain_seconds: the same of the step without checkpointing.
    """

    nodes: tuple[Node, ...]
    head: Head | None = None
    model_type: str | None = None
    when: When = "grad"
    exactness: Exactness = "bitwise"
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    predicted_plain_peak_bytes: int | None = None
    predicted_plain_seconds: float | None = None
    format: int = FORMAT

    def __post_init__(self):
        super().__post_init__()
        if twice := _repeated(region.path for region in self.regions()):
            raise PlanError(f"block {twice!r} stands in two nodes of the plan; name it once")
        if self.head is not None:
            msgspec.structs.force_setattr(self, "exactness", "rounding")
            self._check_head(self.head.path)
        elif self.exactness != "bitwise":
            raise PlanError("only a plan with a chunked head is equal to rounding; leave exactness out")

    def _check_head(self, path: str) -> None:
        for region in self.regions():
            if path == region.path or path in _parents(region.path) or region.path in _parents(path):
                raise PlanError(
                    f"the head {path!r} and the block {region.path!r} lie in one another, so the head can't be computed"
                    " in chunks; drop one of them"
                )

    def regions(self) -> list[Region]:
        """Every region of the plan, in the order of the calls."""
        return [leaf for node in self.nodes for leaf in leaves(node)]

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON text; also written to `path` if one is given.

        Raises:
            InputError: the file can't be written.
        """
        text = msgspec.json.format(_ENCODER.encode(self), indent=2).decode()
        if path is not None:
            _check_path(path, "a plan is written to a file, not to")
            try:
                Path(path).write_text(text + "\n", encoding="utf-8")
            except (OSError, ValueError) as error:
                raise InputError(
                    f"can't write the plan to {str(path)!r}: {_reason(error)}; give another path"
                ) from error
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """Reads a plan from JSON text or from a file.

        Raises:
            PlanError: the file can't be read, or isn't a plan that this version understands.
        """
        _check_path(source, "a plan is read from JSON text or from a file, not from")
        text = str(source)
        try:
            if isinstance(source, Path) or not text.lstrip().startswith("{"):
                text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise PlanError(f"can't read a plan from {_shorten(str(source))}: {_reason(error)}") from error
        try:
            plan = _DECODER.decode(text)
        except (msgspec.MsgspecError, ValueError) as error:
            raise PlanError(f"{_shorten(str(source))} isn't a plan: {_reason(error)}") from error
        except RecursionError:
            raise PlanError(f"{_shorten(str(source))} isn't a plan: it is nested too deep to be read") from None
        if plan.format != FORMAT:
            raise PlanError(f"the plan has format {plan.format}; this version reads format {FORMAT}: make it again")
        return plan

    def digest(self) -> str:
        """A short hash of the nodes, the head and `when`: equal for plans that run the same."""
        what = [self.nodes, self.when, *([self.head] if self.head else [])]
        return hashlib.sha256(_ENCODER.encode(what)).hexdigest()[:16]


def _check_path(path: object, what: str) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise PlanError(f"{what} {reprlib.repr(path)}")


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else str(error)
    return textwrap.shorten(text or type(error).__name__, 300, placeholder=" ...")


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:197] + "...")


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Plan)
