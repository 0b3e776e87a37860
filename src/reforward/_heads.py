"""Finds the loss head of a model: the linear layer whose output is the logits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from reforward._blocks import Block, check_model, modules_by_path
from reforward._errors import InputError, PatternError
from reforward._patterns import is_within

_WAY_OUT = "name one with chunked_head(head=...), or leave the head out of the plan"


def find_head(model: nn.Module, blocks: Sequence[Block] = ()) -> str:
    """The canonical path of the head: what `get_output_embeddings()` gives (Transformers), else the linear layer with
    most outputs outside of all blocks.

    Raises:
        InputError: there is none, or several are as wide.
    """
    check_model(model)
    modules = modules_by_path(model)
    linear = {path: module for path, module in modules.items() if path and isinstance(module, nn.Linear)}
    told = getattr(model, "get_output_embeddings", None)
    named = told() if callable(told) else None
    if named is not None:
        path = next((path for path, module in modules.items() if module is named), None)
        if path is None or path not in linear:
            raise InputError(
                f"the output layer of {type(model).__name__} is a {type(named).__name__}, not an nn.Linear of its"
                f" own, so its loss can't be computed in chunks; {_WAY_OUT}"
            )
        return path
    outside = {p: m for p, m in linear.items() if not any(is_within(p, block.path) for block in blocks)}
    widest = max((module.out_features for module in outside.values()), default=0)
    found = [path for path, module in outside.items() if module.out_features == widest]
    if len(found) != 1:
        what = (
            f"several heads as wide ({', '.join(map(repr, found[:4]))})" if found else "no nn.Linear outside its blocks"
        )
        raise InputError(
            f"{type(model).__name__} has {what}, so it isn't clear what its loss head is; {_WAY_OUT}. A product with a"
            " weight that no nn.Linear holds (F.linear(x, embedding.weight)) can't be done in chunks"
        )
    return found[0]


def check_head(model: nn.Module, path: str) -> nn.Linear:
    """The head of that path.

    Raises:
        PatternError: the model has no such module.
        InputError: it isn't a plain linear layer.
    """
    check_model(model)
    module = modules_by_path(model).get(path)
    if module is None:
        raise PatternError(f"{type(model).__name__} has no module {path!r} that could be its head; {_WAY_OUT}")
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise InputError(
            f"the head {path!r} is a {type(module).__name__}, whose forward isn't that of nn.Linear, so its loss can't"
            f" be computed in chunks; {_WAY_OUT}"
        )
    return module
