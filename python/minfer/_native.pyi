"""The extension module that cffi makes from engine/minfer.h."""

from typing import Any

ffi: Any
lib: Any
