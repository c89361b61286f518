"""Turns engine/minfer.h into cffi declarations: cdef.py HEADER OUTPUT COMPILER...

Keeps what the preprocessor says comes from the header itself, so the declarations cannot drift
from it and the system's headers do not get in.
"""

import re
import subprocess
import sys


def main() -> None:
    header, output, *compiler = sys.argv[1:]
    text = subprocess.run(
        [*compiler, "-E", header], check=True, capture_output=True, text=True
    ).stdout
    kept, inside = [], False
    for line in text.splitlines():
        marker = re.match(r'#\s+\d+\s+"(.*)"', line)
        if marker:
            inside = marker[1] == header
        elif inside and line.strip():
            kept.append(line + "\n")
    with open(output, "w") as file:
        file.writelines(kept)


main()
