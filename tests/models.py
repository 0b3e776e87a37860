"""Small models for the tests, each with a step: `build(name)` gives a model in training mode and its loss function.

Everything random at build time (weights, batch) follows from `seed`; what the step itself draws (dropout, drop path)
follows from the global generator at the moment of the call. Dropout is on wherever the architecture has it. The sizes
are such that saved activations outweigh the loss head, and that a step takes tens of milliseconds on one thread.

`OWN` need only torch; `ARCHITECTURES` are the twelve on which blocks are found, most of them from transformers configs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64


class Case(NamedTuple):
    """A model in training mode and a function without arguments that returns the scalar loss of its one batch."""

    model: nn.Module
    loss: Callable[[], Tensor]


def build(name: str, seed: int = 0, **sizes: Any) -> Case:
    """The case of that name, equal for equal seeds; the global random state is left as it was.

    Args:
        sizes: where it isn't to be as small as can be; those of its builder.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, loss = BUILDERS[name](**sizes)
    return Case(model.train(), loss)


class Attention(nn.Module):
    """Causal self-attention on (batch, time, width); explicit softmax or torch's fused function."""

    def __init__(self, width: int, heads: int, dropout: float, sdpa: bool):
        super().__init__()
        self.heads, self.sdpa, self.p = heads, sdpa, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            hidden = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
            y = self.drop(scores.masked_fill(hidden, float("-inf")).softmax(-1)) @ v
        return self.drop(self.out(y.transpose(1, 2).reshape(batch, time, width)))


class Layer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, width: int, heads: int, dropout: float, sdpa: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, sdpa)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with tied embedding whose forward loops over `layers`; ids (batch, time) → logits."""

    def __init__(
        self,
        *,
        layers: int = 4,
        width: int = 32,
        heads: int = 4,
        vocabulary: int = VOCABULARY,
        context: int = 64,
        dropout: float = 0.1,
        sdpa: bool = False,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout, sdpa) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def gpt(*, batch: int = 2, time: int = 32, **sizes: Any) -> Case:
    """The own GPT; `sizes` are those of `GPT`."""
    model = GPT(context=max(time, 64), **sizes)
    ids = torch.randint(0, model.embedding.num_embeddings, (batch, time + 1))

    def loss() -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return Case(model, loss)


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm around a shortcut; `stride` 2 halves the picture."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages `layer1..3` of residual blocks, as in torchvision; (batch, 3, h, w) → (batch, 10)."""

    def __init__(self, width: int = 8, depth: int = 2):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        self.layer1 = self._stage(width, width, depth, 1)
        self.layer2 = self._stage(width, 2 * width, depth, 2)
        self.layer3 = self._stage(2 * width, 4 * width, depth, 2)
        self.head = nn.Linear(4 * width, 10)

    @staticmethod
    def _stage(inputs: int, outputs: int, depth: int, stride: int) -> nn.Sequential:
        rest = (ResidualBlock(outputs, outputs) for _ in range(depth - 1))
        return nn.Sequential(ResidualBlock(inputs, outputs, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.head(x.mean((2, 3)))


def resnet(*, batch: int = 4, size: int = 24, **sizes: Any) -> Case:
    """The own ResNet; its BatchNorms update running statistics at every forward."""
    model = ResNet(**sizes)
    pictures, labels = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    return Case(model, lambda: F.cross_entropy(model(pictures), labels))


class LSTMModel(nn.Module):
    """A two-layer LSTM language model; ids (batch, time) → logits."""

    def __init__(self, width: int = 32, vocabulary: int = VOCABULARY):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


def lstm(*, batch: int = 2, time: int = 32, **sizes: Any) -> Case:
    """The own LSTM model, whose one block returns a tuple."""
    model = LSTMModel(**sizes)
    ids = torch.randint(0, VOCABULARY, (batch, time + 1))
    return Case(model, lambda: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


class UNetBlock(nn.Module):
    """Group norm, activation, convolution, twice, around a shortcut."""

    def __init__(self, inputs: int, outputs: int, dropout: float = 0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, 1, 1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.drop = nn.Dropout(dropout)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(self.drop(F.silu(self.norm2(y)))) + self.shortcut(x)


class UNetStage(nn.Module):
    """`resnets` in a row at one resolution, the first of them at the new width."""

    def __init__(self, inputs: int, outputs: int, depth: int):
        super().__init__()
        widths = [inputs] + [outputs] * depth
        self.resnets = nn.ModuleList(UNetBlock(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x)
        return x


class UNet(nn.Module):
    """Down, middle and up stages with skips between them, as diffusion models have it; pictures → pictures."""

    def __init__(self, width: int = 8, levels: int = 2, depth: int = 2):
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.inlet = nn.Conv2d(3, width, 3, 1, 1)
        self.down_blocks = nn.ModuleList(UNetStage(a, b, depth) for a, b in zip([width, *widths], widths, strict=False))
        self.mid_block = UNetBlock(widths[-1], widths[-1])
        self.up_blocks = nn.ModuleList(
            UNetStage(2 * a, b, depth) for a, b in zip(reversed(widths), reversed([width, *widths[:-1]]), strict=True)
        )
        self.outlet = nn.Conv2d(width, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        skips = []
        for stage in self.down_blocks:
            x = stage(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.mid_block(x)
        for stage in self.up_blocks:
            x = stage(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.outlet(x)


def unet(*, batch: int = 2, size: int = 16, **sizes: Any) -> Case:
    """The own UNet, denoising."""
    model = UNet(**sizes)
    pictures, noise = torch.randn(batch, 3, size, size), torch.randn(batch, 3, size, size)
    return Case(model, lambda: F.mse_loss(model(pictures + noise), noise))


def _language(model: Any, batch: int = 2, time: int = 48) -> Case:
    ids = torch.randint(3, VOCABULARY, (batch, time))
    return Case(model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss)


def _vision(model: Any, size: int, batch: int = 2) -> Case:
    pictures, labels = torch.randn(batch, 3, size, size), torch.randint(0, model.config.num_labels, (batch,))
    return Case(model, lambda: model(pixel_values=pictures, labels=labels).loss)


def gpt2(*, layers: int = 3) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return _language(GPT2LMHeadModel(config))


def llama(*, layers: int = 3) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.1,
    )  # fmt: skip
    return _language(LlamaForCausalLM(config))


def qwen2_moe(*, layers: int = 3) -> Case:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, shared_expert_intermediate_size=32, attention_dropout=0.1,
    )  # fmt: skip
    return _language(Qwen2MoeForCausalLM(config))


def mamba(*, layers: int = 3) -> Case:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=layers, time_step_rank=4
    )
    return _language(MambaForCausalLM(config), time=16)


def t5(*, layers: int = 2) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    source, target = torch.randint(3, VOCABULARY, (2, 48)), torch.randint(3, VOCABULARY, (2, 32))
    return Case(model, lambda: model(input_ids=source, labels=target, use_cache=False).loss)


def bert(*, layers: int = 3) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    ids = torch.randint(3, VOCABULARY, (2, 48))
    return Case(model, lambda: model(input_ids=ids, labels=ids).loss)


def vit(*, layers: int = 3) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64, image_size=32,
        patch_size=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return _vision(ViTForImageClassification(config), 32)


def swin(*, depths: tuple[int, int] = (2, 2)) -> Case:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[*depths], num_heads=[2, 4], window_size=4,
        hidden_dropout_prob=0.1, drop_path_rate=0.1,
    )  # fmt: skip
    return _vision(SwinForImageClassification(config), 32)


def resnet50(*, batch: int = 2, size: int = 64) -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=10
    )
    return _vision(ResNetForImageClassification(config), size, batch)


def convnext(*, batch: int = 2) -> Case:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[12, 24, 48, 96], depths=[3, 3, 9, 3], drop_path_rate=0.1, num_labels=10)
    return _vision(ConvNextForImageClassification(config), 64, batch)


def whisper(*, layers: int = 3) -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=64, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.1, encoder_layerdrop=0.0, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    sound, text = torch.randn(2, 8, 128), torch.randint(3, VOCABULARY, (2, 32))
    return Case(model, lambda: model(input_features=sound, labels=text, use_cache=False).loss)


OWN: dict[str, Callable[..., Case]] = {
    "gpt": gpt,
    "gpt_sdpa": lambda **sizes: gpt(sdpa=True, **sizes),
    "resnet": resnet,
    "lstm": lstm,
    "unet": unet,
}
ARCHITECTURES: dict[str, Callable[..., Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen2_moe": qwen2_moe,
    "mamba": mamba,
    "t5": t5,
    "bert": bert,
    "vit": vit,
    "swin": swin,
    "resnet50": resnet50,
    "convnext": convnext,
    "unet": unet,
    "whisper": whisper,
}
BUILDERS = {**OWN, **ARCHITECTURES}
