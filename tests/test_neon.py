"""The whole engine on NEON against this machine: equal bits give equal tokens, step after step."""

import os
import subprocess

import numpy as np
import pytest
import tinymodels

import minfer

PROMPT = list(range(3, 40))
STEPS = 24


@pytest.mark.parametrize(
    ("arch", "weights"), [("gemma3", "Q4_K"), ("llama", "F16"), ("qwen2", "Q5_0")]
)
def test_neon_decodes_the_same_tokens(tmp_path, arch, weights):
    program = os.environ.get("MINFER_ARM_DECODE")
    if not program:
        pytest.skip(
            "MINFER_ARM_DECODE is not set: tools/test builds for NEON where the cross compiler is"
        )
    path = tinymodels.write(
        tmp_path / "model.gguf", arch, weights, tied=False
    )  # tied ones repeat themselves
    command = [*program.split(), path, str(STEPS), *map(str, PROMPT)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with minfer.load(path) as engine:
        expected = [int(np.argmax(engine.forward_cached(PROMPT)))]
        while len(expected) < STEPS:
            expected.append(int(np.argmax(engine.forward_cached(expected[-1:]))))
    assert list(map(int, printed.split())) == expected
    assert len(set(expected)) > 3  # not one token for ever, which any arithmetic would give
