"""Names of modules and the patterns that select them. Text only: no torch.

A pattern is a glob over the whole module path (`*` also crosses dots) in which `[a:b]` stands for
a range of indices, as in a Python slice: `layers[0:12]`, `encoder.layer[2:]`, `*.mlp`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from reforward._errors import PatternError

T = TypeVar("T")

# Put in front of, or between, module names by DDP/DataParallel, torch.compile, FSDP and checkpoint wrappers, PEFT.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PEFT_PREFIX = "base_model.model."
#: Where PEFT keeps the model that it wraps.
PEFT_MODEL = _PEFT_PREFIX.rstrip(".")
_RANGE = re.compile(r"\[(-?\d*):(-?\d*)\]")


def canonical(path: str) -> str:
    """The module path without the prefixes that wrappers add, so that one plan file serves all."""
    kept = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
    return kept.removeprefix(_PEFT_PREFIX)


def is_within(path: str, outer: str) -> bool:
    """Whether `path` names the module `outer` or one inside it; the path of the model itself is empty."""
    return path == outer or not outer or path.startswith(f"{outer}.")


def is_inside(path: str, outer: str) -> bool:
    """Whether `path` names a module inside `outer`, and not `outer` itself."""
    return path != outer and is_within(path, outer)


def select(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that the pattern matches, in the order given.

    Raises:
        PatternError: nothing matches; the message offers the nearest names.
    """
    paths = list(paths)
    matcher = _matcher(pattern)
    found = [path for path in paths if matcher(path)]
    if not found:
        raise PatternError(f"{pattern!r} matches no block or submodule{_hint(pattern, paths)}")
    return found


def matches(pattern: str, path: str) -> bool:
    """Whether one path matches the pattern."""
    return _matcher(pattern)(path)


def assign(rules: Mapping[str, T], paths: Iterable[str]) -> dict[str, T]:
    """`{path: value}` for every path that a rule's pattern matches, in the order of the paths.

    Raises:
        PatternError: a pattern matches nothing, or two patterns match one path.
    """
    paths = list(paths)
    owner: dict[str, str] = {}
    for pattern in rules:
        for path in select(pattern, paths):
            if path in owner:
                raise PatternError(
                    f"{path!r} is matched by both {owner[path]!r} and {pattern!r}; make the patterns disjoint"
                )
            owner[path] = pattern
    return {path: rules[owner[path]] for path in paths if path in owner}


@functools.lru_cache(1024)  # asked for at every operation of a call that a plan looks into
def _matcher(pattern: str):
    ranges: list[tuple[int | None, int | None]] = []
    regex, position = "", 0
    for match in _RANGE.finditer(pattern):
        regex += _glob(pattern[position : match.start()]) + r"\.(\d+)"
        start, stop = (int(text) if text else None for text in match.groups())
        if (start is not None and start < 0) or (stop is not None and stop < 0):
            raise PatternError(f"{pattern!r}: a range can't count from the end; write both indices as they are")
        ranges.append((start, stop))
        position = match.end()
    compiled = re.compile(regex + _glob(pattern[position:]))

    def matcher(path: str) -> bool:
        found = compiled.fullmatch(path)
        return found is not None and all(
            (start or 0) <= int(index) and (stop is None or int(index) < stop)
            for index, (start, stop) in zip(found.groups(), ranges, strict=True)
        )

    return matcher


def _glob(text: str) -> str:
    text = re.sub(r"\*+", "*", text)  # several mean the same as one, but each would double what the regex tries
    return "".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in text)


def _hint(pattern: str, paths: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3) or paths[:3]
    return f"; there are for example {', '.join(map(repr, near))}" if near else " (the model has none)"
