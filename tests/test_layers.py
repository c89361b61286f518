"""The layer check finds what it is for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def check(engine):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "check_layers.py", engine], capture_output=True, text=True
    )


@pytest.fixture
def engine(tmp_path):
    return shutil.copytree(ROOT / "engine", tmp_path / "engine")


def test_the_engine_is_in_order():
    done = check(ROOT / "engine")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "include", "complaint"),
    [
        ("error.h", "gguf.h", "error.h (layer 0) includes gguf.h (layer 1)"),
        ("kv_cache.h", "model.h", "kv_cache.h (layer 2) includes model.h (layer 6)"),
        ("cpu/panel.h", "../model.h", "cpu/panel.h (layer 5) includes model.h (layer 6)"),
        ("gguf.c", "cpu/panel.h", "gguf.c (layer 1) includes cpu/panel.h (layer 5)"),
        ("alloc.c", "absent.h", "alloc.c includes absent.h, which has no layer"),
    ],
)
def test_an_include_that_goes_up(engine, file, include, complaint):
    with open(engine / file, "a") as out:
        out.write(f'#include "{include}"\n')
    done = check(engine)
    assert done.returncode == 1 and complaint in done.stdout


def test_a_file_that_no_layer_claims(engine):
    (engine / "stray.c").write_text("")
    done = check(engine)
    assert done.returncode == 1 and "stray.c has no layer" in done.stdout
