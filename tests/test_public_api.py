"""The public names, listed a second time on purpose: a name that comes or goes does so knowingly."""

import ast
from pathlib import Path

import pytest

import reforward

PUBLIC = [
    "Allow",
    "AttachError",
    "Block",
    "BudgetError",
    "Device",
    "DryRunError",
    "FitReport",
    "Frontier",
    "Head",
    "HeadError",
    "InputError",
    "Measurement",
    "Modules",
    "MutationError",
    "Ops",
    "PatternError",
    "Plan",
    "PlanError",
    "Profile",
    "Proof",
    "Recompute",
    "ReforwardError",
    "Region",
    "ReplayError",
    "ReplayMismatchError",
    "Run",
    "Save",
    "Step",
    "StepError",
    "attach",
    "attached",
    "checkpoint",
    "chunked_head",
    "detach",
    "every",
    "explain",
    "find_blocks",
    "fit",
    "fit_report",
    "frontier",
    "full",
    "is_replaying",
    "measure",
    "none",
    "profile",
    "segments",
    "selective",
    "solve",
    "suspended",
    "verify",
]


def test_the_public_names_are_these():
    assert reforward.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads(name):
    value = getattr(reforward, name)
    assert value.__name__ == name
    assert value.__doc__, f"{name} has no docstring"


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(reforward.__file__).read_text())
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(alias.asname for alias in aliases if alias.asname) == PUBLIC


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = reforward.nothing
    assert set(PUBLIC) <= set(dir(reforward))
