"""The model, the text and the step that `reforward fit` takes when it is given none.

A decoder GPT over bytes: big enough that a step's activations weigh about as much as its parameters, gradients and
optimizer state together, small enough that a step takes seconds on two CPU cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from reforward._errors import InputError
from reforward._step import Step

VOCABULARY = 256
"""Byte-level: every value of a byte is a token."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""float32 computes plainly; bfloat16 under autocast, with the parameters left in float32."""

_TEXT = "kjv-genesis-exodus.txt"


class Batch(NamedTuple):
    """Input and target tokens, int64, both of shape (batch_size, seq_len); a target is the next input."""

    tokens: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the embedded model; the defaults give 50.7 million parameters.

    Attributes:
        max_seq_len: number of learned positions.
        width: features of the residual stream.
        dropout: probability, of attention weights and of both branches of a block.
    """

    vocabulary: int = VOCABULARY
    max_seq_len: int = 256
    layers: int = 16
    heads: int = 8
    width: int = 512
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention: (batch, seq, width) → the same shape."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in split.unbind(2))
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with four times the width between them: (..., width) → the same shape."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One transformer layer, normalised before each branch (pre-norm)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A decoder with learned positions, its output layer tied to its embedding.

    `forward` takes int64 tokens of shape (batch, seq) and returns logits of shape (batch, seq, vocabulary).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.max_seq_len, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False, device="meta")  # draws no random numbers
        self.head.weight = self.embedding.weight
        self._initialise(config.layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's initialisation: the layers that write to the residual stream start smaller, by 1/√(2·layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class DefaultRun(NamedTuple):
    """The embedded model, its step with one example batch, and an endless stream of training batches."""

    model: GPT
    step: Step
    batches: Iterator[Batch]


def default_step(
    *,
    seq_len: int = 256,
    batch_size: int = 6,
    dtype: str = "float32",
    optimizer: str = "adamw",
    seed: int = 0,
    device: torch.device | str | None = None,
) -> DefaultRun:
    """The embedded model in training mode, and a step of it on the embedded text.

    Args:
        seq_len: tokens per sequence.
        batch_size: sequences per batch.
        dtype: a key of `DTYPES`.
        optimizer: "adamw" or "sgd".
        seed: of the weights, of the dropout masks (it seeds torch's global streams) and of the order of the text.
        device: where the model lives; None: the first CUDA device if there is one, else the CPU.

    Raises:
        InputError: a size below 1, or a name that isn't known.
    """
    device = torch.device(device) if device is not None else best_device()
    torch.manual_seed(seed)
    batches = text_batches(seq_len=seq_len, batch_size=batch_size, seed=seed, device=device)
    model = GPT(GPTConfig(max_seq_len=seq_len)).to(device)

    def loss(batch: Batch) -> torch.Tensor:
        with autocast(device, dtype):
            logits = model(batch.tokens)
            return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    autocast(device, dtype)  # an unknown dtype fails here, not in the first step
    return DefaultRun(model, Step(loss, [next(batches)], make_optimizer(optimizer, model)), batches)


def text_batches(
    *, seq_len: int, batch_size: int, vocabulary: int = VOCABULARY, seed: int = 0, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Endless batches of pieces of the embedded text, at random places.

    The places come from a generator of their own, so that drawing a batch moves no global random stream.

    Args:
        vocabulary: a smaller vocabulary than 256 takes the bytes modulo its size.

    Raises:
        InputError: a size below 1, or a sequence longer than the text.
    """
    text = torch.frombuffer(bytearray(embedded_text()), dtype=torch.uint8).long() % vocabulary
    for name, size in {"seq_len": seq_len, "batch_size": batch_size}.items():
        if size < 1:
            raise InputError(f"{name} must be at least 1, not {size}")
    if seq_len >= len(text):
        raise InputError(f"seq_len must be below the length of the embedded text, {len(text)} bytes, not {seq_len}")
    return _batches(text, seq_len, batch_size, torch.Generator().manual_seed(seed), torch.device(device))


def _batches(
    text: torch.Tensor, seq_len: int, batch_size: int, generator: torch.Generator, device: torch.device
) -> Iterator[Batch]:
    while True:
        starts = torch.randint(len(text) - seq_len, (batch_size,), generator=generator)
        pieces = text[starts[:, None] + torch.arange(seq_len + 1)].to(device)
        yield Batch(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())


def embedded_text() -> bytes:
    """The public-domain text that the package ships (see `data/SOURCE.md`)."""
    return (resources.files("reforward") / "data" / _TEXT).read_bytes()


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over the model's trainable parameters: "adamw" (3e-4) or "sgd" (1e-2, momentum 0.9).

    Raises:
        InputError: another name, or a model without trainable parameters.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InputError(f"{type(model).__name__} has no parameter that requires grad, so there is nothing to train")
    match name:
        case "adamw":
            return torch.optim.AdamW(parameters, lr=3e-4)
        case "sgd":
            return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    raise InputError(f"there is no optimizer {name!r}; known are 'adamw' and 'sgd'")


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """A context in which the model computes in the named dtype.

    Raises:
        InputError: a name that isn't in `DTYPES`.
    """
    if dtype not in DTYPES:
        raise InputError(f"there is no dtype {dtype!r} here; known are {', '.join(map(repr, DTYPES))}")
    return torch.autocast(device.type, torch.bfloat16, enabled=DTYPES[dtype] is not torch.float32)


def best_device() -> torch.device:
    """The first CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
