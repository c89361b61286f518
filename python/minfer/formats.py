"""KV formats: how the rows of the cache are stored."""

from enum import StrEnum

from minfer._ffi import c_string, check, ffi, integer, lib, text
from minfer.errors import ArgumentError


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


def resolve_format(
    requested: str | None = None, *, device: str = "cpu", n_params: int = 0
) -> KvFormat:
    """The format that `requested` gives on `device` for a model of `n_params` weights.

    None and "auto" leave the choice to the device; the CPU chooses f32 for every size. Raises
    ArgumentError for an unknown format or device, UnsupportedError for one the device cannot read.
    """
    name = ffi.new("char **")
    asked = ffi.NULL if requested is None else c_string("requested", requested)
    size = integer("n_params", n_params, 0, 2**64 - 1)
    check(lib.mf_kv_format_resolve(name, asked, c_string("device", device), size))
    return KvFormat(text(name[0]))
