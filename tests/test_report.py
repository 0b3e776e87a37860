"""What the report shows, from results made up for the purpose."""

import io
import json
import os
import sys

import pytest
from rich.console import Console

import reforward as rf
from made_up import ATTENTION, MIB, fit_report, proof
from reforward._report import files, fold, tables
from reforward._report.plot import save_plot
from reforward._report.screen import Screen
from reforward._train import TrainedStep


def region(path, policy=rf.Recompute()):  # noqa: B008 - a policy is a frozen value
    return rf.Region(path=path, policy=policy)


def regions(stack, indices, policy=rf.Recompute()):  # noqa: B008
    return tuple(region(f"{stack}.{index}", policy) for index in indices)


def run(*members):
    return rf.Run(members=members)


def rows(plan_nodes, blocks=()):
    return [(row.label, row.blocks, row.treatment) for row in fold.plan_rows(rf.Plan(nodes=tuple(plan_nodes)), blocks)]


def text_of(renderable):
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def lines_with(renderable, *words):
    lines = [" ".join(line.split()) for line in text_of(renderable).splitlines()]
    return [line for line in lines if all(word in line for word in words)]


# --- folding ----------------------------------------------------------------------------------------------------------


def test_equal_neighbours_fold_into_one_row():
    nodes = [*regions("h", range(8), ATTENTION), *regions("h", range(8, 12))]
    assert rows(nodes) == [
        ("h.0 – h.7", 8, "recompute · save attention"),
        ("h.8 – h.11", 4, "recompute"),
    ]


def test_stacks_do_not_fold_together():
    nodes = [*regions("encoder", range(2)), *regions("decoder", range(2))]
    assert [label for label, _, _ in rows(nodes)] == ["encoder.0 – encoder.1", "decoder.0 – decoder.1"]


def test_blocks_that_the_plan_does_not_name_are_saved():
    assert rows(regions("h", (1, 2)), blocks=[f"h.{index}" for index in range(4)]) == [
        ("h.0", 1, "save"),
        ("h.1 – h.2", 2, "recompute"),
        ("h.3", 1, "save"),
    ]


def test_runs_fold_and_say_what_is_in_them():
    plain = [run(*regions("h", (i, i + 1), rf.Save())) for i in (0, 2, 4)]
    again = run(*regions("h", (6, 7)), region("h.8", rf.Save()))
    nested = run(run(*regions("h", (9, 10), rf.Save())), run(*regions("h", (11, 12), rf.Save())))
    assert rows([*plain, again, nested], blocks=[f"h.{index}" for index in range(13)]) == [
        ("h.0 – h.5", 6, "3 × run of 2"),
        ("h.6 – h.8", 3, "run of 3 (2 × recompute, 1 × save)"),
        ("h.9 – h.12", 4, "run of 4 (2 × run of 2)"),
    ]


def test_selectors_are_written_as_the_user_writes_them():
    policy = rf.Recompute(save=["*.mlp", rf.Ops(family="matmul", within="*.qkv"), "norm"])
    assert fold.describe_policy(policy) == "recompute · save *.mlp, matmul in *.qkv, norm"


# --- tables -----------------------------------------------------------------------------------------------------------


def test_the_breakdown_sums_blocks_and_leaves_out_what_is_nothing():
    table = tables.breakdown_table(fit_report().breakdown)
    assert lines_with(table, "activations of h.0 – h.3 (4 blocks)", "400 MiB", "40.0%")
    assert lines_with(table, "peak", "1000 MiB") or lines_with(table, "peak", "0.98 GiB")
    assert not lines_with(table, "buffers")
    first = lines_with(table, "MiB")[0]
    assert first.startswith("activations of h.0"), "the biggest part comes first"


def test_a_breakdown_prints_as_a_list_and_goes_to_json():
    breakdown = fit_report().breakdown
    lines = str(breakdown).splitlines()
    assert [line.split() for line in (lines[0], lines[2], lines[-1])] == [
        ["200", "MiB", "parameters"],
        ["100", "MiB", "gradients"],
        ["0.98", "GiB", "in", "all"],
    ]
    assert "100 MiB  h.3" in str(breakdown)
    assert "buffers" not in str(breakdown)
    data = json.loads(json.dumps(breakdown.to_dict()))
    assert type(breakdown)(**data) == breakdown


def test_the_comparison_shows_both_steps_and_the_errors():
    table = tables.comparison_table(fit_report())
    assert lines_with(table, "peak, plain", "+10.0%")
    assert lines_with(table, "peak, planned", "550 MiB", "500 MiB", "+10.0%")
    assert lines_with(table, "time, planned", "2.75 s", "2.50 s", "+10.0%")
    assert lines_with(table, "memory saved 50.0% 50.0% +0.0%")
    assert lines_with(table, "slowdown 1.250 × 1.250 × +0.0%")


def test_a_plain_step_that_was_not_run_is_said_to_be_so():
    table = tables.comparison_table(fit_report(measured_plain=None))
    assert lines_with(table, "peak, plain", "not run")
    assert lines_with(table, "slowdown") == ["slowdown 1.250 × not run"]


def test_the_proof_counts_and_names_differences():
    assert lines_with(tables.proof_text(proof()), "1 loss, 196 gradients, 0 buffers, 1 RNG state: all bit-identical")
    failed = tables.proof_text(proof(differences=tuple(f"gradient of w{index}" for index in range(12))))
    assert lines_with(failed, "Proof failed")
    assert lines_with(failed, "gradient of w9")
    assert not lines_with(failed, "gradient of w10")
    assert lines_with(failed, "and 2 more")


def test_all_sections_are_in_the_whole():
    whole = fit_report()
    for words in ("Where the peak", "The plan", "The step, budget 600 MiB", "Proof", "solver: optimal"):
        assert lines_with(tables.fit_tables(whole), words)


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_files_hold_what_was_found(tmp_path):
    training = [TrainedStep(loss=5.5, seconds=2.5)]
    remarks = []
    written = files.write_files(tmp_path, "a model", fit_report(), training, remark=remarks.append)
    assert [path.name for path in written] == ["plan.json", "measurements.json", "report.png"]
    assert remarks == []
    assert rf.Plan.from_json(tmp_path / "plan.json") == fit_report().plan
    document = json.loads((tmp_path / "measurements.json").read_text())
    assert document["model"] == "a model"
    assert document["planned"]["measured"]["timeline"][1] == [1.25, 500 * MIB]
    assert document["plain"]["error"]["peak"] == pytest.approx(0.1)
    assert document["proof"]["identical"] is True
    assert document["training"] == [{"loss": 5.5, "seconds": 2.5}]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_picture_and_one_remark(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    remarks = []
    written = files.write_files(tmp_path, "a model", fit_report(), [], remark=remarks.append)
    assert [path.name for path in written] == ["plan.json", "measurements.json"]
    assert remarks == ["report.png wasn't drawn: matplotlib isn't installed (pip install 'reforward[plot]')"]


def test_the_picture_does_without_a_measured_plain_step(tmp_path):
    save_plot(fit_report(measured_plain=None, frontier=()), tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(rf.InputError, match=r"can't make the directory '.*file/out'.*--out"):
        files.make_directory(tmp_path / "file" / "out")


@pytest.mark.parametrize("name", [files.PLAN, files.MEASUREMENTS, files.PICTURE])
def test_a_file_that_cannot_be_written_is_named_early_and_late(tmp_path, name, monkeypatch):
    (tmp_path / name).mkdir()
    with pytest.raises(rf.InputError, match=f"can't write '.*{name}': it is a directory; give another.*--out"):
        files.make_directory(tmp_path)
    with pytest.raises(rf.InputError, match=r"can't write .*: Is a directory"):
        files.write_files(tmp_path, "a model", fit_report(), [], remark=print)
    (tmp_path / name).rmdir()
    monkeypatch.setattr(files.os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with pytest.raises(rf.InputError, match="it is read-only; give another"):
        files.make_directory(tmp_path)


# --- screen -----------------------------------------------------------------------------------------------------------


def test_results_go_to_stdout_and_progress_to_stderr(capsys):
    with Screen(as_json=False) as screen:
        screen.progress("profiling", 0.0)
        screen.progress("profiling", 0.5)
        screen.progress("solving", 0.0)
        screen.show("a result")
        screen.document({"a": 1})
    out, err = capsys.readouterr()
    assert out == "a result\n"
    assert err == "profiling …\nsolving …\n"


def test_json_has_stdout_for_itself(capsys):
    with Screen(as_json=True) as screen:
        screen.show("a result")
        screen.remark("a remark")
        screen.document({"a": 1})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": 1}
    assert err == "a remark\n"
