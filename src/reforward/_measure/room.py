"""How much more memory this process may take: to know whether a step can be run at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

_CGROUPS = Path("/sys/fs/cgroup")
_RESERVE = 0.1


def total_bytes(device: torch.device) -> int:
    """Memory of the device that a process of ours could have: all of it but what others hold."""
    if device.type == "cpu":
        return min(psutil.virtual_memory().total, *_limits(), sys.maxsize)
    free, total = torch.get_device_module(device).mem_get_info(device)
    ours = torch.get_device_module(device).memory_reserved(device)
    return min(total, free + ours)


def room_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device without taking them from others or being stopped by a limit."""
    if device.type == "cpu":
        process = psutil.Process()
        return max(0, min(psutil.virtual_memory().available, *_rooms(process), sys.maxsize))
    free, _ = torch.get_device_module(device).mem_get_info(device)
    module = torch.get_device_module(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device)


def usable_bytes(device: torch.device) -> int:
    """What a step may be known to fit into: the room, less a reserve."""
    return int(room_bytes(device) * (1 - _RESERVE))


def _limits() -> Iterator[int]:
    """Limits set on this process: by setrlimit, and by its control groups."""
    yield from (limit for limit, _ in _resource_limits())
    yield from (limit for limit, _ in group_limits())


def _rooms(process: psutil.Process) -> Iterator[int]:
    yield from (limit - used for limit, used in _resource_limits(process))
    yield from (limit - used for limit, used in group_limits())


def group_limits(membership: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> Iterator[tuple[int, int]]:
    """Limits on memory of this process's control group and of those around it, each with what is used of it.

    Args:
        membership: lines `number:controllers:path` (version 1) or `0::path` (version 2).
        root: where the groups are mounted.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = (_read(folder / name) for name in names)
            if limit is not None and used is not None:
                yield limit, used
            if folder == base:
                break


def _resource_limits(process: psutil.Process | None = None) -> Iterator[tuple[int, int]]:
    """Soft limits on memory, each with what is used of it."""
    if sys.platform == "win32":
        return
    import resource

    memory = (process or psutil.Process()).memory_info()
    for kind, used in ((resource.RLIMIT_AS, memory.vms), (resource.RLIMIT_DATA, getattr(memory, "data", memory.rss))):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield soft, used


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
