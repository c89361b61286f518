"""Checks that includes go down: check_layers.py [ENGINE_FOLDER].

Prints a line for each that goes up, and ends with status 1 if there is one. The layers are the
numbered headings of engine/meson.build. A header has the layer of the .c file of its name; one
without says it in its first line, "// Layer 4: ...". minfer.h may be included by all.
"""

import re
import sys
from pathlib import Path

BACKENDS = 5  # a folder in engine/ is one device, and belongs to this layer


def read_layers(engine: Path) -> dict[str, int]:
    """Layer of each source that meson.build lists."""
    layers, layer = {}, None
    for line in (engine / "meson.build").read_text().splitlines():
        if heading := re.match(r"\s*# (\d) \w", line):
            layer = int(heading[1])
        elif source := re.match(r"\s*'([\w/]+\.c)',$", line):
            if layer is None:
                sys.exit(
                    f"{source[1]} is listed above the first layer heading of engine/meson.build"
                )
            layers[source[1]] = layer
    return layers


def read_includes(engine: Path) -> dict[str, list[str]]:
    """Project files that each file includes, as paths below the engine's folder."""
    includes = {}
    for file in sorted(engine.rglob("*.[ch]")):
        names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text(), re.MULTILINE)
        found = []
        for name in names:
            places = [
                p for p in ((file.parent / name).resolve(), (engine / name).resolve()) if p.exists()
            ]
            found.append(str(places[0].relative_to(engine.resolve())) if places else name)
        includes[str(file.relative_to(engine))] = found
    return includes


def find_errors(engine: Path) -> list[str]:
    """A line for each include that goes up, and for each file that no layer claims."""
    layers, includes = read_layers(engine), read_includes(engine)
    for file in includes:
        if "/" in file:
            layers.setdefault(file, BACKENDS)
    for file in includes:
        if file.endswith(".h") and file not in layers:
            said = re.match(r"// Layer (\d)\b", (engine / file).read_text())
            if file == "minfer.h":
                layers[file] = 0
            elif (source := file[:-1] + "c") in layers:
                layers[file] = layers[source]
            elif said:
                layers[file] = int(said[1])
    errors = [
        f"{file} has no layer: list it in engine/meson.build, or say it in a header's first line"
        for file in includes
        if file not in layers
    ]
    for file, names in includes.items():
        for name in names:
            if name not in layers:
                errors.append(f"{file} includes {name}, which has no layer")
            elif layers.get(file, layers[name]) < layers[name]:
                errors.append(
                    f"{file} (layer {layers[file]}) includes {name} (layer {layers[name]})"
                )
    return errors


def main() -> int:
    """Prints what is wrong; returns the exit status."""
    engine = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "engine"
    errors = find_errors(engine)
    for error in errors:
        print(error)
    print(f"layers: {len(read_includes(engine))} files, {len(errors)} errors")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
