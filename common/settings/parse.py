"""Builds a settings object from flags and environment: a flag wins over its variable, a variable over the default."""

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from common.errors import InvalidSetting, StartupError
from common.settings.readers import AUTO, boolean
from common.settings.setting import Setting, flag_of, setting_of, variable_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SettingsT = TypeVar("SettingsT", bound="DataclassInstance")

_HIDDEN = "(not shown)"


def parse(settings_class: type[SettingsT], argv: Sequence[str], env: Mapping[str, str], prog: str) -> SettingsT:
    """Return the settings of one process.

    Raises `InvalidSetting` naming the flag or variable whose value cannot work, `StartupError` for an unknown flag;
    `--help` prints and raises `SystemExit(0)`.
    """
    return _settings(settings_class, vars(_parser(settings_class, prog).parse_args(list(argv))), env)


def _settings(settings_class: type[SettingsT], flags: Mapping[str, object], env: Mapping[str, str]) -> SettingsT:
    values = {}
    for field in dataclasses.fields(settings_class):
        found = _find(field, flags, env)
        if found is not None:
            name, raw = found
            values[field.name] = _read(setting_of(field), name, raw)
    return settings_class(**values)


def parse_named(
    settings_class: type[SettingsT], argv: Sequence[str], env: Mapping[str, str], prog: str, metavar: str
) -> tuple[SettingsT, tuple[str, ...]]:
    """Return the settings of a command, and the names that stand between its flags; otherwise like `parse`."""
    parser = _parser(settings_class, prog)
    parser.usage = f"%(prog)s [{metavar} ...] [FLAGS]"
    parser.add_argument("names", nargs="*", metavar=metavar, help=argparse.SUPPRESS)
    flags = vars(parser.parse_intermixed_args(list(argv)))
    names = tuple(flags.pop("names"))
    return _settings(settings_class, flags, env), names


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose complaint is one line instead of the usage and an exit."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message} (see {self.prog} --help)")


def _parser(settings_class: "type[DataclassInstance]", prog: str) -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog=prog,
        usage="%(prog)s [FLAGS]",
        description=inspect.cleandoc(settings_class.__doc__ or ""),
        epilog="Each flag can also be set by the environment variable named behind it; the flag wins.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # What only this process knows stands first, what it shares with others behind.
    own = inspect.get_annotations(settings_class)
    for field in sorted(dataclasses.fields(settings_class), key=lambda field: field.name not in own):
        _add_flag(parser, field)
    return parser


def _add_flag(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]") -> None:
    setting = setting_of(field)
    explanation = _explanation(field, setting).replace("%", "%%")
    if setting.read is boolean:
        parser.add_argument(
            flag_of(field), dest=field.name, action=argparse.BooleanOptionalAction, default=None, help=explanation
        )
        return
    metavar = "FILE" if setting.is_secret else _metavar(field, setting)
    parser.add_argument(flag_of(field), dest=field.name, metavar=metavar, default=None, help=explanation)


def _metavar(field: "dataclasses.Field[Any]", setting: Setting) -> str:
    if setting.choices:
        return "{" + ",".join(setting.choices) + "}"
    return setting.unit.upper() or field.name.rsplit("_", 1)[-1].upper()


def _explanation(field: "dataclasses.Field[Any]", setting: Setting) -> str:
    if setting.is_secret:
        return f"{setting.help}: a file that holds it ({variable_of(field)}_FILE), or the variable {variable_of(field)}"
    unit = f", in {setting.unit}" if setting.unit else ""
    return f"{setting.help}{unit} (default: {_default_text(field.default)}; {variable_of(field)})"


def _default_text(default: object) -> str:
    if default is None:
        return AUTO
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default in ("", ()) else str(default)


def _find(
    field: "dataclasses.Field[Any]", flags: Mapping[str, object], env: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return where the value of a field comes from, and its text; None: nobody set it."""
    setting = setting_of(field)
    flag = flags[field.name]
    variable = variable_of(field)
    if flag is not None:
        text = str(flag)
        return flag_of(field), _secret_in(flag_of(field), text) if setting.is_secret else text
    # An empty variable is an unset one: compose files pass those for what the user left out.
    if env.get(variable):
        return variable, env[variable]
    if setting.is_secret and env.get(f"{variable}_FILE"):
        return variable, _secret_in(f"{variable}_FILE", env[f"{variable}_FILE"])
    return None


def _secret_in(name: str, filename: str) -> str:
    try:
        secret = Path(filename).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(name, filename, f"cannot be read ({_reason(error)})") from error
    if not secret:
        raise InvalidSetting(name, filename, "is empty")
    return secret


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "input/output error" if isinstance(error, OSError) else "not UTF-8"


def _read(setting: Setting, name: str, raw: str) -> object:
    if setting.choices and raw not in setting.choices:
        raise InvalidSetting(name, raw, "must be one of " + ", ".join(setting.choices))
    read: Callable[[str], object] = setting.read
    try:
        return read(raw)
    except ValueError as error:
        raise InvalidSetting(name, raw if setting.is_shown else _HIDDEN, str(error)) from error
