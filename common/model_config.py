"""The configuration of the model at a path, whatever kind it is."""

from pathlib import Path

from .gguf_config import read_gguf_config
from .gguf_file import GGUFFile
from .hf_config import read_hf_config
from .model_error import ModelError
from .model_struct import ModelConfig, RopeConfig

__all__ = ["ModelConfig", "ModelError", "RopeConfig", "find_gguf_file", "load_model_config"]

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def load_model_config(path: Path, load_format: str) -> ModelConfig:
    """Read and check the config of `path` for `load_format` (auto, safetensors, gguf or dummy).

    Raises ModelError for unknown architectures (it lists the known ones), values that are missing, out of range or
    contradict each other, pickled weights, and a path that does not hold what `load_format` says.
    """
    gguf_path = find_gguf_file(path, load_format)
    if gguf_path is not None:
        return read_gguf_config(GGUFFile(gguf_path))
    if not path.is_dir():
        raise ModelError(f"{path}: not a directory with config.json and safetensors")
    if load_format != "dummy":
        _refuse_without_safetensors(path)
    return read_hf_config(path)


def find_gguf_file(path: Path, load_format: str) -> Path | None:
    """The GGUF file that `path` is or holds, or None for a directory of safetensors."""
    if path.is_file():
        if load_format == "safetensors":
            raise ModelError(f"{path}: --load-format safetensors needs a directory")
        return path
    found = sorted(path.glob("*.gguf"))
    if load_format == "safetensors" or (load_format != "gguf" and _is_hf_model(path, load_format)):
        return None
    if len(found) > 1:
        raise ModelError(f"{path}: holds {len(found)} .gguf files; name one of them")
    if load_format == "gguf" and not found:
        raise ModelError(f"{path}: holds no .gguf file")
    return found[0] if found else None


def _is_hf_model(folder: Path, load_format: str) -> bool:
    return (folder / "config.json").is_file() and (load_format == "dummy" or any(folder.glob("*.safetensors")))


def _refuse_without_safetensors(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    for pattern in PICKLED:
        for pickled in folder.glob(pattern):
            raise ModelError(
                f"{folder}: {pickled.name} is a pickle, which can run code and is never loaded; "
                "convert the weights to safetensors"
            )
    raise ModelError(f"{folder}: holds no .safetensors file")
