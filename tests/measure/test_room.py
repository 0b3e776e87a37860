"""How much memory may be taken: limits of control groups, however deep, of either version."""

import resource

import psutil
import torch

from reforward._measure.room import group_limits, room_bytes, total_bytes


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def membership(tmp_path, text):
    path = tmp_path / "cgroup"
    path.write_text(text)
    return path


def test_version_2_limits_of_all_groups_around_count(tmp_path):
    root = tmp_path / "fs"
    write(root / "a" / "b", memory__max=500, memory__current=100)
    write(root / "a", memory__max=300, memory__current=250)
    write(root, memory__max="max", memory__current=900)
    limits = list(group_limits(membership(tmp_path, "0::/a/b\n"), root))
    assert limits == [(500, 100), (300, 250)]


def test_version_1_limits_count(tmp_path):
    root = tmp_path / "fs"
    write(root / "memory" / "job", memory__limit_in_bytes=700, memory__usage_in_bytes=50)
    lines = "5:cpu,cpuacct:/job\n4:memory:/job\n"
    assert list(group_limits(membership(tmp_path, lines), root)) == [(700, 50)]


def test_no_control_groups(tmp_path):
    assert list(group_limits(tmp_path / "missing", tmp_path)) == []


def test_room_lies_within_the_memory_there_is():
    cpu = torch.device("cpu")
    assert 0 < room_bytes(cpu) <= total_bytes(cpu)


def test_a_resource_limit_counts():
    cpu = torch.device("cpu")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = room_bytes(cpu)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**26, hard))
    try:
        assert room_bytes(cpu) <= 2**26 < before
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
