"""KV formats: how the rows of the cache are stored."""

from enum import StrEnum

from minfer.errors import ArgumentError, UnsupportedError


class KvFormat(StrEnum):
    """A storage format of K and V rows; equal to its name."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"

    @classmethod
    def parse(cls, text: str) -> "KvFormat":
        """Exactly one of the names; anything else is an ArgumentError that lists them."""
        try:
            return cls(text)
        except ValueError:
            names = ", ".join(cls)
            raise ArgumentError(f"unknown KV format {text!r:.60}; use one of {names}") from None


_READABLE = {"cpu": (KvFormat.F32,)}


def resolve_format(
    requested: str | None = None, *, device: str = "cpu", n_params: int = 0
) -> KvFormat:
    """The format that an engine on `device` with a model of `n_params` weights would use.

    None and "auto" leave the choice to the device; the CPU chooses f32 for every size. Raises
    ArgumentError for an unknown format or device, UnsupportedError for one the device cannot read.
    `load` asks the C library, which has the same rule; what it decided is Engine.kv_format.
    """
    if device not in _READABLE:
        raise ArgumentError(f"unknown device {device!r:.60}; use one of {', '.join(_READABLE)}")
    if n_params < 0:
        raise ArgumentError(f"n_params is {n_params}; it must not be negative")
    if requested is None or requested == "auto":
        return KvFormat.F32
    kind = KvFormat.parse(requested)
    if kind not in _READABLE[device]:
        raise UnsupportedError(f"the {device} device does not read a {kind} cache; use f32")
    return kind
