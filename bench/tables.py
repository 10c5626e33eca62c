"""Tables in a document that a benchmark rewrites: what stands between its two markers."""

from collections.abc import Sequence
from pathlib import Path

PERFORMANCE = Path(__file__).parents[1] / "docs" / "performance.md"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column holds names and whose others hold figures."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def rewrite(file: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- /NAME -->`; raises `ValueError` if a marker is missing."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found_begin, rest = file.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{file}: no markers {begin.strip()} and {end}")
    file.write_text(f"{before}{begin}\n{text}\n\n{end}{after}", encoding="utf-8")


def shown(value: float | None) -> str:
    """Return a figure with three digits, or a dash for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
