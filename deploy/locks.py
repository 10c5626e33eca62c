"""The lock files: exact pins of everything that the project's requirements reach, as installed in this environment.

`make lock` writes them, `make check` compares them. The requirements of a package are followed through the metadata of
what is installed, so neither needs an index, and a pin is always a version that was run here. A package that
pyproject.toml lists under `tool.tandem.lock.without-dependencies` is pinned, but what it asks for is not.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Written by `make lock` from pyproject.toml. Install with: pip install --no-deps -r {name}\n"

# The interpreters and platforms that one lock serves.
ENVIRONMENTS = [
    {"python_version": full[:4], "python_full_version": full, "sys_platform": system, "platform_machine": machine}
    for full in ("3.11.0", "3.11.9", "3.12.9", "3.13.9")
    for system, machine in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
]


class LockProblem(Exception):
    """A lock cannot be made here; the message is one line for a person."""


def main() -> int:
    """Write or check the locks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check = parser.parse_args().check
    try:
        texts = lock_texts(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    except LockProblem as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    stale = [name for name, text in texts.items() if _current(name) != text]
    if is_check and stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run `make lock`\n")
        return 1
    for name in stale:
        (ROOT / name).write_text(texts[name], encoding="utf-8")
    return 0


def lock_texts(pyproject: dict[str, Any]) -> dict[str, str]:
    """The wanted content of every lock file, by file name."""
    project, groups, lock = pyproject["project"], pyproject["dependency-groups"], pyproject["tool"]["tandem"]["lock"]
    gateway = project["dependencies"]
    runtime = [*gateway, *project["optional-dependencies"]["worker"], *groups["embedded"]]
    wanted = {
        "requirements-gateway.lock": gateway,
        "requirements.lock": runtime,
        "requirements-dev.lock": [*runtime, *groups["dev"]],
        "requirements-compile.lock": groups["compile"],
    }
    leaves: set[str] = {canonicalize_name(name) for name in lock["without-dependencies"]}
    elsewhere: dict[str, Version] = {name: Version(version) for name, version in lock["elsewhere"].items()}
    return {
        name: HEADER.format(name=name) + Closure(leaves, elsewhere).follow(lines).text()
        for name, lines in wanted.items()
    }


def _current(name: str) -> str | None:
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else None


class Closure:
    """Every package that some requirements reach, each with its version and the environments that need it.

    `leaves` are not followed; `elsewhere` gives the versions of packages that only other machines need.
    """

    def __init__(self, leaves: set[str], elsewhere: dict[str, Version]) -> None:
        self._leaves = leaves
        self._elsewhere = elsewhere
        self._versions: dict[str, Version] = {}
        self._needed_in: dict[str, set[int]] = {}
        self._markers: dict[str, set[str]] = {}
        self._followed: set[tuple[str, str]] = set()

    def follow(self, lines: Iterable[str]) -> Self:
        """Add the packages of these requirement lines and all that they require."""
        waiting = [(Requirement(line), "") for line in lines]
        while waiting:
            requirement, extra = waiting.pop()
            needed_in = _environments_of(requirement, extra)
            if needed_in:
                name = canonicalize_name(requirement.name)
                self._versions[name] = self._version_of(name, requirement)
                self._needed_in.setdefault(name, set()).update(needed_in)
                self._markers.setdefault(name, set()).add(str(requirement.marker))
                waiting += self._below(name, {"", *requirement.extras})
        return self

    def text(self) -> str:
        """One pinned line per package, by name."""
        pins = sorted(self._versions.items())
        return "".join(f"{name}=={version.public}{self._marker(name)}\n" for name, version in pins)

    def _marker(self, name: str) -> str:
        if len(self._needed_in[name]) == len(ENVIRONMENTS):
            return ""
        return " ; " + " or ".join(sorted(self._markers[name]))

    def _version_of(self, name: str, requirement: Requirement) -> Version:
        try:
            version = self._elsewhere.get(name) or Version(metadata.version(name))
        except metadata.PackageNotFoundError:
            raise LockProblem(f"{requirement} is neither installed nor under tool.tandem.lock.elsewhere") from None
        if not requirement.specifier.contains(version, prereleases=True):
            raise LockProblem(f"{requirement} is required but {version} is what is here")
        return version

    def _below(self, name: str, extras: set[str]) -> list[tuple[Requirement, str]]:
        if name in self._leaves or name in self._elsewhere:
            return []
        news = {(name, extra) for extra in extras} - self._followed
        self._followed |= news
        return [(Requirement(line), extra) for _, extra in news for line in metadata.requires(name) or []]


def _environments_of(requirement: Requirement, extra: str) -> set[int]:
    """Which of ENVIRONMENTS need it when the package that asks for it is installed with this extra."""
    marker = requirement.marker
    return {
        number
        for number, environment in enumerate(ENVIRONMENTS)
        if marker is None or marker.evaluate({**environment, "extra": extra})
    }


if __name__ == "__main__":
    sys.exit(main())
