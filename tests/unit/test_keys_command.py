"""`tandem keys`: what it prints, what it keeps, and what it refuses in one line."""

import json
import time
from pathlib import Path

import pytest

from common.api_keys.secret import digest_of, is_well_formed
from common.lifecycle.exit_codes import EXIT_CONFIG, EXIT_FAILURE, EXIT_OK
from common.settings.parse import parse
from tandem import cli
from tandem.key_settings import AddSettings


class Keys:
    """The command, over one file."""

    def __init__(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file = file
        self._capsys = capsys

    def run(self, *argv: str, code: int = EXIT_OK) -> tuple[str, str]:
        """Return what it wrote to stdout and stderr."""
        assert cli.run(["keys", *argv, "--api-keys-file", str(self.file)]) == code
        told = self._capsys.readouterr()
        return told.out.strip(), told.err.strip()

    def kept(self) -> list[dict[str, object]]:
        """Return the records in the file."""
        records: list[dict[str, object]] = json.loads(self.file.read_text())["keys"]
        return records


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Keys:
    return Keys(tmp_path / "keys.json", capsys)


def test_an_added_key_is_printed_once_and_kept_as_its_hash(keys: Keys) -> None:
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "1000", "--max-concurrent", "3")
    key, note = keys.run("add", "--name", "alice", *limits, "--max-priority", "5", "--models", "a, b", "--weight", "2")
    assert is_well_formed(key)
    (record,) = keys.kept()
    assert record.pop("created") == pytest.approx(time.time(), abs=60)
    assert str(record["id"]) in note
    assert record == {
        "kind": "api_key",
        "id": record["id"],
        "name": "alice",
        "digest": digest_of(key),
        "limits": {"requests_per_minute": 60, "tokens_per_minute": 1000, "max_concurrent": 3},
        "max_priority": 5,
        "models": ["a", "b"],
        "weight": 2.0,
    }
    listed = keys.run("list")[0] + keys.run("list", "--json")[0]
    assert "alice" in listed
    assert key not in listed
    assert digest_of(key) not in listed


def test_a_rotated_key_keeps_its_id_and_limits(keys: Keys) -> None:
    keys.run("add", "--name", "alice", "--max-concurrent", "3")
    (before,) = keys.kept()
    key, _ = keys.run("rotate", str(before["id"]))
    assert keys.kept() == [before | {"digest": digest_of(key)}]


def test_a_revoked_key_is_forgotten(keys: Keys) -> None:
    for name in ("alice", "bob"):
        keys.run("add", "--name", name)
    alice, bob = keys.kept()
    assert keys.run("revoke", str(alice["id"]))[0] == f"revoked {alice['id']}"
    assert keys.kept() == [bob]
    assert keys.run("revoke", "key-0", code=EXIT_FAILURE)[1] == "tandem: there is no key key-0"
    assert keys.run("rotate", "key-0", code=EXIT_FAILURE)[1] == "tandem: there is no key key-0"


def test_a_name_is_no_markup(keys: Keys) -> None:
    note = keys.run("add", "--name", "[bold]x[/bold]")[1]
    assert "[bold]x[/bold]" in note
    assert "[bold]x[/bold]" in keys.run("list")[0]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("add",), "name=''"),
        (("add", "--name", "a\nb"), "must be 1 to 64 printable characters"),
        (("add", "--name", "a", "--max-concurrent", "0"), "--max-concurrent='0': must be at least 1"),
        (("add", "--name", "a", "--models", "a,,b"), "--models"),
        (("add", "--name", "a", "--expires", "soon"), "--expires='soon': must be like 30d"),
        (("add", "--name", "a", "--expires", "2001-01-01"), "is in the past"),
        (("revoke",), "name the id"),
        (("rotate", "a", "b"), "name the id of one key"),
        (("list", "--api-keys", "redis"), "either --api-keys-file FILE or --api-keys redis"),
        (("fly",), "keys has no command 'fly'"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(keys: Keys, argv: tuple[str, ...], line: str) -> None:
    told = keys.run(*argv, code=EXIT_CONFIG)[1]
    assert line in told
    assert "\n" not in told
    assert not keys.file.exists()


@pytest.mark.parametrize(("told", "seconds"), [("2h", 7200), ("30d", 30 * 86400)])
def test_an_expiry_counts_from_now(told: str, seconds: int) -> None:
    settings = parse(AddSettings, ["--name", "a", "--api-keys", "redis", "--expires", told], {}, "keys")
    assert settings.expires == pytest.approx(time.time() + seconds, abs=60)


def test_where_the_keys_are_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["keys", "list"]) == EXIT_CONFIG
    assert "say where the keys are" in capsys.readouterr().err
