"""The command `reforward`: parses, calls, prints.

What a command calls is imported when it is called, so that `--help` is instant.

Exit codes: 0 all is well; 1 the proof failed; 2 the input can't be used, or the model's own code fails; 3 no plan fits
the budget; 130 interrupted. Anything else that goes wrong is a bug: its traceback is shown and the code is 70.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number

from reforward import __version__
from reforward._errors import BudgetError, ReforwardError
from reforward._options import ModelOptions

OK, PROOF_FAILED, BAD_INPUT, BUDGET_TOO_SMALL, BUG, INTERRUPTED = 0, 1, 2, 3, 70, 130

Options = Annotated[ModelOptions, Parameter(name="*")]
Json = Annotated[bool, Parameter(negative="")]
_EMBEDDED = ModelOptions()

app = App(
    name="reforward",
    help="Fits a training step into a memory budget, and proves it exact.",
    version=__version__,
    suppress_keyboard_interrupt=False,  # `main` says one line and gives the exit code
)


@app.command
def fit(
    options: Options = _EMBEDDED,
    *,
    budget: str = "60%",
    allow: Literal["chunked_head"] | None = None,
    steps: Annotated[int, Parameter(validator=Number(gte=0))] = 8,
    out: Path = Path("reforward-out"),
    json: Json = False,
) -> int:
    """Find the fastest plan that fits the budget, prove it exact, and train under it.

    Parameters
    ----------
    budget
        Peak bytes of the step: `6GiB`, `900MB`, `60%` (of the plain step's peak) or `60%device`.
    allow
        `chunked_head`: the loss head may be done in chunks, equal to rounding instead of bit for bit.
    steps
        Optimizer steps to take under the plan.
    out
        Directory for plan.json, report.png and measurements.json.
    json
        Print one JSON document on stdout and nothing else.
    """
    from reforward._fit import fit_report
    from reforward._load import load, running
    from reforward._report import files, tables
    from reforward._report.screen import Screen
    from reforward._runtime import attached
    from reforward._train import train

    directory = files.make_directory(out)
    with Screen(as_json=json) as screen:
        screen.progress("building the model", 0.0)
        loaded = load(options)
        training = train(loaded.step, steps, loaded.batches)
        with running(loaded):
            report = fit_report(loaded.model, loaded.step, budget, allow=allow, progress=screen.progress)
        screen.show(tables.fit_tables(report))
        taken = []
        if not report.proof.differences:
            with running(loaded), attached(loaded.model, report.plan):
                for step in training:
                    taken.append(step)
                    screen.show(tables.training_line(len(taken), steps, step))
        written = files.write_files(directory, loaded.name, report, taken, remark=screen.remark)
        screen.show(tables.files_line(written))
        screen.document(files.fit_document(loaded.name, report, taken))
    return PROOF_FAILED if report.proof.differences else OK


@app.command
def frontier(
    options: Options = _EMBEDDED,
    *,
    points: Annotated[int, Parameter(validator=Number(gte=2))] = 12,
    measure: Annotated[bool, Parameter(negative="")] = False,
    out: Path = Path("reforward-out"),
    json: Json = False,
) -> int:
    """Show time against memory: the fastest plan at every budget, and the named techniques beside it.

    Parameters
    ----------
    points
        How many budgets, from the smallest that can be met to the plain step's peak.
    measure
        Also run a step of every plan.
    out
        Directory for frontier.png and frontier.json.
    json
        Print one JSON document on stdout and nothing else.
    """
    from reforward._frontier import frontier as trace
    from reforward._load import load, running
    from reforward._report import files, tables
    from reforward._report.screen import Screen

    directory = files.make_directory(out, files.FRONTIER_FILES)
    with Screen(as_json=json) as screen:
        screen.progress("building the model", 0.0)
        loaded = load(options)
        with running(loaded):
            found = trace(loaded.model, loaded.step, points=points, measured=measure, progress=screen.progress)
        screen.show(tables.frontier_table(found))
        screen.show(tables.files_line(files.write_frontier(directory, loaded.name, found, remark=screen.remark)))
        screen.document(files.frontier_document(loaded.name, found))
    return OK


@app.command
def explain(options: Options = _EMBEDDED, *, json: Json = False) -> int:
    """Show where the peak of the plain step comes from.

    Parameters
    ----------
    json
        Print one JSON document on stdout and nothing else.
    """
    from reforward._fit import explain as explain_step
    from reforward._load import load, running
    from reforward._report import tables
    from reforward._report.screen import Screen

    with Screen(as_json=json) as screen:
        screen.progress("building the model", 0.0)
        loaded = load(options)
        screen.progress("profiling", 0.0)
        with running(loaded):
            breakdown = explain_step(loaded.model, loaded.step)
        screen.show(tables.breakdown_table(breakdown))
        screen.document({"model": loaded.name, "breakdown_bytes": breakdown.to_dict()})
    return OK


@app.command
def verify(plan: Path, options: Options = _EMBEDDED, *, json: Json = False) -> int:
    """Prove that a step under a plan gives what the plain step gives.

    Parameters
    ----------
    plan
        A plan.json, made for this model.
    json
        Print one JSON document on stdout and nothing else.
    """
    from reforward._load import load, running
    from reforward._plan import Plan
    from reforward._report import files, tables
    from reforward._report.screen import Screen
    from reforward._verify import verify as verify_step

    with Screen(as_json=json) as screen:
        chosen = Plan.from_json(plan)
        screen.progress("building the model", 0.0)
        loaded = load(options)
        screen.progress("verifying", 0.0)
        with running(loaded):
            proof = verify_step(loaded.model, loaded.step, chosen)
        screen.show(tables.proof_text(proof))
        screen.document({"model": loaded.name, "proof": files.proof_document(proof)})
    return PROOF_FAILED if proof.differences else OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own remarks; read when torch is imported
    try:
        return app(arguments, exit_on_error=False, print_error=False, result_action="return_value") or OK
    except BudgetError as error:
        return _fail(error, BUDGET_TOO_SMALL)
    except (ReforwardError, CycloptsError) as error:
        return _fail(error, BAD_INPUT)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except (Exception, SystemExit):
        traceback.print_exc()
        return BUG


def _fail(message: object, code: int) -> int:
    print(f"reforward: {message}", file=sys.stderr)
    return code
