"""API keys in a JSON file, `{"keys": [...]}`, of which a gateway notices when it was replaced.

It says who may use the cluster, so it must not be for others to read or change: such a file is not used. It is
replaced in one step, and writers take turns at a lock beside it.
"""

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from common.errors import InvalidSetting
from common.messages.ids import TenantId
from common.messages.tenant import ApiKey, KeyListing

SETTING = "api_keys_file"

FOR_OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""What the file's mode must not allow: a group may read it, as where a container runs as another user."""


class KeyFile(msgspec.Struct, frozen=True):
    """Content of the file."""

    keys: tuple[ApiKey, ...] = ()


class FileKeyStore:
    """The keys of one file. Files are read and written in a thread: they may lie on a slow or remote disk."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path

    async def read(self, known: str | None = None) -> KeyListing | None:
        """Return all keys; None if they are still those of version `known`."""
        return await asyncio.to_thread(self._read, known)

    async def put(self, key: ApiKey) -> None:
        """Add a key, or replace the one with its id; make the file if there is none."""
        await asyncio.to_thread(self._put, key)

    async def replace(self, key: ApiKey) -> bool:
        """Replace the key with its id; False if there is none."""
        return await asyncio.to_thread(self._replace, key)

    async def remove(self, tenant: TenantId) -> bool:
        """Forget a key; return whether there was one."""
        return await asyncio.to_thread(self._remove, tenant)

    async def close(self) -> None:
        """Nothing is open."""

    def _read(self, known: str | None) -> KeyListing | None:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                version = f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}-{found.st_mode}"
                if version == known:
                    return None
                self._refuse_if_open_to_others(found.st_mode)
                return KeyListing(version, self._decoded(file.read()))
        except OSError as error:
            raise InvalidSetting(SETTING, str(self._path), error.strerror or "cannot be read") from error

    def _refuse_if_open_to_others(self, mode: int) -> None:
        if mode & FOR_OTHERS:
            reason = f"others may read or change it (mode {stat.S_IMODE(mode):04o}); chmod 600 it"
            raise InvalidSetting(SETTING, str(self._path), reason)

    def _decoded(self, content: bytes) -> tuple[ApiKey, ...]:
        try:
            keys = msgspec.json.decode(content, type=KeyFile).keys
        except msgspec.DecodeError as error:
            raise InvalidSetting(SETTING, str(self._path), f"is no file of keys: {error}") from error
        if len({key.id for key in keys}) < len(keys):
            raise InvalidSetting(SETTING, str(self._path), "has two keys with the same id")
        return keys

    def _put(self, key: ApiKey) -> None:
        with self._locked():
            self._write((*self._others(key.id), key))

    def _replace(self, key: ApiKey) -> bool:
        with self._locked():
            others = self._others(key.id)
            is_there = len(others) < len(self._keys())
            if is_there:
                self._write((*others, key))
            return is_there

    def _remove(self, tenant: TenantId) -> bool:
        with self._locked():
            others = self._others(tenant)
            is_there = len(others) < len(self._keys())
            if is_there:
                self._write(others)
            return is_there

    def _others(self, tenant: TenantId) -> tuple[ApiKey, ...]:
        return tuple(key for key in self._keys() if key.id != tenant)

    def _keys(self) -> tuple[ApiKey, ...]:
        if not self._path.exists():
            return ()
        listing = self._read(None)
        assert listing is not None  # no version was known
        return listing.keys

    def _write(self, keys: tuple[ApiKey, ...]) -> None:
        """Replace the file in one step; nobody can read it, at no moment, who could not read the old one."""
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if self._path.exists():
                _keep_readers(self._path.stat(), descriptor)
            file.write(msgspec.json.format(msgspec.json.encode(KeyFile(keys)), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._path.with_name(f".{self._path.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise InvalidSetting(SETTING, str(self._path), error.strerror or "cannot be written") from error


def _keep_readers(old: os.stat_result, descriptor: int) -> None:
    """Let the group of the old file read the new one too."""
    if old.st_mode & stat.S_IRGRP:
        if old.st_gid != os.fstat(descriptor).st_gid:
            os.fchown(descriptor, -1, old.st_gid)
        os.fchmod(descriptor, 0o640)
