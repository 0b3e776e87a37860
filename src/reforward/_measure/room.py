"""How much more memory this process may take: to know whether a step can be run at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


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


def _limits() -> Iterator[int]:
    """Limits set on this process: by setrlimit, and by its control group."""
    yield from (limit for limit, _ in _resource_limits())
    if (limit := _read(_CGROUP / "memory.max")) is not None:
        yield limit


def _rooms(process: psutil.Process) -> Iterator[int]:
    for limit, used in _resource_limits(process):
        yield limit - used
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        yield limit - used


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
