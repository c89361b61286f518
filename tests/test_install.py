"""The library without Python: what `meson install` gives, and a C program built on that alone."""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import minfer

ROOT = Path(__file__).parent.parent
IDS = [5, 9, 12, 60, 33, 7]


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("install")
    run("meson", "setup", folder / "build", ROOT, f"--prefix={folder / 'usr'}", "--libdir=lib")
    run("meson", "install", "-C", folder / "build", "--quiet")
    return folder / "usr"


def test_installed_files(prefix):
    files = {str(p.relative_to(prefix)) for p in prefix.rglob("*") if not p.is_dir()}
    assert files == {
        "include/minfer.h",
        "lib/libminfer.a",
        "lib/libminfer.so",
        "lib/libminfer.so.0",
        f"lib/libminfer.so.{minfer.__version__}",
        "lib/pkgconfig/minfer.pc",
    }


def test_only_the_public_header_is_exported(prefix):
    symbols = run("nm", "-D", "--defined-only", prefix / "lib" / "libminfer.so")
    exported = {line.split()[2] for line in symbols.splitlines()}
    header = re.sub(r"//.*", "", (prefix / "include" / "minfer.h").read_text())
    declared = set(re.findall(r"\b(mf_\w+)\(", header))
    assert exported == declared and len(declared) > 30


def test_the_extension_exports_nothing_of_the_engine():
    (native,) = Path(minfer.__file__).parent.glob("_native*.so")
    assert native.name == "_native.abi3.so"
    symbols = run("nm", "-D", "--defined-only", native)
    assert [line.split()[2] for line in symbols.splitlines()] == ["PyInit__native"]


def test_the_package_holds_no_library():
    package = Path(minfer.__file__).parent
    kinds = {p.suffix for p in package.rglob("*") if p.is_file()} - {".pyc"}
    assert kinds == {".py", ".pyi", ".so", ".typed"}
    assert len(list(package.rglob("*.so"))) == 1


@pytest.mark.parametrize("linking", [(), ("--static",)], ids=["shared", "static"])
def test_a_program_on_the_public_abi(prefix, tiny_path, tmp_path, linking):
    environment = os.environ | {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", *linking, "minfer", env=environment).split()
    if linking:
        flags = [
            str(prefix / "lib" / "libminfer.a") if flag == "-lminfer" else flag for flag in flags
        ]
    program = tmp_path / "decode"
    source = ROOT / "tools" / "decode.c"
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    run(os.environ.get("CC", "cc"), "-std=c11", *warnings, source, *flags, "-o", program)

    environment = os.environ | {"LD_LIBRARY_PATH": str(prefix / "lib")}
    printed = run(program, tiny_path, 12, *IDS, env=environment)
    with minfer.load(tiny_path) as engine:
        expected = [int(np.argmax(engine.forward_cached(IDS)))]
        while len(expected) < 12:
            expected.append(int(np.argmax(engine.forward_cached(expected[-1:]))))
    assert list(map(int, printed.split())) == expected

    saved = tmp_path / "decode.kv"  # the same in three processes
    parts = [
        run(program, "-s", saved, tiny_path, n, *ids, env=environment)
        for n, ids in ((5, IDS), (1, ()), (6, ()))
    ]
    assert list(map(int, " ".join(parts).split())) == expected

    refused = subprocess.run(
        [program, "absent.gguf", "1", "1"], env=environment, capture_output=True, text=True
    )
    assert refused.returncode == 1 and "absent.gguf" in refused.stderr
