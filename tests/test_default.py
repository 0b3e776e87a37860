import itertools

import pytest
import torch

from reforward._default import GPT, GPTConfig, default_step, embedded_text, make_optimizer, text_batches
from reforward._errors import InputError
from reforward._train import train

SMALL = GPTConfig(vocabulary=256, max_seq_len=32, layers=2, heads=2, width=16)


def small_default(monkeypatch, **options):
    monkeypatch.setattr("reforward._default.GPTConfig", lambda max_seq_len: SMALL)
    return default_step(seq_len=32, batch_size=2, device="cpu", **options)


def test_the_embedded_model_is_the_size_that_the_docs_say():
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 50_701_312


def test_the_embedded_text_is_long_enough_and_ascii():
    text = embedded_text()
    assert len(text) > 250_000
    assert text.decode("ascii").startswith("Genesis 1\n\nIn the beginning God created the heaven and the earth.")


def test_the_model_is_causal():
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().amax(-1).min() > 0


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model, tokens = GPT(SMALL), torch.randint(256, (1, 32))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_a_target_is_the_next_token_and_drawing_moves_no_global_stream():
    before = torch.get_rng_state()
    batch = next(text_batches(seq_len=16, batch_size=3))
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert bytes(batch.tokens[0].tolist()) in embedded_text()
    assert torch.equal(before, torch.get_rng_state())


def test_the_seed_decides_everything(monkeypatch):
    def losses(seed):
        _, step, batches = small_default(monkeypatch, seed=seed)
        return [taken.loss for taken in train(step, 2, batches)]

    assert losses(1) == losses(1) != losses(2)


def test_training_lowers_the_loss(monkeypatch):
    _, step, batches = small_default(monkeypatch)
    losses = [taken.loss for taken in train(step, 60, batches)]
    assert sum(losses[-10:]) / 10 < losses[0] - 0.1


def test_bfloat16_is_autocast_with_float32_parameters(monkeypatch):
    model, step, _ = small_default(monkeypatch, dtype="bfloat16")
    seen = []
    model.blocks[0].mlp.up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    step.loss()
    assert seen == [torch.bfloat16]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_smaller_vocabularies_take_bytes_modulo_their_size():
    batches = text_batches(seq_len=64, batch_size=4, vocabulary=50)
    assert max(batch.tokens.max().item() for batch in itertools.islice(batches, 5)) < 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len must be at least 1, not 0"),
        ({"batch_size": -1}, "batch_size must be at least 1, not -1"),
        ({"seq_len": 10**7}, "below the length of the embedded text"),
        ({"dtype": "float8", "seq_len": 8}, "no dtype 'float8'"),
        ({"optimizer": "lion", "seq_len": 8}, "no optimizer 'lion'"),
    ],
)
def test_bad_values_are_named(monkeypatch, options, message):
    monkeypatch.setattr("reforward._default.GPTConfig", lambda max_seq_len: SMALL)
    with pytest.raises(InputError, match=message):
        default_step(**options)


def test_a_frozen_model_has_nothing_to_optimize():
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(InputError, match="Linear has no parameter that requires grad"):
        make_optimizer("adamw", model)
