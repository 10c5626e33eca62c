"""The package, with what handles every token compiled to C by mypyc if TANDEM_COMPILE=1; else all of it is interpreted.

The sources are the same: `tests/architecture/test_compiled.py` lets their tests run against the compiled modules.
"""

import os
import tomllib
from pathlib import Path

from setuptools import Extension, setup


def _extensions() -> list[Extension]:
    if os.environ.get("TANDEM_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    paths = [f"{module.replace('.', '/')}.py" for module in project["tool"]["tandem"]["compiled"]["modules"]]
    extensions: list[Extension] = mypycify(paths, opt_level="3")
    return extensions


setup(ext_modules=_extensions())
