"""The header of a GGUF file: architecture, tensors and how they are stored, checked before anything is dequantised.

Layout after the GGUF specification, versions 2 and 3, little endian: magic, version, counts, key-values, tensor table,
padding to the alignment, tensor data. Arrays of strings (the vocabulary) are stepped over, so this takes a fraction of a second.
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freemoe.core.errors import DataError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
INSTALL = "pip install 'freemoe[gguf]'"

# Kind of a metadata value -> its struct format; beside these there are strings and arrays.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself."""

    architecture: str  # llama.cpp's name of it, e.g. ``llama``
    values: dict[str, Any]  # Metadata without arrays
    shapes: dict[str, tuple[int, ...]]  # Tensor -> shape, in torch's order
    types: dict[str, str]  # Tensor -> name of its type, e.g. ``Q4_1``

    @property
    def stored_as(self) -> str:
        """The type that most weights have."""
        weights: Counter[str] = Counter()
        for name, shape in self.shapes.items():
            weights[self.types[name]] += math.prod(shape)
        return weights.most_common(1)[0][0] if weights else "no tensors"

    def describe_origin(self, dtype: str = "auto") -> str:
        """What a base was before it was loaded: ``dequantised from GGUF Q4_1 to float32``."""
        note = f"dequantised from GGUF {self.stored_as} to {'float32' if dtype == 'auto' else dtype}"
        if "rope_freqs.weight" in self.types:
            note += "; its scaled rotary frequencies are not read, so text beyond the first training's context suffers"
        return note


def is_gguf(model: str | Path) -> bool:
    """Whether a base is named as a GGUF file."""
    return str(model).lower().endswith(".gguf") and not Path(model).is_dir()


def require_package(path: str | Path) -> None:
    """Say what to install when what reads GGUF files is missing.

    Raises:
        DataError: The package gguf or accelerate is not installed.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise DataError(
                f"{str(path)!r} is a GGUF file; reading it needs the package {package}, which is missing. Install it with "
                f"{INSTALL}"
            )


def read_header(path: str | Path) -> GGUFHeader:
    """Read a file's header, and check that its tensors are all there and of types that can be dequantised.

    Raises:
        DataError: No such file, no GGUF, truncated, one part of several, of a version or with a type that cannot be read;
            or the package that reads it is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"There is no file {str(path)!r}.")
    with path.open("rb") as stream:
        start = stream.read(len(MAGIC))
        if start != MAGIC:
            raise DataError(f"{str(path)!r} is not a GGUF file: it begins with {start!r}, not with {MAGIC!r}.")
        require_package(path)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse_header(path, data)
            except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
                raise _truncated_error(path, f"its header ends too early or is damaged ({error})") from None


def gguf_origin(model: str | Path, dtype: str = "auto") -> str | None:
    """What a base was before it was loaded, where that is not the same (`GGUFHeader.describe_origin`)."""
    return read_header(model).describe_origin(dtype) if is_gguf(model) else None


def _truncated_error(path: Path, why: str) -> DataError:
    return DataError(f"{str(path)!r} is truncated: {why}. Copy or download it again.")


class _ByteReader:
    """Reads the file's values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, len(MAGIC)

    def read_struct(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def read_string(self) -> str:
        (length,) = self.read_struct("Q")
        self._skip_bytes(length)
        return self.data[self.at - length : self.at].decode("utf-8")

    def read_value(self, kind: int) -> Any:
        """One metadata value; None for an array, which is stepped over."""
        if kind == _STRING:
            return self.read_string()
        if kind == _ARRAY:
            inner, count = self.read_struct("IQ")
            if inner in _SCALARS:
                self._skip_bytes(count * struct.calcsize(f"<{_SCALARS[inner]}"))
                return None
            for _ in range(count):
                if inner == _STRING:
                    self._skip_bytes(*self.read_struct("Q"))
                else:
                    self.read_value(inner)
            return None
        if kind not in _SCALARS:
            raise struct.error(f"a value of kind {kind}")
        return self.read_struct(_SCALARS[kind])[0]

    def _skip_bytes(self, length: int) -> None:
        self.at += length
        if self.at > len(self.data):
            raise struct.error(f"{length} bytes are announced beyond the end")


def _parse_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    cursor = _ByteReader(data)
    (version,) = cursor.read_struct("I")
    if version not in VERSIONS:
        raise DataError(f"{str(path)!r} is GGUF version {version}; versions that can be read: 2 and 3, little endian.")
    tensors, pairs = cursor.read_struct("QQ")
    values = {}
    for _ in range(pairs):
        key = cursor.read_string()
        value = cursor.read_value(*cursor.read_struct("I"))
        if value is not None:
            values[key] = value
    if not isinstance(values.get("general.architecture"), str):
        raise DataError(f"{str(path)!r} does not name its architecture (general.architecture); it is no model.")
    if (parts := values.get("split.count", 1)) > 1:
        raise DataError(
            f"{str(path)!r} is one of {parts} parts of a model. Join them first: llama-gguf-split --merge FIRST-PART OUT"
        )
    shapes, types, ends = {}, {}, [0]
    for _ in range(tensors):
        name = cursor.read_string()
        (rank,) = cursor.read_struct("I")
        shapes[name] = tuple(reversed(cursor.read_struct(f"{rank}Q")))
        number, offset = cursor.read_struct("IQ")
        if number not in {int(t) for t in GGMLQuantizationType}:
            raise _unsupported_type_error(path, name, f"type {number}")
        kind = GGMLQuantizationType(number)
        types[name] = kind.name
        block, size = GGML_QUANT_SIZES[kind]
        ends.append(offset + math.prod(shapes[name]) // block * size)
    for kind in dict.fromkeys(types.values()):
        if not _can_dequantise(kind):
            raise _unsupported_type_error(path, next(n for n, t in types.items() if t == kind), kind)
    alignment = values.get("general.alignment", 32)
    needed = math.ceil(cursor.at / alignment) * alignment + max(ends)
    if needed > len(data):
        raise _truncated_error(path, f"its tensors end at byte {needed:,}, the file at {len(data):,}")
    return GGUFHeader(values["general.architecture"], values, shapes, types)


def _can_dequantise(kind: str) -> bool:
    """Whether the package gguf turns this type into floats, tried on an empty block."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    number = GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), dtype=np.uint8), number)
    except NotImplementedError:
        return False
    return True


def _unsupported_type_error(path: Path, tensor: str, kind: str) -> DataError:
    from gguf import GGMLQuantizationType

    known = [t.name for t in GGMLQuantizationType if _can_dequantise(t.name)]
    return DataError(
        f"{str(path)!r} holds tensors in {kind} ({tensor}), which cannot be dequantised here; can be: {', '.join(known)}. Use "
        "a file of one of these types."
    )
