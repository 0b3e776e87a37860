"""Forward hooks of the modules inside a block: which of them run again in a replay.

A hook is replayed if, in forward, it did more than look: returned a value, wrote to what it was given or to its module,
drew random numbers, changed settings. FSDP, weight norm and pruning work through such hooks. One that only looked is
muted, so it fires once per step. A replay finds the hooks that the forward found, also if some were added or removed
since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from reforward import _torch
from reforward._runtime.ambient import Ambient
from reforward._runtime.current import is_replaying
from reforward._runtime.learnt import Learnt
from reforward._runtime.module_state import ModuleState
from reforward._runtime.parts import Parts, leaves_in
from reforward._runtime.streams import RngState, accelerators

_Table = dict[int, Any]


class Watched:
    """Stands for a hook and sees what it does.

    Args:
        hook: the hook.
        modules: those of the block that it is called in; others may look at what it changes there.

    Attributes:
        acted: whether it ever did more than look.
        calls, replays: how often it was called, outside of replays and in them.
    """

    def __init__(self, hook: Callable[..., Any], modules: Sequence[nn.Module] = ()):
        self.hook = hook
        self._modules = modules
        self.acted = False
        self.calls = self.replays = 0

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if is_replaying():
            self.replays += 1
        else:
            self.calls += 1
        if self.acted:
            return self.hook(module, *given)
        modules = list(dict.fromkeys([*self._modules, *_torch.submodules(module)]))
        state = ModuleState("", modules, _acquainted(modules), Parts())
        devices = accelerators([*state.tensors, *_torch.tensors_in(given)])
        before = _seen(given, devices)
        result = self.hook(module, *given)
        self.acted = result is not None or before != _seen(given, devices) or state.written_in_place() != []
        return result


def _acquainted(modules: Sequence[nn.Module]) -> Learnt:
    """As after forwards of these modules that wrote no buffer: large ones aren't copied."""
    learnt = Learnt()
    learnt.seen.update((index, training) for index in range(len(modules)) for training in (True, False))
    return learnt


def _seen(given: tuple[Any, ...], devices: tuple[torch.device, ...]) -> list[Any]:
    """What a hook may change beside its block's modules: what it is given, random streams, settings."""
    leaves, structure = _torch.flatten(given)
    return [
        [id(leaf) for leaf in leaves],
        structure,
        [_torch.version(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)],
        RngState.capture(devices),
        Ambient.capture(devices),
    ]


def _nothing() -> None:
    """What undoes nothing."""


def _silent(*given: Any) -> None:
    """In place of a hook that only looks."""


class Hooks:
    """The forward hooks inside a block, before its forward.

    Args:
        modules: the block's.
        called: how many of the first modules are called outside of the block's forward.
    """

    def __init__(self, modules: list[nn.Module], called: int = 1):
        self._all_modules = modules
        self._modules = modules[called:]
        tables = self._all_tables() if _torch.have_hooks(self._modules) else []
        self._tables = [
            (hooks, options, hooks.copy(), [o.copy() for o in options]) for hooks, options in tables if hooks
        ]
        self._watched: list[dict[int, Watched]] = []

    def _all_tables(self) -> list[tuple[_Table, tuple[_Table, ...]]]:
        own = [table for module in self._modules for table in _torch.hook_tables(module)]
        return own + _torch.global_hook_tables()

    @property
    def any(self) -> bool:
        """Whether there are hooks."""
        return bool(self._tables)

    @property
    def functions(self) -> list[FunctionType]:
        """Those that the hooks are made of."""
        hooks = [hook for _, _, before, _ in self._tables for hook in before.values()]
        return [leaf for leaf in leaves_in(hooks) if isinstance(leaf, FunctionType)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the forward: sees which hooks do more than look."""
        self._watched = [
            {key: Watched(hook, self._all_modules) for key, hook in before.items()} for _, _, before, _ in self._tables
        ]
        for (hooks, *_), watched in zip(self._tables, self._watched, strict=True):
            hooks.update(watched)
        try:
            yield
        finally:  # hooks that the forward added or took away stay so
            for hooks, *_ in self._tables:
                hooks.update((key, hook.hook) for key, hook in hooks.items() if isinstance(hook, Watched))

    @property
    def act(self) -> bool:
        """Whether any hook does more than look: then a replay runs to its end, so that what one hook begins another
        can end."""
        return any(hook.acted for watched in self._watched for hook in watched.values())

    def rewind(self) -> Callable[[], None]:
        """Puts the hooks as the forward found them, muted those that only look; the function that is returned puts them
        as they are now."""
        if not self._tables and not _torch.have_hooks(self._modules):
            return _nothing
        now = [(hooks, hooks.copy(), options, [o.copy() for o in options]) for hooks, options in self._all_tables()]
        for hooks, *_ in now:
            hooks.clear()
        for (hooks, options, _, flags), watched in zip(self._tables, self._watched, strict=True):
            hooks.update((key, hook.hook if hook.acted else _silent) for key, hook in watched.items())
            for option, flag in zip(options, flags, strict=True):
                _refill(option, flag)

        def undo() -> None:
            for hooks, contents, options, flags in now:
                _refill(hooks, contents)
                for option, flag in zip(options, flags, strict=True):
                    _refill(option, flag)

        return undo


def _refill(table: _Table, contents: _Table) -> None:
    table.clear()
    table.update(contents)


@contextmanager
def counted(model: nn.Module) -> Iterator[dict[str, Watched]]:
    """Watches all forward hooks of a model's modules; by module path, kind and number."""
    found: dict[str, Watched] = {}
    tables = []
    for path, module in model.named_modules():
        for kind, (hooks, _) in zip(("pre-hook", "hook"), _torch.hook_tables(module), strict=True):
            watched = {key: Watched(hook) for key, hook in hooks.items()}
            hooks.update(watched)
            tables.append((hooks, watched))
            found.update((f"{kind} {i} of {path or 'the model'}", hook) for i, hook in enumerate(watched.values()))
    try:
        yield found
    finally:
        for hooks, watched in tables:
            hooks.update((key, hook.hook) for key, hook in watched.items() if hooks.get(key) is hook)
