import json
import sys
import textwrap

import pytest
import torch

from reforward._errors import InputError
from reforward._load import load
from reforward._options import ModelOptions
from reforward._train import train

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "n_positions": 64,
    "vocab_size": 100,
}

SCRIPT = """
    import torch
    from torch import nn
    import reforward as rf

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, scale=1.0):
            return {"loss": self.linear(x).square().mean() * scale}

    def with_step():
        model = Loss()
        x = torch.ones(2, 4)
        return model, rf.Step(lambda: model(x)["loss"], optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def with_step_without_optimizer():
        model = Loss()
        return model, rf.Step(lambda: model(torch.ones(2, 4))["loss"])

    def with_function():
        model = Loss()
        return model, lambda: model(torch.ones(2, 4))["loss"]

    def with_dict():
        return Loss(), {"x": torch.ones(2, 4), "scale": 2.0}

    def with_tuple():
        return Loss(), (torch.ones(2, 4), 2.0)

    def with_tensor():
        return Loss(), torch.ones(2, 4)

    def with_sizes(seq_len=4, batch_size=2):
        return Loss(), torch.ones(batch_size, 4)

    class Logits(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    def without_loss():
        return Logits(4, 4), {"x": torch.ones(2, 4)}

    def no_model():
        return 1

    def with_number():
        return Loss(), 3

    def raises():
        raise RuntimeError("out of luck")

    def needs_more(path):
        return Loss(), torch.ones(2, 4)

    constant = 3
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "user_script.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_script", raising=False)


def load_function(name, **options):
    return load(ModelOptions(model=f"user_script:{name}", **options))


@pytest.mark.parametrize("name", ["with_step", "with_function", "with_dict", "with_tuple", "with_tensor"])
def test_what_a_function_may_return(script, name):
    loaded = load_function(name)
    losses = [taken.loss for taken in train(loaded.step, 3)]
    assert losses[-1] < losses[0]


def test_a_step_without_optimizer_gets_the_one_asked_for(script):
    assert load_function("with_step_without_optimizer").step.optimizer is None
    assert isinstance(load_function("with_step_without_optimizer", optimizer="sgd").step.optimizer, torch.optim.SGD)


def test_sizes_are_passed_to_a_function_that_takes_them(script):
    (batch,) = load_function("with_sizes", batch_size=5).step.batches
    assert batch.shape == (5, 4)


def test_the_seed_decides_the_weights(script):
    def weights(seed):
        return load_function("with_dict", seed=seed).model.linear.weight

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_dtype_puts_autocast_around_any_step(script):
    loaded = load_function("with_function", dtype="bfloat16")
    seen = []
    loaded.model.linear.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    loaded.step.loss()
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "user_script"}, "takes module:function or hf:PATH, not 'user_script'"),
        ({"model": "no_such_module_here:f"}, "can't import 'no_such_module_here'.*No module named"),
        ({"model": "user_script:missing"}, "'user_script' has no function 'missing'"),
        ({"model": "user_script:constant"}, "'user_script' has no function 'constant'"),
        ({"model": "user_script:no_model"}, r"must return \(model, step\) or \(model, batch\), not a int"),
        ({"model": "user_script:with_number"}, "beside the model, not a int"),
        ({"model": "user_script:raises"}, r"raises failed: RuntimeError: out of luck \(.*user_script.py, line \d+\)"),
        ({"model": "user_script:needs_more"}, "needs an argument 'path'"),
        ({"model": "user_script:with_dict", "seq_len": 8}, "takes no argument 'seq_len', so --seq-len can't"),
        ({"model": "user_script:with_step", "optimizer": "sgd"}, "brings its own optimizer"),
        ({"model": "user_script:with_dict", "dtype": "int8"}, "no dtype 'int8'"),
        ({"model": "hf:nowhere"}, "no such file or directory"),
    ],
)
def test_bad_input_is_named(script, options, message):
    with pytest.raises(InputError, match=message):
        load(ModelOptions(**options))


def test_a_model_that_returns_no_loss_is_named(script):
    with pytest.raises(InputError, match="Logits returned no loss for its batch, but a dict; put"):
        load_function("without_loss").step.loss()


@pytest.fixture
def gpt2_directory(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return tmp_path


@pytest.mark.parametrize("name", ["", "config.json"])
def test_transformers_config_without_weights(gpt2_directory, name):
    loaded = load(ModelOptions(model=f"hf:{gpt2_directory / name}", seq_len=32, batch_size=2))
    assert type(loaded.model).__name__ == "GPT2LMHeadModel"
    assert loaded.model.training
    assert loaded.batches is not None
    batch = next(loaded.batches)
    assert batch["input_ids"].shape == (2, 32)
    assert batch["input_ids"].max() < GPT2["vocab_size"]
    losses = [taken.loss for taken in train(loaded.step, 20, loaded.batches)]
    assert losses[-1] < losses[0]


def test_transformers_directory_with_weights(gpt2_directory):
    first = load(ModelOptions(model=f"hf:{gpt2_directory}", seq_len=8, seed=1)).model
    first.save_pretrained(gpt2_directory)
    second = load(ModelOptions(model=f"hf:{gpt2_directory}", seq_len=8, seed=2)).model
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_sequences_longer_than_the_model_takes_are_refused(gpt2_directory):
    with pytest.raises(InputError, match="has 64 positions; --seq-len 65"):
        load(ModelOptions(model=f"hf:{gpt2_directory}", seq_len=65))


@pytest.mark.parametrize("text", ["{", '{"model_type": "no-such-model"}', "[]", '{"model_type": "vit"}'])
def test_unusable_configs_are_named(gpt2_directory, text):
    (gpt2_directory / "config.json").write_text(text)
    with pytest.raises(InputError, match="Transformers can't make a causal language model"):
        load(ModelOptions(model=f"hf:{gpt2_directory}"))
