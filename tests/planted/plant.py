"""A planted bug: one rule taken out of the source by one replacement, and the tests that must notice.

The replacement is text, so a change of the source that moves the rule makes the plant fail loudly instead of passing
for a tested rule.
"""

from dataclasses import dataclass
from pathlib import Path


class RottenPlant(Exception):
    """The source does not have the text of a plant exactly once any more."""


@dataclass(frozen=True, slots=True)
class Plant:
    """One bug. `tests` are node ids or files below the repository's root; each of them must fail with the bug."""

    name: str
    rule: str
    """What the source keeps to, in one sentence."""
    file: str
    text: str
    """Occurs in `file` exactly once."""
    replacement: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """Return the source with the bug; raises `RottenPlant`."""
        count = source.count(self.text)
        if count != 1:
            raise RottenPlant(f"{self.name}: {self.file} has its text {count} times")
        return source.replace(self.text, self.replacement)

    def apply(self, root: Path) -> None:
        """Plant the bug in the tree at `root`; raises `RottenPlant`."""
        path = root / self.file
        path.write_text(self.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
