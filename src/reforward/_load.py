"""Turns `--model` and the options beside it into a model, a step and what it trains on."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from reforward import _step
from reforward._default import autocast, best_device, default_step, make_optimizer, text_batches
from reforward._errors import DryRunError, InputError, ReforwardError, StepError
from reforward._options import ModelOptions
from reforward._step import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEQ_LEN, _BATCH_SIZE, _DTYPE, _OPTIMIZER = 256, 6, "float32", "adamw"
_SEEDS = range(-(2**63), 2**64)  # what torch takes
_HERE, _TORCH = (str(Path(str(module.__file__)).parent) + os.sep for module in (_step, torch))
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model and what the command trains it with.

    Attributes:
        name: what to call it in a report.
        batches: endless training batches for `step.loss_fn`; None: train on the step's own batches, in turn.
    """

    name: str
    model: nn.Module
    step: Step
    batches: Iterator[Any] | None = None


def load(options: ModelOptions) -> Loaded:
    """The model and the step that the options describe; torch's global random streams are seeded first.

    Raises:
        InputError: a module, function, file or value that can't be used.
    """
    if options.seed not in _SEEDS:
        raise InputError(f"--seed must fit into 64 bits, and {options.seed} doesn't")
    torch.manual_seed(options.seed)
    if options.model is not None and not options.model.startswith("hf:"):
        return _load_function(options.model, options)
    with _reported_as(f"can't make the step of {options.model or 'the embedded model'}"):
        if options.model is None:
            return _load_default(options)
        return _load_transformers(options.model.removeprefix("hf:"), options)


def _load_default(options: ModelOptions) -> Loaded:
    model, step, batches = default_step(
        seq_len=_given(options.seq_len, _SEQ_LEN),
        batch_size=_given(options.batch_size, _BATCH_SIZE),
        dtype=_given(options.dtype, _DTYPE),
        optimizer=_given(options.optimizer, _OPTIMIZER),
        seed=options.seed,
    )
    return Loaded(name="embedded GPT", model=model, step=step, batches=batches)


# --- hf:PATH ----------------------------------------------------------------------------------------------------------


def _load_transformers(path: str, options: ModelOptions) -> Loaded:
    seq_len = _given(options.seq_len, _SEQ_LEN)
    model, device = _transformers_model(path), best_device()
    nn.Module.to(model.train(), device)  # Transformers wraps `to` in a way that type checkers misread
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise InputError(f"hf:{path} has {positions} positions; --seq-len {seq_len} is more than it can take")
    config.use_cache = False  # the cache of keys and values is for generation; in training it only takes memory
    pieces = text_batches(
        seq_len=seq_len,
        batch_size=_given(options.batch_size, _BATCH_SIZE),
        vocabulary=min(config.vocab_size, 256),
        seed=options.seed,
        device=device,
    )
    batches = ({"input_ids": piece.tokens, "labels": piece.tokens} for piece in pieces)  # the model shifts the labels
    step = _with_dtype(_batch_step(model, next(batches), options), _given(options.dtype, _DTYPE), device)
    return Loaded(name=f"hf:{path}", model=model, step=step, batches=batches)


def _transformers_model(path: str) -> PreTrainedModel:
    where = Path(path)
    if not where.exists():
        raise InputError(
            f"hf:{path}: there is no such file or directory; only local ones are read, so download it first"
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise InputError("hf: needs Transformers; install it with: pip install 'reforward[transformers]'") from error
    try:
        if where.is_dir() and any(any(where.glob(pattern)) for pattern in _WEIGHTS):
            return AutoModelForCausalLM.from_pretrained(where, local_files_only=True, dtype=torch.float32)
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(where, local_files_only=True))
    except Exception as error:  # Transformers has no common base for what a bad config or directory raises
        raise InputError(f"Transformers can't make a causal language model from {path!r}: {_summary(error)}") from error


# --- module:function --------------------------------------------------------------------------------------------------


def _load_function(spec: str, options: ModelOptions) -> Loaded:
    function = _find_function(spec)
    passed = _arguments(spec, function, options)
    with _reported_as(f"{spec} failed"):
        result = function(**passed)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise InputError(f"{spec} must return (model, step) or (model, batch), not {_describe(result)}")
    model, second = result
    step = _as_step(spec, model, second, options, makes_optimizer="optimizer" in passed)
    if options.dtype is not None and "dtype" not in passed:
        step = _with_dtype(step, options.dtype, _device_of(model))
    return Loaded(name=spec, model=model, step=step)


def _find_function(spec: str) -> Callable[..., Any]:
    module_name, colon, function_name = spec.partition(":")
    if not (colon and module_name and function_name):
        raise InputError(f"--model takes module:function or hf:PATH, not {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a script next to the user is a module to them
    with _reported_as(f"can't import {module_name!r} (looked in the current directory and the installed packages)"):
        function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise InputError(f"{module_name!r} has no function {function_name!r}")
    return function


def _arguments(spec: str, function: Callable[..., Any], options: ModelOptions) -> dict[str, Any]:
    """The options that the function takes and that were given, by parameter name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions don't say
        parameters = ()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    given = {
        "seq_len": options.seq_len,
        "batch_size": options.batch_size,
        "dtype": options.dtype,
        "optimizer": options.optimizer,
        "seed": options.seed,
    }
    for name in ("seq_len", "batch_size"):
        if given[name] is not None and name not in names and not takes_any:
            raise InputError(f"{spec} takes no argument {name!r}, so --{name.replace('_', '-')} can't be applied to it")
    passed = {name: value for name, value in given.items() if value is not None and (name in names or takes_any)}
    for parameter in parameters:
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not variadic and parameter.name not in passed:
            raise InputError(f"{spec} needs an argument {parameter.name!r}, which the command line doesn't give")
    return passed


def _as_step(spec: str, model: nn.Module, second: Any, options: ModelOptions, *, makes_optimizer: bool) -> Step:
    """A Step from what stood beside the model; one that has no optimizer gets the one asked for."""
    if isinstance(second, Step):
        if options.optimizer is None or makes_optimizer:
            return second
        if second.optimizer is not None:
            raise InputError(f"the step of {spec} brings its own optimizer; leave --optimizer out")
        return replace(second, optimizer=make_optimizer(options.optimizer, model))
    if isinstance(second, (Mapping, torch.Tensor, tuple, list)):
        return _batch_step(model, second, options)
    if callable(second):
        return Step(
            cast("Callable[..., torch.Tensor]", second),
            optimizer=make_optimizer(_given(options.optimizer, _OPTIMIZER), model),
        )
    raise InputError(f"{spec} must return a Step, a function or a batch beside the model, not {_describe(second)}")


# --- steps ------------------------------------------------------------------------------------------------------------


def _batch_step(model: nn.Module, batch: Any, options: ModelOptions) -> Step:
    """The step of a model that computes its own loss from a batch."""

    def loss(batch: Any) -> torch.Tensor:
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, (tuple, list)):
            output = model(*batch)
        else:
            output = model(batch)
        if isinstance(output, torch.Tensor):
            return output
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if found is None:
            raise InputError(
                f"{type(model).__name__} returned no loss for its batch, but {_describe(output)};"
                " put the labels into the batch, or return a step instead of a batch"
            )
        return found

    return Step(loss, [batch], make_optimizer(_given(options.optimizer, _OPTIMIZER), model))


def _with_dtype(step: Step, dtype: str, device: torch.device) -> Step:
    autocast(device, dtype)  # an unknown dtype fails here, not in the first step

    def loss(*batch: Any) -> torch.Tensor:
        with autocast(device, dtype):
            return step.loss_fn(*batch)

    return replace(step, loss_fn=loss)


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


# --- messages ---------------------------------------------------------------------------------------------------------


@contextmanager
def running(loaded: Loaded) -> Iterator[None]:
    """A context that runs the model's step: what goes wrong in the step itself becomes a StepError that says where.

    It was the step if its forward, run plainly once more, ends in the same way, or if the step was running and the code
    that failed isn't reforward's. Other errors stay as they are.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        cause = error.__cause__ if isinstance(error, DryRunError) else error
        if cause is None or isinstance(cause, ReforwardError):
            raise
        again = _failure(loaded.step)
        if again is not None and type(again) is type(cause):
            cause = again
        elif isinstance(error, DryRunError) or not _raised_in_step(cause):
            raise
        raise StepError(f"the step of {loaded.name} failed: {_summary(cause)}{_place(cause)}") from cause


def _failure(step: Step) -> BaseException | None:
    """What the step's forward raises without a plan; without gradients it needs little memory."""
    try:
        with torch.no_grad():
            for variant in range(step.variants):
                step.loss(variant)
    except (Exception, SystemExit) as error:
        return error
    return None


def _raised_in_step(error: BaseException) -> bool:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = next((file for file in reversed(files) if not file.startswith(_TORCH)), "")
    return _step.__file__ in files and (last == _step.__file__ or not last.startswith(_HERE))


@contextmanager
def _reported_as(what: str) -> Iterator[None]:
    """Turns what the user's own code raises into an InputError that says where."""
    try:
        yield
    except ReforwardError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{what}: {_summary(error)}{_place(error)}") from error


def _place(error: BaseException) -> str:
    """The innermost line of the user's own code, in brackets."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", _TORCH, _HERE)):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _summary(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(item).__name__ for item in value)})"
    return f"a {type(value).__name__}"


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
