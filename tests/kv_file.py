"""Session files as bytes: docs/session-format.md once more, in Python and from the other side.

Owns a reader and a writer of the container that share no code with the engine, so that a test can
change any field and put the checksums right again. `Parts` is what a file says; `pack` gives the
one file that says it.
"""

import struct
from dataclasses import dataclass, replace

MAGIC = b"\x89MFK\r\n\x1a\n"
HEADER = ["version", "flags", "n_file", "n_header", "n_metadata", "n_sections"]
HEADER_LAYOUT = struct.Struct("<8s2I2Q2I")
METADATA = ["backend", "n_layer", "n_ctx", "n_embd", "n_head_kv", "head_dim", "row_bytes",
            "n_groups", "model[0]", "model[1]"]  # fmt: skip
METADATA_LAYOUT = struct.Struct("<8I2Q")
ENTRY = ["type", "index", "offset", "n", "checksum"]
ENTRY_LAYOUT = struct.Struct("<2I3Q")
KINDS, SEQS, ROWS, KEYS, VALUES, HOST = range(1, 7)
ALIGN = 64

_MASK = 2**64 - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def _rotated(x, bits):
    return (x << bits | x >> (64 - bits)) & _MASK


def _round(lane, word):
    return _rotated((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def xxh64(data):
    """XXH64 with seed 0."""
    n = len(data)
    stripes = n // 32
    if stripes:
        lanes = [_P1 + _P2 & _MASK, _P2, 0, -_P1 & _MASK]
        words = struct.unpack_from(f"<{4 * stripes}Q", data)
        for i in range(4):
            lane = lanes[i]
            for word in words[i::4]:
                lane = _round(lane, word)
            lanes[i] = lane
        h = sum(_rotated(lane, r) for lane, r in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            h = ((h ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        h = _P5
    h = (h + n) & _MASK
    at = 32 * stripes
    for _ in range((n - at) // 8):
        h = _rotated(h ^ _round(0, int.from_bytes(data[at : at + 8], "little")), 27)
        h, at = (h * _P1 + _P4) & _MASK, at + 8
    if n - at >= 4:
        h ^= int.from_bytes(data[at : at + 4], "little") * _P1 & _MASK
        h, at = (_rotated(h, 23) * _P2 + _P3) & _MASK, at + 4
    for byte in data[at:]:
        h = _rotated(h ^ byte * _P5 & _MASK, 11) * _P1 & _MASK
    h = (h ^ h >> 33) * _P2 & _MASK
    h = (h ^ h >> 29) * _P3 & _MASK
    return h ^ h >> 32


@dataclass(frozen=True)
class Parts:
    """sections: {(type, index): bytes} in the order of the file."""

    flags: int
    metadata: bytes
    sections: dict

    def meta(self):
        return dict(zip(METADATA, METADATA_LAYOUT.unpack(self.metadata), strict=True))

    def with_meta(self, **changes):
        values = {**self.meta(), **changes}
        return replace(self, metadata=METADATA_LAYOUT.pack(*(values[f] for f in METADATA)))

    def with_section(self, key, data):
        return replace(self, sections={**self.sections, key: data})

    def without(self, key):
        return replace(self, sections={k: v for k, v in self.sections.items() if k != key})


def pack(parts, header=(), entries=(), checksum=0):
    """The file of these parts, its sections in the order given. `header`: {field: value} of the
    header, `entries`: {(i, field): value} of the table, both instead of what is right; the header's
    checksum is right for them, but for `checksum`, which is xored."""
    n_header = HEADER_LAYOUT.size + len(parts.metadata) + ENTRY_LAYOUT.size * len(parts.sections)
    n_header += 8
    table, body, end = [], b"", n_header
    for (kind, index), data in parts.sections.items():
        start = -(-end // ALIGN) * ALIGN
        body += bytes(start - end) + data
        table.append([kind, index, start, len(data), xxh64(data)])
        end = start + len(data)
    for (i, field), value in dict(entries).items():
        table[i][ENTRY.index(field)] = value
    fields = dict(magic=MAGIC, version=2, flags=parts.flags, n_file=end, n_header=n_header,
                  n_metadata=len(parts.metadata), n_sections=len(table))  # fmt: skip
    fields.update(header)
    front = HEADER_LAYOUT.pack(*fields.values()) + parts.metadata
    front += b"".join(ENTRY_LAYOUT.pack(*entry) for entry in table)
    return front + (xxh64(front) ^ checksum).to_bytes(8, "little") + body


def unpack(data):
    """The parts of a file that is known to be good."""
    magic, version, flags, _, _, n_metadata, n_sections = HEADER_LAYOUT.unpack_from(data)
    assert (magic, version) == (MAGIC, 2)
    at = HEADER_LAYOUT.size + n_metadata
    sections = {}
    for i in range(n_sections):
        kind, index, offset, n, _ = ENTRY_LAYOUT.unpack_from(data, at + i * ENTRY_LAYOUT.size)
        sections[kind, index] = data[offset : offset + n]
    return Parts(flags, data[HEADER_LAYOUT.size : at], sections)


def books(parts):
    """[(section, offset in it, name)] of every number of the bookkeeping sections."""
    out = []

    def walk(key, at, names):
        for name in names:
            out.append((key, at, name))
            at += 4
        return at

    def number(key, at):
        return int.from_bytes(parts.sections[key][at : at + 4], "little")

    key = (SEQS, 0)
    n_seqs, at = number(key, 0), walk(key, 0, ["n_seqs", "n_groups"])
    for _ in range(n_seqs):
        n_runs = number(key, at + 12)
        at = walk(key, at, ["id", "len", "clean", "n_runs"] + ["row", "pos"] * n_runs)
    assert at == len(parts.sections[key])
    for key in (k for k in parts.sections if k[0] == ROWS):
        at = walk(key, 0, ["window", "n_rows"])
        for _ in range(n_seqs):
            n_spans = number(key, at + 4)
            at = walk(key, at, ["base", "n_spans"] + ["first", "len"] * n_spans)
        assert at == len(parts.sections[key])
    return out
