"""What every test has in common: one thread, a fixed seed, a fast and repeatable hypothesis."""

from __future__ import annotations

import random

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile("reforward", max_examples=30, deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("reforward")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test starts from the same random state, whichever ran before it."""
    random.seed(0)
    torch.manual_seed(0)
