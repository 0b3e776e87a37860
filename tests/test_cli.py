"""The command, with `fit` itself replaced: how it parses, what it prints, how it exits."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from types import ModuleType

import pytest

import reforward as rf
from made_up import fit_report, proof
from reforward._cli import main

SCRIPT = """
    import torch
    from torch import nn

    class Loss(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    def make():
        return Loss(4, 4), torch.ones(2, 4)
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    (tmp_path / "cli_script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "deep.json").write_text('{"nodes": ' + '[{"is": "run", "members": ' * 100_000)
    (tmp_path / "occupied/plan.json").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def fitted(directory, monkeypatch):
    """`fit_report` answers with a made-up report, or raises what is put into `outcome`; `calls` has its arguments."""

    def fake(model, step, budget, *, allow, progress):
        assert allow is None
        calls.append((model, step, budget))
        progress("profiling", 1.0)
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    @contextmanager
    def attached(model, plan):
        yield

    calls, outcome = [], [fit_report()]
    replaced = {
        "_fit": {"fit_report": fake, "explain": lambda model, step: outcome[0].breakdown},
        "_runtime": {"attached": attached},
        "_verify": {"verify": lambda model, step, plan: outcome[0].proof},
    }
    for name, functions in replaced.items():
        module = ModuleType(f"reforward.{name}")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"reforward.{name}", module)
    return type("Fitted", (), {"calls": calls, "outcome": outcome})


def run(*arguments):
    return main(["fit", "--model", "cli_script:make", *arguments])


def test_fit_prints_trains_and_writes(fitted, directory, capsys):
    assert run("--budget", "600MiB", "--steps", "3") == 0
    ((_, _, budget),) = fitted.calls
    assert budget == "600MiB"
    out, err = capsys.readouterr()
    assert "The plan" in out
    assert "step 3/3   loss " in out
    assert "profiling" in err
    losses = [
        taken["loss"] for taken in json.loads((directory / "reforward-out/measurements.json").read_text())["training"]
    ]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert (directory / "reforward-out/report.png").exists()
    assert rf.Plan.from_json(directory / "reforward-out/plan.json") == fitted.outcome[0].plan


def test_json_is_one_document(fitted, directory, capsys):
    assert run("--json", "--steps", "1", "--out", "elsewhere") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model"] == "cli_script:make"
    assert document["budget_bytes"] == 600 * 2**20
    assert len(document["training"]) == 1
    assert (directory / "elsewhere/plan.json").exists()


def test_a_failed_proof_is_exit_1_and_trains_nothing(fitted, capsys):
    fitted.outcome[0] = fit_report(proof=proof(differences=("gradient of h.0.weight",)))
    assert run("--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["proof"]["identical"] is False
    assert document["training"] == []


def test_explain_shows_the_breakdown(fitted, capsys):
    assert main(["explain", "--model", "cli_script:make"]) == 0
    assert "optimizer state" in capsys.readouterr().out
    assert main(["explain", "--model", "cli_script:make", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["breakdown_bytes"] == fitted.outcome[0].breakdown.to_dict()


@pytest.mark.parametrize(("differences", "code"), [((), 0), (("loss",), 1)])
def test_verify_reads_a_plan_and_tells_by_its_exit_code(fitted, directory, capsys, differences, code):
    fitted.outcome[0] = fit_report(proof=proof(differences=differences))
    fitted.outcome[0].plan.to_json(directory / "plan.json")
    assert main(["verify", "plan.json", "--model", "cli_script:make"]) == code
    assert ("Proof failed" in capsys.readouterr().out) == bool(code)
    assert main(["verify", "plan.json", "--model", "cli_script:make", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["proof"]["differences"] == list(differences)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (rf.BudgetError("needs at least 500 MiB", budget_bytes=1), 3, "reforward: needs at least 500 MiB\n"),
        (rf.StepError("no block is called"), 2, "reforward: no block is called\n"),
        (rf.AttachError("on meta device"), 2, "reforward: on meta device\n"),
        (KeyboardInterrupt(), 130, "reforward: interrupted\n"),
    ],
)
def test_errors_are_one_message_and_a_code(fitted, capsys, error, code, message):
    fitted.outcome[0] = error
    assert run() == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(message)
    assert "Traceback" not in err


def test_what_nobody_expected_shows_its_traceback(fitted, capsys):
    fitted.outcome[0] = RuntimeError("a bug")
    assert run() == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--nope"], "Unknown option: --nope"),
        (["fit", "--steps", "many"], 'unable to convert "many" into int'),
        (["fit", "--steps", "-1"], "Must be >= 0"),
        (["fit", "--model", "cli_script"], "takes module:function or hf:PATH"),
        (["fit", "--model", "hf:nowhere"], "no such file or directory"),
        (["fit", "--seq-len", "0"], "seq_len must be at least 1"),
        (["fit", "--out", "cli_script.py/out"], "can't make the directory"),
        (["fit", "--out", "a\0b"], "can't make the directory"),
        (["fit", "--out", "occupied"], "can't write 'occupied/plan.json': it is a directory; give another"),
        (["fit", "--seed", str(2**64)], "--seed must fit into 64 bits"),
        (["fit", "--batch-size", str(10**20)], "can't make the step of the embedded model: "),
        (["fit", "--model", "builtins:dict"], "builtins:dict must return (model, step) or (model, batch), not a dict"),
        (["fit", "--model", "sys:exit"], "sys:exit failed: SystemExit"),
        (["verify", "nowhere.json"], "can't read a plan from 'nowhere.json'"),
        (["verify", "cli_script.py"], "isn't a plan"),
        (["verify", "deep.json"], "isn't a plan: it is nested too deep"),
        (["verify"], "requires an argument"),
        (["bogus"], "Unknown command"),
    ],
)
def test_bad_input_is_exit_2_and_one_message(fitted, capsys, arguments, message):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert fitted.calls == []


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"], ["--version"], []])
def test_asking_for_help_is_no_error(capsys, arguments):
    assert main(arguments) == 0
    assert capsys.readouterr().out


def test_the_installed_command_stops_cleanly_on_ctrl_c(directory):
    (directory / "slow_script.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    code = "import sys; from reforward._cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "fit", "--model", "slow_script:make"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(directory)},
        # A job in the background of a shell ignores Ctrl-C, and would hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert ready == "ready\n"
    assert process.returncode == 130
    assert err.endswith("reforward: interrupted\n")
    assert "Traceback" not in err
