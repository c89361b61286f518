"""Fixtures that all tests share."""

import json
from pathlib import Path

import pytest
import tinymodels

from minfer.demo import model_path


@pytest.fixture(scope="session")
def demo_path():
    """The packaged Gemma 3 270M, joined at the first use."""
    return model_path("demo")


@pytest.fixture(scope="session")
def goldens():
    """Prompts with the token ids and greedy continuations of the float32 reference."""
    return json.loads((Path(__file__).parent / "goldens" / "gemma_reference.json").read_text())


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A gemma3 of a few hundred KB, with random weights and a window of 8."""
    return tinymodels.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "gemma3")


@pytest.fixture
def engine(shared):
    """The module's `shared` engine, with empty sequences."""
    for seq in range(shared.n_seq):
        shared.kv.free(seq)
    return shared
