"""One field of a settings class: what `parse` and `--help` need to know beside its name and default."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")

_KEY = "setting"
ENVIRONMENT_PREFIX = "TANDEM_"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """How a field is read and explained.

    `is_secret`: has no flag of its own (a flag shows in the process list) but one for a file that holds it, and its
    value appears nowhere. `is_shown` False: it may contain a password, so `repr` and error lines leave it out.
    """

    help: str
    read: Callable[[str], object]
    env: str | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""
    is_secret: bool = False
    is_shown: bool = True


def setting(
    default: ValueT,
    help: str,
    read: Callable[[str], ValueT],
    *,
    env: str | None = None,
    choices: tuple[str, ...] = (),
    unit: str = "",
    is_secret: bool = False,
    is_shown: bool = True,
) -> Any:  # noqa: ANN401 - a dataclass field stands where its value will be, as in dataclasses.field
    """Return the dataclass field of a setting. Its variable is `TANDEM_<NAME>` unless `env` names another one."""
    described = Setting(help, read, env, choices, unit, is_secret, is_shown and not is_secret)
    return dataclasses.field(default=default, repr=described.is_shown, metadata={_KEY: described})


def setting_of(field: "dataclasses.Field[Any]") -> Setting:
    """Return what was declared with `setting`."""
    described = field.metadata[_KEY]
    assert isinstance(described, Setting)
    return described


def flag_of(field: "dataclasses.Field[Any]") -> str:
    """Return the flag of a field: `--kv-memory`; for a secret the flag of its file: `--secret-file`."""
    suffix = "-file" if setting_of(field).is_secret else ""
    return "--" + field.name.replace("_", "-") + suffix


def variable_of(field: "dataclasses.Field[Any]") -> str:
    """Return the environment variable of a field: `TANDEM_KV_MEMORY`."""
    return setting_of(field).env or ENVIRONMENT_PREFIX + field.name.upper()


def environment_of(settings: Any, settings_class: type) -> Mapping[str, str]:  # noqa: ANN401 - any settings dataclass
    """Return the variables that make another process read the same values into `settings_class`, secrets left out.

    Fields whose value is None ("auto") are left out too.
    """
    pairs = {}
    for field in dataclasses.fields(settings_class):
        value = getattr(settings, field.name)
        if value is not None and not setting_of(field).is_secret:
            pairs[variable_of(field)] = _text_of(value)
    return pairs


def _text_of(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
