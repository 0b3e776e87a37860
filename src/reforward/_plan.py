"""Plan: an ordered forest of regions for one model. Plain data, JSON on disk; what runs it is in `_runtime`.

A node is either a `Region` (one call of one module, under a policy) or a `Run` (consecutive nodes treated as one unit
of recomputation). A run keeps only its first input. When backward reaches it, its members are run again from that
input, and then each member behaves as its own policy says: members that save make a plain segment, members that
recompute nest. Modules that the plan doesn't name save everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from reforward._errors import InputError, PlanError
from reforward._policy import Policy

FORMAT = 1

Exactness = Literal["bitwise", "rounding"]
When = Literal["grad", "training"]


class _Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Region(_Node, frozen=True, kw_only=True, tag="region", tag_field="is"):
    """One call of one module.

    Attributes:
        path: canonical module path (`_patterns.canonical`).
        policy: what happens to the values it leaves for backward.
        module_type: class name of the module the plan was made for, checked on attach; None: any.
    """

    path: str
    policy: Policy
    module_type: str | None = None


class Run(_Node, frozen=True, kw_only=True, tag="run", tag_field="is"):
    """Consecutive calls recomputed as one unit; each member receives the output of the one before.

    Attributes:
        members: at least one node, in the order of the calls.
    """

    members: tuple[Node, ...]

    def __post_init__(self):
        if not self.members:
            raise PlanError("a run needs at least one member")


Node = Region | Run


def leaves(node: Node) -> Iterator[Region]:
    """The regions of a node, in the order of their calls."""
    if isinstance(node, Region):
        yield node
    else:
        for member in node.members:
            yield from leaves(member)


class Plan(_Node, frozen=True, kw_only=True):
    """An ordered forest of regions for one model, and what is predicted of it.

    Attributes:
        nodes: top-level regions and runs, in the order of their calls.
        model_type: class name of the model the plan was made for.
        when: "grad": blocks act whenever gradients are wanted; "training": only while the block is in training mode.
        exactness: "bitwise": loss, gradients, buffers and random streams as in the plain step; "rounding": equal to
            rounding.
        budget_bytes: the budget that the plan was made for, if any.
        predicted_peak_bytes: predicted peak of the whole step on the device, if it was profiled.
        predicted_seconds: predicted duration of the step, if it was profiled.
        predicted_plain_peak_bytes, predicted_plain_seconds: the same of the step without checkpointing.
    """

    nodes: tuple[Node, ...]
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
        seen: set[str] = set()
        for node in self.nodes:
            paths = {leaf.path for leaf in leaves(node)}
            if twice := sorted(paths & seen):
                raise PlanError(f"block {twice[0]!r} stands in two nodes of the plan; name it once")
            seen |= paths

    def regions(self) -> list[Region]:
        """Every region of the plan, in the order of the calls."""
        return [leaf for node in self.nodes for leaf in leaves(node)]

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON text; also written to `path` if one is given."""
        text = msgspec.json.format(_ENCODER.encode(self), indent=2).decode()
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """Reads a plan from JSON text or from a file.

        Raises:
            PlanError: the file can't be read, or isn't a plan that this version understands.
        """
        text = str(source)
        if isinstance(source, Path) or not text.lstrip().startswith("{"):
            try:
                text = Path(source).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise PlanError(f"can't read a plan from {str(source)!r}: {error}") from error
        try:
            plan = _DECODER.decode(text.encode())
        except (msgspec.MsgspecError, InputError) as error:
            raise PlanError(f"{_shorten(str(source))} isn't a plan: {error}") from error
        if plan.format != FORMAT:
            raise PlanError(f"the plan has format {plan.format}; this version reads format {FORMAT}: make it again")
        return plan

    def digest(self) -> str:
        """A short hash of the nodes and `when`: equal for plans that run the same."""
        return hashlib.sha256(_ENCODER.encode([self.nodes, self.when])).hexdigest()[:16]


def _shorten(text: str) -> str:
    return repr(text if len(text) < 60 else text[:57] + "...")


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Plan)
