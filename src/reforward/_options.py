"""What the command line says about the model and its step. Data only: read before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, and the sizes of its step.

    Attributes:
        model: `module:function`, a function that returns a model and its step (or a batch); or `hf:PATH`, a local
            Transformers directory or config.json. Without it: an embedded GPT of 50 million parameters, on
            embedded text.
        seq_len: tokens per sequence; 256 if the model's function doesn't say otherwise.
        batch_size: sequences per batch; 6 if the model's function doesn't say otherwise.
        dtype: `float32`, or `bfloat16` for autocast around the loss.
        optimizer: `adamw` or `sgd`; `adamw` unless the step brings its own.
        seed: of the weights, the random streams and the order of the text.
    """

    model: str | None = None
    seq_len: int | None = None
    batch_size: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    seed: int = 0
