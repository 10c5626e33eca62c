"""One copy of the weights per host: real processes that fill, share, die and leave."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.model import shared_weights
from common.model.shared_weights import HEADER_BYTES, Report, obtain_weights, remove_unused
from tests.support.source_tree import ROOT

NUM_BYTES = (5 << 20) + 12
NAME = "0123456789abcdef0123456789abcdef"


class User:
    """A process of `tests.support.weight_user`."""

    def __init__(self, folder: Path, byte: int, name: str = NAME) -> None:
        command = [sys.executable, "-m", "tests.support.weight_user", str(folder), name, str(NUM_BYTES)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.tell(f"obtain {byte}")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def fill(self) -> str:
        """Let it fill the weights to the end; return what it has then."""
        assert self.hear() == "filling"
        self.tell("go")
        return self.hear()

    def leave(self) -> None:
        self.tell("leave")
        assert self.process.wait(30) == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., User]]:
    users: list[User] = []

    def start(byte: int, name: str = NAME) -> User:
        users.append(User(tmp_path, byte, name))
        return users[-1]

    yield start
    for user in users:
        user.process.kill()
        user.process.wait(30)
        for pipe in (user.process.stdin, user.process.stdout):
            assert pipe is not None
            pipe.close()


def own(folder: Path, byte: int) -> shared_weights.WeightMemory:
    def fill(memory: memoryview, report: Report) -> None:
        memory[:] = bytes([byte]) * len(memory)
        report(1.0)

    return obtain_weights(NAME, NUM_BYTES, fill, lambda _: None, folder)


def content(weights: shared_weights.WeightMemory) -> set[int]:
    return set(bytes(weights.memory))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("tandem-weights-*"))


def test_the_second_finds_what_the_first_has_filled_and_the_last_removes_it(
    start: Callable[..., User], tmp_path: Path
) -> None:
    first = start(1)
    assert first.fill() == "has 1 shared"
    second = start(2)
    assert second.hear() == "has 1 shared"
    (file,) = files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    first.leave()
    assert files(tmp_path) == [file]
    second.leave()
    assert files(tmp_path) == []


def test_of_two_that_start_at_once_one_fills(start: Callable[..., User], tmp_path: Path) -> None:
    first = start(1)
    assert first.hear() == "filling"
    second = start(2)
    heard: list[float] = []

    class Seen(Exception):
        """The progress of the other process has arrived here."""

    def note(fraction: float) -> None:
        heard.append(fraction)
        if fraction == 0.5:
            raise Seen

    with pytest.raises(Seen):
        obtain_weights(NAME, NUM_BYTES, lambda *_: pytest.fail("filled twice"), note, tmp_path)
    first.tell("go")
    assert first.hear() == second.hear() == "has 1 shared"


def test_a_filler_that_is_killed_leaves_its_place_to_one_that_waits(start: Callable[..., User], tmp_path: Path) -> None:
    first = start(1)
    assert first.hear() == "filling"
    second = start(2)
    first.kill()
    assert second.fill() == "has 2 shared"
    second.leave()
    assert files(tmp_path) == []


def test_weights_of_killed_users_are_taken_over(start: Callable[..., User], tmp_path: Path) -> None:
    first = start(1)
    assert first.fill() == "has 1 shared"
    first.kill()
    weights = own(tmp_path, 2)
    assert content(weights) == {1}
    weights.close()
    assert files(tmp_path) == []


def test_a_start_removes_what_nobody_uses_and_nothing_else(start: Callable[..., User], tmp_path: Path) -> None:
    forsaken, used = start(1, "forsaken"), start(2, "used")
    assert forsaken.fill() == "has 1 shared"
    assert used.fill() == "has 2 shared"
    forsaken.kill()
    stranger = tmp_path / "tandem-weights-0815-unused"
    stranger.touch()
    weights = own(tmp_path, 3)
    assert {file.name.rpartition("-")[2] for file in files(tmp_path)} == {"unused", NAME, "used"}
    weights.close()
    used.kill()
    remove_unused(tmp_path)
    assert files(tmp_path) == [stranger]


@pytest.mark.parametrize("offset", [0, 16, 20, 52, 60])
def test_a_damaged_header_is_never_believed(tmp_path: Path, offset: int) -> None:
    kept = own(tmp_path, 1)
    (file,) = files(tmp_path)
    damaged = bytearray(file.read_bytes())
    damaged[offset] ^= 1
    kept.close()
    file.write_bytes(damaged)
    file.chmod(0o600)
    weights = own(tmp_path, 2)
    assert content(weights) == {2}
    weights.close()


def test_a_file_of_another_length_is_never_believed(tmp_path: Path) -> None:
    kept = own(tmp_path, 1)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    kept.close()
    file.write_bytes(whole[:-1])
    file.chmod(0o600)
    weights = own(tmp_path, 2)
    assert content(weights) == {2}
    weights.close()


def test_a_process_may_use_them_twice(tmp_path: Path) -> None:
    first, second = own(tmp_path, 1), own(tmp_path, 2)
    assert content(second) == {1}
    first.close()
    assert len(files(tmp_path)) == 1
    second.close()
    second.close()
    assert files(tmp_path) == []
    assert content(second) == {1}  # still mapped


def test_who_forgets_to_close_leaves_with_the_last_reference(tmp_path: Path) -> None:
    weights = own(tmp_path, 1)
    assert len(files(tmp_path)) == 1
    del weights
    gc.collect()
    assert files(tmp_path) == []


def test_without_room_they_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    weights = own(tmp_path, 1)
    assert not weights.is_shared
    assert content(weights) == {1}
    assert files(tmp_path) == []


def test_without_a_folder_they_are_private(tmp_path: Path) -> None:
    weights = own(tmp_path / "missing", 1)
    assert not weights.is_shared
    assert content(weights) == {1}


def test_a_link_or_a_file_open_to_others_is_not_used(tmp_path: Path) -> None:
    weights = own(tmp_path, 1)
    (file,) = files(tmp_path)
    weights.close()
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    file.symlink_to(victim)
    assert not own(tmp_path, 2).is_shared
    assert victim.read_bytes() == b"mine"
    file.unlink()
    file.touch()
    file.chmod(0o644)
    assert not own(tmp_path, 3).is_shared
    assert file.stat().st_size == 0


def test_a_filler_that_does_not_get_on_holds_up_nobody_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = own(tmp_path, 1)
    (file,) = files(tmp_path)
    weights.close()
    file.touch(0o600)
    monkeypatch.setattr(shared_weights, "PATIENCE_S", 0.1)
    with file.open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert not own(tmp_path, 2).is_shared


def test_what_filling_raises_comes_through_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(memory: memoryview, report: Report) -> None:
        raise OSError("the model cannot be read")

    with pytest.raises(OSError, match="the model cannot be read"):
        obtain_weights(NAME, NUM_BYTES, fail, lambda _: None, tmp_path)
    assert files(tmp_path) == []


def test_numbers_begin_on_a_page_and_nobody_can_write_them(tmp_path: Path) -> None:
    assert HEADER_BYTES % 4096 == 0
    code = (
        "import sys; from pathlib import Path; from tests.integration.test_shared_weights import own\n"
        "own(Path(sys.argv[1]), 1).memory[7] = 2"
    )
    for folder in (tmp_path, tmp_path / "missing"):  # shared and private
        done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=False, capture_output=True)
        assert done.returncode == -signal.SIGSEGV, done.stderr
