"""The project's own Python files, as the architecture tests look at them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("tandem", "gateway", "prefill_worker", "decode_worker", "common", "kernels", "proto")
OTHER_FOLDERS = ("bench", "deploy", "tests")


def python_files(*folders: str) -> list[Path]:
    """Every Python file below these folders of the repository that a person wrote, sorted."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if "_pb2" not in path.name)


def module_names(package: str) -> list[str]:
    """The dotted names of a package and of all modules below it, generated ones included."""
    files = sorted((ROOT / package).rglob("*.py"))
    dotted = (path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in files)
    return [name.removesuffix(".__init__") for name in dotted]
