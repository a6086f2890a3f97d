"""The GGUF reader: it reads what the gguf package writes, and refuses what is damaged."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.common.gguf_file import GGUFFile
from millstream.common.model_error import ModelError
from tests.model.gguf_writing import F32, write_gguf

U32, STRING, ARRAY = 4, 8, 9


def text(value: str) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    """A metadata entry."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "t", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    """A line of the tensor table."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(num_tensors: int = 0, num_metadata: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    """The first 24 bytes."""
    return magic + struct.pack("<IQQ", version, num_tensors, num_metadata)


def test_metadata_and_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        ".an.int": 7,
        ".a.float": 0.5,
        ".a.flag": True,
        ".a.text": "Grüße",
        ".some.ints": [1, -2, 3],
        ".some.texts": ["", "a", "ü"],
        ".some.flags": [True, False],
        ".some.floats": [0.25, 1.5],
    }
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, {name: (x, F32) for name, x in arrays.items()})
    file = GGUFFile(path)
    assert {f".{key}": value for key, value in file.metadata.items()} == {**metadata, ".general.architecture": "llama"}
    for name, array in arrays.items():
        assert file.tensors[name].shape == array.shape
        assert bytes(file.tensors[name].data) == array.tobytes()


HUGE = 2**63
BAD = {
    "empty": (b"", "the file is empty"),
    "magic": (header(magic=b"GGML"), "not a GGUF file"),
    "short": (b"GGUF\3", "the version needs bytes 4 to 8, but the file has 5"),
    "version 1": (header(version=1), "version 1 is not one of"),
    "big endian": (header(version=3 << 24), "big endian"),
    "tensor count": (header(num_tensors=HUGE), f"the number of tensors is {HUGE}"),
    "metadata count": (header(num_metadata=HUGE), f"the number of metadata entries is {HUGE}"),
    "key length": (header(0, 1) + struct.pack("<Q", HUGE), "the length of a metadata key"),
    "string length": (header(0, 1) + entry("k", STRING, struct.pack("<Q", 2**40)), "the length of k is"),
    "string past the end": (header(0, 1) + entry("k", STRING, struct.pack("<Q", 9)), "k needs bytes"),
    "not UTF-8": (header(0, 1) + entry("k", STRING, struct.pack("<Q", 1) + b"\xff"), "k is not UTF-8"),
    "unknown type": (header(0, 1) + entry("k", 77, b""), "metadata k has the unknown type 77"),
    "array count": (header(0, 1) + entry("k", ARRAY, struct.pack("<IQ", U32, HUGE)), "the length of k is"),
    "array past the end": (header(0, 1) + entry("k", ARRAY, struct.pack("<IQ", U32, 5)), "k needs bytes"),
    "nested array": (header(0, 1) + entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1)), "array of the unsupported type 9"),
    "string in an array": (
        header(0, 1) + entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2**40)),
        "a string of 1099511627776 bytes",
    ),
    "array of strings past the end": (header(0, 1) + entry("k", ARRAY, struct.pack("<IQ", STRING, 1)), "truncated"),
    "key twice": (header(0, 2) + entry("k", U32, b"1234") * 2, "metadata k appears twice"),
    "alignment": (
        header(0, 1) + entry("general.alignment", U32, struct.pack("<I", 24)),
        "general.alignment is 24, not a power of two",
    ),
    "no dimensions": (header(1) + tensor(dims=()), "0 dimensions"),
    "dimensions": (header(1) + tensor(dims=(1,) * 5), "5 dimensions"),
    "empty dimension": (header(1) + tensor(dims=(0,)), r"shape \(0,\) does not fit"),
    "overflow": (header(1) + tensor(dims=(2**40, 2**40)), "needs 4835703278458516698824704 bytes"),
    "type": (header(1) + tensor(kind=255), "ggml type 255, which is not supported; supported are F32"),
    "block": (header(1) + tensor(dims=(33,), kind=2), "does not fit blocks of 32"),
    "offset": (header(1) + tensor(offset=HUGE), "but the file has"),
    "unaligned": (header(1) + tensor(offset=4) + bytes(99), "offset 4 is not a multiple of 32"),
    "past the end": (header(1) + tensor(), "its data ends at byte"),
    "overlap": (header(2) + tensor("a", (16,)) + tensor("b") + bytes(199), "overlaps"),
    "name twice": (header(2) + tensor("a") + tensor("a", offset=32) + bytes(199), "tensor a appears twice"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_damaged_file_is_refused_with_what_is_wrong(name: str, tmp_path: Path) -> None:
    body, message = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(body)
    with pytest.raises(ModelError, match=message) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        GGUFFile(tmp_path / "none.gguf")


def test_all_arrays_together_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    array = struct.pack("<IQ", 0, 2**22) + bytes(2**22)
    path.write_bytes(header(0, 3) + b"".join(entry(f"k{i}", ARRAY, array) for i in range(3)))
    with pytest.raises(ModelError, match="the length of k2 is 4194304, more than 0"):
        GGUFFile(path)
