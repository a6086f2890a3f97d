"""A bounds-checked reader of GGUF files (versions 2 and 3, little endian), over a memory map.

The file is taken as hostile: every count, length, type, shape and offset is checked against a cap and against the file's
size before it is used, so that a damaged file ends in a ModelError and never in a large allocation or a bad read.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import msgspec

from .model_error import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_METADATA = 100_000
MAX_TENSORS = 100_000
MAX_STRING_BYTES = 16 * 2**20
MAX_NAME_BYTES = 1024
MAX_ARRAY_VALUES = 2**23  # all arrays of the file together
MAX_DIMS = 4
MAX_ALIGNMENT = 2**16

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFType(msgspec.Struct, frozen=True):
    """A way to store values: blocks of `block_size` values in `block_bytes` bytes. `type_id` is ggml's number."""

    name: str
    type_id: int
    block_size: int
    block_bytes: int


TYPES = {
    kind.type_id: kind
    for kind in (
        GGUFType("F32", 0, 1, 4),
        GGUFType("F16", 1, 1, 2),
        GGUFType("Q4_0", 2, 32, 18),
        GGUFType("Q4_1", 3, 32, 20),
        GGUFType("Q5_0", 6, 32, 22),
        GGUFType("Q5_1", 7, 32, 24),
        GGUFType("Q8_0", 8, 32, 34),
        GGUFType("Q2_K", 10, 256, 84),
        GGUFType("Q3_K", 11, 256, 110),
        GGUFType("Q4_K", 12, 256, 144),
        GGUFType("Q5_K", 13, 256, 176),
        GGUFType("Q6_K", 14, 256, 210),
        GGUFType("BF16", 30, 1, 2),
    )
}


class GGUFTensor(msgspec.Struct, frozen=True):
    """One tensor. `shape` is row-major (the last dimension is contiguous); `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGUFType
    offset: int
    nbytes: int
    data: memoryview

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last dimension)."""
        return self.shape[-1] // self.type.block_size * self.type.block_bytes


class GGUFFile:
    """A GGUF file: `metadata` (plain Python values; arrays are lists) and `tensors` by name. Raises ModelError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._view = memoryview(_map_file(path))
        cursor = _Cursor(path, self._view)
        self.version, num_tensors, num_metadata = _read_header(cursor)
        self.metadata = _read_metadata(cursor, num_metadata)
        infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
        self.tensors = self._place_tensors(cursor, infos)

    def _place_tensors(self, cursor: "_Cursor", infos: list["_TensorInfo"]) -> dict[str, GGUFTensor]:
        alignment = _alignment(cursor, self.metadata)
        start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        end_before = start
        for info in sorted(infos, key=lambda info: info.offset):
            if info.name in tensors:
                raise cursor.error(f"tensor {info.name} appears twice")
            if info.offset % alignment:
                raise cursor.error(f"tensor {info.name}: offset {info.offset} is not a multiple of {alignment}")
            offset = start + info.offset
            if offset < end_before:
                raise cursor.error(
                    f"tensor {info.name}: its data at {offset} overlaps the tensor that ends {end_before}"
                )
            end_before = offset + info.nbytes
            if end_before > len(self._view):
                raise cursor.error(
                    f"tensor {info.name}: its data ends at byte {end_before}, but the file has {len(self._view)}"
                )
            data = self._view[offset:end_before]
            tensors[info.name] = GGUFTensor(info.name, info.shape, info.type, offset, info.nbytes, data)
        return tensors


class _TensorInfo(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    type: GGUFType
    offset: int  # from the start of the data section
    nbytes: int


class _Cursor:
    """A position in the file; every read is checked against its end."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.view = view
        self.size = len(view)
        self.position = 0
        self.rem_array_values = MAX_ARRAY_VALUES

    def error(self, what: str) -> ModelError:
        """The exception for something wrong in this file."""
        return ModelError(f"{self.path}: {what}")

    def take(self, size: int, what: str) -> memoryview:
        """The next `size` bytes."""
        end = self.position + size
        if end > self.size:
            raise self.error(f"{what} needs bytes {self.position} to {end}, but the file has {self.size} (truncated?)")
        piece = self.view[self.position : end]
        self.position = end
        return piece

    def u32(self, what: str) -> int:
        """The next four bytes."""
        value: int = U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """The next eight bytes."""
        value: int = U64.unpack(self.take(8, what))[0]
        return value

    def count(self, what: str, most: int) -> int:
        """A 64-bit count that may be at most `most`."""
        value = self.u64(what)
        if value > most:
            raise self.error(f"{what} is {value}, more than {most}")
        return value

    def string(self, what: str, most: int = MAX_STRING_BYTES) -> str:
        """A length and that many bytes of UTF-8."""
        piece = self.take(self.count(f"the length of {what}", most), what)
        try:
            return str(piece, "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason}") from None


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelError(f"{path}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    """(version, number of tensors, number of metadata entries)."""
    if bytes(cursor.take(4, "the magic number")) != MAGIC:
        raise cursor.error("not a GGUF file (it does not begin with GGUF)")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        why = "it is big endian" if big_endian else f"version {version} is not one of {VERSIONS}"
        raise cursor.error(f"cannot read this GGUF file: {why}")
    num_tensors = cursor.count("the number of tensors", MAX_TENSORS)
    num_metadata = cursor.count("the number of metadata entries", MAX_METADATA)
    return version, num_tensors, num_metadata


def _read_metadata(cursor: _Cursor, num_metadata: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = cursor.string("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.error(f"metadata {key} appears twice")
        metadata[key] = _read_value(cursor, cursor.u32(f"the type of {key}"), key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == STRING:
        return cursor.string(key)
    if kind == ARRAY:
        return _read_array(cursor, key)
    if kind not in SCALARS:
        raise cursor.error(f"metadata {key} has the unknown type {kind}")
    layout = struct.Struct("<" + SCALARS[kind])
    value = layout.unpack(cursor.take(layout.size, key))[0]
    return bool(value) if kind == BOOL else value


def _read_array(cursor: _Cursor, key: str) -> list[Any]:
    kind = cursor.u32(f"the element type of {key}")
    count = cursor.count(f"the length of {key}", cursor.rem_array_values)
    cursor.rem_array_values -= count
    if kind == STRING:
        return _read_strings(cursor, count, key)
    if kind not in SCALARS:
        raise cursor.error(f"metadata {key} is an array of the unsupported type {kind}")
    code = SCALARS[kind]
    values = list(struct.unpack(f"<{count}{code}", cursor.take(count * struct.calcsize(code), key)))
    return [bool(value) for value in values] if kind == BOOL else values


def _read_strings(cursor: _Cursor, count: int, key: str) -> list[str]:
    """`count` strings; written flat because vocabularies have a hundred thousand of them."""
    view, size, read_length = cursor.view, cursor.size, U64.unpack_from
    position = cursor.position
    strings = []
    try:
        for _ in range(count):
            if position + 8 > size:
                raise cursor.error(f"metadata {key} needs more than the {size} bytes of the file (truncated?)")
            start = position + 8
            length = read_length(view, position)[0]
            position = start + length
            if length > MAX_STRING_BYTES or position > size:
                raise cursor.error(f"metadata {key}: a string of {length} bytes at {start} does not fit the file")
            strings.append(str(view[start:position], "utf-8"))
    except UnicodeDecodeError as error:
        raise cursor.error(f"metadata {key}: a string is not UTF-8: {error.reason}") from None
    cursor.position = position
    return strings


def _read_tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.string("a tensor's name", MAX_NAME_BYTES)
    num_dims = cursor.u32(f"the number of dimensions of {name}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"tensor {name} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    shape = tuple(reversed([cursor.u64(f"a dimension of {name}") for _ in range(num_dims)]))
    type_id = cursor.u32(f"the type of {name}")
    if type_id not in TYPES:
        known = ", ".join(kind.name for kind in TYPES.values())
        raise cursor.error(f"tensor {name} has ggml type {type_id}, which is not supported; supported are {known}")
    kind = TYPES[type_id]
    if 0 in shape or shape[-1] % kind.block_size:
        raise cursor.error(f"tensor {name}: shape {shape} does not fit blocks of {kind.block_size} ({kind.name})")
    nbytes = math.prod(shape) // kind.block_size * kind.block_bytes
    if nbytes > cursor.size:
        raise cursor.error(f"tensor {name}: shape {shape} needs {nbytes} bytes, but the file has {cursor.size}")
    return _TensorInfo(name, shape, kind, cursor.u64(f"the offset of {name}"), nbytes)


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}, not a power of two from 8 to {MAX_ALIGNMENT}")
    return alignment
