"""Shows that the tests catch deliberate faults: each patch in this directory puts one into a copy of the package.

Usage: python tests/faults/check.py [NAME ...]     names of patches, without `.patch`; all by default

For each fault the tests of the runtime run on the patched copy until the first failure. A fault that none of them
notices, or a patch that doesn't apply any more, makes the exit code 1. A patch begins with a sentence that says what it
breaks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = ("tests/runtime", "tests/test_patterns.py", "tests/test_techniques.py")
# Of the compiler and of the loss head, where none of the faults is; they take long.
ELSEWHERE = ("tests/runtime/test_compile.py", "tests/runtime/test_head.py")
LIMIT_SECONDS = 600


def main(names: list[str]) -> int:
    patches = [HERE / f"{name}.patch" for name in names] or sorted(HERE.glob("*.patch"))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        verdicts = list(pool.map(check, patches))
    for patch, (caught, verdict) in zip(patches, verdicts, strict=True):
        print(f"{'caught' if caught else 'MISSED'}  {patch.stem}: {verdict}")
    missed = sum(not caught for caught, _ in verdicts)
    print(f"{len(patches) - missed} of {len(patches)} faults caught")
    return 1 if missed else 0


def check(patch: Path) -> tuple[bool, str]:
    """Whether a test fails with the fault in place, and which."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests", "pyproject.toml"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        applied = subprocess.run(["git", "apply", str(patch)], cwd=copy, capture_output=True, text=True)
        if applied.returncode:
            return False, f"the patch doesn't apply: {applied.stderr.strip()}"
        return run_tests(copy)


def run_tests(copy: Path) -> tuple[bool, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        *[f"--ignore={path}" for path in ELSEWHERE],
        *TESTS,
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    try:
        ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return True, "the tests don't end"
    failures = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    # 1: a test failed. Anything else but success (no tests, a usage error) would mean that nothing was tried.
    if ran.returncode == 1 and failures:
        return True, failures[0].partition(" ")[2][:100]
    return False, f"pytest ended with {ran.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
