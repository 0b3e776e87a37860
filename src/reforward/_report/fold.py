"""Folds what repeats into one row: consecutive blocks of a stack that the plan treats alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from reforward._plan import Node, Plan, Region, leaves
from reforward._policy import Modules, Policy, Save, Selector


@dataclass(frozen=True, kw_only=True)
class Row:
    """Consecutive blocks that are treated alike.

    Attributes:
        first, last: paths of the first and the last block.
        blocks: how many there are.
        treatment: what the plan does with them, in words.
    """

    first: str
    last: str
    blocks: int
    treatment: str

    @property
    def label(self) -> str:
        return span(self.first, self.last)


def span(first: str, last: str) -> str:
    """`h.0 – h.7`, or `h.0` if that is all."""
    return first if first == last else f"{first} – {last}"


def plan_rows(plan: Plan, blocks: Sequence[str] = ()) -> list[Row]:
    """The plan in as few rows as it takes, in the order of the calls.

    Args:
        plan: what to show.
        blocks: paths of all blocks of the model, so that those which the plan doesn't name are shown as saved.
    """
    rows: list[Row] = []
    for (_, treatment), group in groupby(_nodes(plan, blocks), key=lambda node: (_stack(node), describe(node))):
        nodes = list(group)
        paths = [leaf.path for node in nodes for leaf in leaves(node)]
        times = f"{len(nodes)} × " if len(nodes) > 1 and not isinstance(nodes[0], Region) else ""
        rows.append(Row(first=paths[0], last=paths[-1], blocks=len(paths), treatment=times + treatment))
    return rows


def describe(node: Node) -> str:
    """What happens to a node: `save`, `recompute · save attention`, `run of 4`, `run of 4 (2 × run of 2)`."""
    if isinstance(node, Region):
        return describe_policy(node.policy)
    text = f"run of {sum(1 for _ in leaves(node))}"
    members = [(len(list(group)), what) for what, group in groupby(describe(member) for member in node.members)]
    if all(what == "save" for _, what in members):
        return text
    return f"{text} ({', '.join(f'{count} × {what}' for count, what in members)})"


def describe_policy(policy: Policy) -> str:
    """`save`, `recompute`, or `recompute · save ` and what is kept."""
    if isinstance(policy, Save):
        return "save"
    kept = ", ".join(_describe_selector(selector) for selector in policy.save)
    return f"recompute · save {kept}" if kept else "recompute"


def stack_totals(bytes_of: Mapping[str, int]) -> list[tuple[Row, int]]:
    """`{block path: bytes}` summed over each stack of blocks, in the order given."""
    totals: list[tuple[Row, int]] = []
    for _, group in groupby(bytes_of, key=_parent):
        paths = list(group)
        row = Row(first=paths[0], last=paths[-1], blocks=len(paths), treatment="")
        totals.append((row, sum(bytes_of[path] for path in paths)))
    return totals


def _nodes(plan: Plan, blocks: Iterable[str]) -> list[Node]:
    """The plan's nodes, with a saving region for every block that it leaves alone, in the order of the blocks."""
    node_of = {leaf.path: node for node in plan.nodes for leaf in leaves(node)}
    ordered: list[Node] = [node_of.get(path) or Region(path=path, policy=Save()) for path in blocks]
    once = {id(node): node for node in [*ordered, *plan.nodes]}
    return list(once.values())


def _stack(node: Node) -> str:
    return _parent(next(leaves(node)).path)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _describe_selector(selector: Selector) -> str:
    if isinstance(selector, Modules):
        return selector.pattern
    family = selector.family if selector.nth is None else f"{selector.family} {selector.nth}"
    return family if selector.within is None else f"{family} in {selector.within}"
