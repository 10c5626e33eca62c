"""Which Tandem this is."""

import importlib.metadata


def version() -> str:
    """Return the installed version, "uninstalled" for a bare source tree."""
    try:
        return importlib.metadata.version("tandem")
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled"
