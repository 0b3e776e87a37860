"""Imports point only up the layout, and what has to be quick doesn't load what is slow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import reforward

ROOT = Path(reforward.__file__).parent
LAYOUT = [
    "_errors",
    "_units",
    "_patterns",
    "_policy",
    "_plan",
    "_torch",
    "_step",
    "_profile_type",
    "_options",
    "_solve",
    "_blocks",
    "_heads",
    "_techniques",
    "_runtime",
    "_measure",
    "_profile",
    "_verify",
    "_frontier",
    "_fit",
    "_train",
    "_default",
    "_load",
    "_report",
    "_cli",
]


def own_imports(file: Path) -> set[str]:
    """The modules of the package's top level that a file imports, wherever in the file."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 0 for node in nodes), f"{file} has a relative import"
    return {name.split(".")[1] for node in nodes if (name := node.module or "").startswith("reforward.")}


@pytest.mark.parametrize("name", sorted({path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")}))
def test_imports_point_only_up_the_layout(name):
    if name == "__init__.py":
        return  # the list of public names, which imports nothing until it is asked
    module = name.removesuffix(".py")
    files = [ROOT / name] if name.endswith(".py") else list((ROOT / name).rglob("*.py"))
    above = {*LAYOUT[: LAYOUT.index(module) + 1]}
    for file in files:
        assert own_imports(file) <= above, f"{file} imports from below it in the layout"


@pytest.mark.parametrize(
    "code",
    [
        "import reforward",
        "import reforward; reforward.Plan, reforward.Recompute, reforward.InputError",
        "from reforward._cli import main; main(['--help'])",
        "from reforward._cli import main; main(['fit', '--help'])",
        "import reforward._report.tables, reforward._report.files, reforward._report.screen",
    ],
)
def test_quick_things_load_nothing_slow(code):
    slow = "{'torch', 'highspy', 'matplotlib', 'transformers', 'numpy'}"
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nimport sys\nloaded = {slow} & {{*sys.modules}}\nsys.exit(str(loaded) if loaded else 0)",
        ],
        check=True,
        capture_output=True,
    )
