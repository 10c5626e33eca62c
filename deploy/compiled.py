"""The package compiled, installed into a folder of its own: `python deploy/compiled.py FOLDER`.

As the image of the gateway has it. A checkout stays interpreted, so that what runs is what the sources say now; put the
folder into PYTHONPATH, before the checkout, to use it. It is made anew only if the sources have changed.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
DIGEST = ".sources"
"""Names the sources that the folder was made from."""


class NotCompiled(Exception):
    """The compiler refuses; the message is what it said."""


def install(folder: Path) -> Path:
    """Make `folder` hold the package; returns it. Raises `NotCompiled`."""
    digest = _digest_of(_sources())
    if folder.joinpath(DIGEST).is_file() and folder.joinpath(DIGEST).read_text(encoding="ascii") == digest:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="tandem-compile-") as place:
        for source in _sources():
            copy = Path(place) / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
        _build(Path(place), folder)
    folder.joinpath(DIGEST).write_text(digest, encoding="ascii")
    return folder


def _sources() -> list[Path]:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))
    packages = [pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    found = (path for package in packages for path in ROOT.joinpath(package).rglob("*") if path.is_file())
    return [*(ROOT / name for name in FILES), *sorted(path for path in found if "__pycache__" not in path.parts)]


def _digest_of(sources: list[Path]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for source in sources:
        digest.update(f"{source.relative_to(ROOT)}\0".encode() + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _build(place: Path, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--target", str(folder), str(place)],
        env={
            **os.environ,
            "TANDEM_COMPILE": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotCompiled(f"{done.stdout}\n{done.stderr}")


def main() -> int:
    """Install; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    try:
        install(parser.parse_args().folder)
    except NotCompiled as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
