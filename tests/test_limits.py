"""minfer.measure_limits: its numbers, and what it refuses. The rest is in test_limits.c."""

import math

import pytest

import minfer


def test_numbers():
    limits = minfer.measure_limits(minfer.isas()[0], threads=1)
    assert limits._fields == ("int8_macs", "f32_fmas", "read_bytes")
    assert all(isinstance(rate, float) and 0 < rate < math.inf for rate in limits)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"isa": "sse9"}, minfer.ArgumentError, 'isa: "sse9" is not among .*scalar'),
        ({"isa": ""}, minfer.ArgumentError, "isa is empty"),
        ({"isa": b"avx2"}, minfer.ArgumentTypeError, "isa must be a str"),
        ({"threads": 0}, minfer.ArgumentError, "threads is 0"),
        ({"threads": 1025}, minfer.ArgumentError, "n_threads is 1025; at most 1024"),
        ({"threads": 1.0}, minfer.ArgumentTypeError, "threads must be an integer"),
    ],
)
def test_refusals(arguments, error, words):
    with pytest.raises(error, match=words):
        minfer.measure_limits(**arguments)


def test_the_variable_chooses_the_instruction_set(monkeypatch):
    monkeypatch.setenv("MINFER_ISA", "sse8")
    with pytest.raises(minfer.ArgumentError, match='MINFER_ISA: "sse8"'):
        minfer.measure_limits()
