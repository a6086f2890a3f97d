"""Weights from a directory of safetensors files; a rank reads only its slices."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..common.hf_config import MULTIMODAL_GEMMA, read_json
from ..common.model_error import ModelError
from ..common.model_struct import ModelConfig
from ..common.tensor_parallel import TensorShard
from .tensor_source import TensorSource

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT_MODEL_NAMES = (  # of the text model inside a multimodal one, as transformers has written them over time
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsSource(TensorSource):
    """All tensors of a directory: those that its index names, or those of its one file or all its files."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.source = str(folder)
        self.norm_offset = 1.0 if config.model_type == "gemma3_text" else 0.0
        self._slices: dict[str, Any] = {}
        self._files: list[Any] = []
        index = _read_index(folder)
        for path in sorted(set(index.values())) if index is not None else _unindexed_files(folder):
            self._open(path, index)
        if config.architecture == MULTIMODAL_GEMMA:
            self._slices = {_text_name(name): x for name, x in self._slices.items() if not name.startswith(OTHER_PARTS)}
        for name in list(self._slices):
            if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
                del self._slices[name]  # older files carry what follows from the config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """From the files' headers."""
        return {name: tuple(piece.get_shape()) for name, piece in self._slices.items()}

    def read_into(self, out: torch.Tensor, name: str, shard: TensorShard) -> None:
        """Read just these rows and columns."""
        piece = self._slices[name]
        if piece.get_dtype() not in DTYPES:
            raise ModelError(
                f"{self.source}: tensor {name} has type {piece.get_dtype()}; known are {', '.join(DTYPES)}"
            )
        rows = slice(shard.rows.start, shard.rows.end)
        try:
            if shard.columns is None:
                out.copy_(piece[rows])
            else:
                out.copy_(piece[rows, shard.columns.start : shard.columns.end])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.source}: tensor {name} cannot be read: {error}") from None

    def close(self) -> None:
        """Unmap the files."""
        self._slices.clear()
        self._files.clear()

    def _open(self, path: Path, index: dict[str, Path] | None) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            names = list(file.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path}: not a readable safetensors file (truncated?): {error}") from None
        self._files.append(file)
        for name in names:
            if name in self._slices:
                raise ModelError(f"{path}: tensor {name} is in two files")
            if index is None or index.get(name) == path:
                self._slices[name] = file.get_slice(name)
        for name, home in (index or {}).items():
            if home == path and name not in self._slices:
                raise ModelError(f"{path}: tensor {name} is not there, but {INDEX} says so")


def _text_name(name: str) -> str:
    for prefix, plain in TEXT_MODEL_NAMES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _unindexed_files(folder: Path) -> list[Path]:
    single = folder / SINGLE
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _read_index(folder: Path) -> dict[str, Path] | None:
    """Tensor name -> file, or None without an index. Files lie in the directory itself."""
    path = folder / INDEX
    if not path.is_file():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map is missing")
    files = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{path}: {name} lies in {file!r}, which is no .safetensors file of this directory")
        files[name] = folder / file
    return files
