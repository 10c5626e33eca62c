"""The examples of our documents, run as a reader runs them.

Blocks marked `sh` and `python` are examples. What needs more than a running cluster (starting one, Docker, files of
one's own) stands in blocks without a mark.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.source_tree import ROOT

TIMEOUT_S = 120.0
REQUEST_ID = "chatcmpl-" + "0" * 32
"""Stands for the id that an example leaves to its reader."""

_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Example:
    """A block of a document. `number` counts the examples of its document."""

    document: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}-{self.number}-{self.language}"

    def run(self, addresses: Mapping[str, str], folder: Path) -> str:
        """Return what the example prints in `folder`. `addresses`: the real ones by those that are written."""
        text = self.text.replace("chatcmpl-...", REQUEST_ID)
        for written, real in addresses.items():
            text = text.replace(written, real)
        shell = [
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f'grpcurl() {{ "{sys.executable}" -m tests.support.grpcurl "$@"; }}\n{text}',
        ]
        command = shell if self.language == "sh" else [sys.executable, "-W", "error", "-c", text]
        result = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert result.returncode == 0, f"{text}\n{result.stdout}{result.stderr}"
        assert '"error"' not in result.stdout, f"{text}\n{result.stdout}"
        return result.stdout


def examples_of(document: str) -> list[Example]:
    """Return the examples of a document, named by its path from the root."""
    blocks = _BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))
    return [Example(document, number, *block) for number, block in enumerate(blocks, 1)]
