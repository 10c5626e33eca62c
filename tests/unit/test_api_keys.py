"""Keys at the door: who is let in, what revoking does, and what happens while keys cannot be read."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.api_keys.file_store import FileKeyStore
from common.api_keys.secret import digest_of, is_well_formed, new_key
from common.errors import AuthenticationFailed, BrokerUnavailable, InvalidSetting, PermissionDenied, Unavailable
from common.messages.ids import ANYBODY, ModelName, TenantId
from common.messages.tenant import ApiKey, KeyListing, TenantLimits
from gateway.api_keys import MAX_AGE_S, Keyring, OpenDoor

KEY, OTHER = new_key(), new_key()
ALICE = ApiKey(TenantId("key-a"), "alice", digest_of(KEY), 1, TenantLimits(max_concurrent=3), 2, (ModelName("m"),), 2.0)


class Shelf:
    """A store that can be out of reach."""

    def __init__(self, *keys: ApiKey) -> None:
        self.keys = keys
        self.is_away = False
        self.num_reads = 0

    async def read(self, known: str | None = None) -> KeyListing | None:
        self.num_reads += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise BrokerUnavailable("Redis is away")
        version = " ".join(key.digest for key in self.keys)
        return None if version == known else KeyListing(version, self.keys)

    async def put(self, key: ApiKey) -> None:
        raise NotImplementedError

    async def replace(self, key: ApiKey) -> bool:
        raise NotImplementedError

    async def remove(self, tenant: TenantId) -> bool:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class World:
    """A keyring and its time."""

    def __init__(self, *keys: ApiKey) -> None:
        self.now_s = 100.0
        self.shelf = Shelf(*keys)
        self.ring = Keyring(self.shelf, lambda: self.now_s, lambda: 1_000_000_000 + self.now_s)


def bearer(key: str) -> list[str]:
    return [f"Bearer {key}"]


def test_keys_differ_and_are_recognised() -> None:
    assert KEY != OTHER
    assert re.fullmatch(r"tdm-[A-Za-z0-9_-]{49}", KEY)
    assert is_well_formed(KEY)
    assert re.fullmatch(r"[0-9a-f]{64}", digest_of(KEY))


@pytest.mark.parametrize("position", [0, 3, 4, 20, 46, 47, 52])
def test_a_mistyped_key_is_recognised(position: int) -> None:
    wrong = "A" if KEY[position] != "A" else "B"
    assert not is_well_formed(KEY[:position] + wrong + KEY[position + 1 :])


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", " Bearer ", "Bearer  "])
async def test_b139_a_good_key_is_its_tenant(scheme: str) -> None:
    caller = await World(ALICE).ring.caller([f"{scheme} {KEY} "])
    assert (caller.tenant, caller.limits, caller.max_priority, caller.weight) == ("key-a", ALICE.limits, 2, 2.0)


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [""],
        ["Bearer"],
        [f"Basic {KEY}"],
        [KEY],
        [f"Bearer{KEY}"],
        [f"Bearer {OTHER}"],
        [f"Bearer {KEY[:-1]}"],
        [f"Bearer {KEY}x"],
        [f"Bearer {KEY} {KEY}"],
        [f"Bearer {KEY},Bearer {KEY}"],
        [f"Bearer {ALICE.digest}"],
        [f"Bearer {ALICE.id}"],
        [f"Bearer {KEY}", f"Bearer {KEY}"],
        [f"Bearer {KEY}", ""],
        ["Bearer é"],
    ],
)
async def test_b139_anything_else_is_nobody(sent: Sequence[str]) -> None:
    with pytest.raises(AuthenticationFailed) as caught:
        await World(ALICE).ring.caller(sent)
    assert KEY not in str(caught.value)


async def test_an_open_gateway_asks_nobody() -> None:
    assert (await OpenDoor().caller(["nonsense"])).tenant == ANYBODY


async def test_an_expired_key_is_nobodys() -> None:
    world = World(ApiKey(TenantId("key-a"), "", digest_of(KEY), 1, expires=1_000_000_150))
    assert (await world.ring.caller(bearer(KEY))).tenant == "key-a"
    world.now_s += 50
    with pytest.raises(AuthenticationFailed):
        await world.ring.caller(bearer(KEY))


async def test_b139_a_revoked_key_works_for_two_seconds_at_most() -> None:
    world = World(ALICE)
    await world.ring.caller(bearer(KEY))
    world.shelf.keys = ()
    world.now_s += MAX_AGE_S + 0.001
    with pytest.raises(AuthenticationFailed):
        await world.ring.caller(bearer(KEY))
    assert MAX_AGE_S <= 2


async def test_b139_a_rotated_key_takes_the_place_of_the_old_one() -> None:
    world = World(ALICE)
    await world.ring.caller(bearer(KEY))
    world.shelf.keys = (ApiKey(ALICE.id, "alice", digest_of(OTHER), 1),)
    await world.ring.refresh()
    assert (await world.ring.caller(bearer(OTHER))).tenant == "key-a"
    with pytest.raises(AuthenticationFailed):
        await world.ring.caller(bearer(KEY))


async def test_keys_that_cannot_be_read_for_long_let_nobody_in() -> None:
    world = World(ALICE)
    await world.ring.caller(bearer(KEY))
    world.shelf.is_away = True
    world.now_s += MAX_AGE_S
    await world.ring.caller(bearer(KEY))
    world.now_s += 0.001
    with pytest.raises(Unavailable):
        await world.ring.caller(bearer(KEY))
    world.shelf.is_away = False
    assert (await world.ring.caller(bearer(KEY))).tenant == "key-a"


async def test_those_who_wait_for_the_keys_wait_for_one_reading() -> None:
    world = World(ALICE)
    callers = await asyncio.gather(*(world.ring.caller(bearer(KEY)) for _ in range(50)))
    assert {caller.tenant for caller in callers} == {"key-a"}
    assert world.shelf.num_reads == 1


async def test_a_key_is_good_for_its_models_and_priorities() -> None:
    caller = await World(ALICE).ring.caller(bearer(KEY))
    caller.require(ModelName("m"), 2)
    with pytest.raises(PermissionDenied) as model:
        caller.require(ModelName("n"))
    with pytest.raises(PermissionDenied) as priority:
        caller.require(ModelName("m"), 3)
    assert (model.value.param, priority.value.param) == ("model", "priority")


class TestFile:
    @pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
    async def test_one_for_its_owner_is_read(self, tmp_path: Path, mode: int) -> None:
        file = tmp_path / "keys"
        await FileKeyStore(file).put(ALICE)
        file.chmod(mode)
        listing = await FileKeyStore(file).read()
        assert listing is not None
        assert listing.keys == (ALICE,)

    async def test_it_is_made_for_its_owner_alone_and_holds_no_key(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        await FileKeyStore(file).put(ALICE)
        assert file.stat().st_mode & 0o777 == 0o600
        assert KEY not in file.read_text()

    async def test_its_group_may_go_on_reading_it(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        await FileKeyStore(file).put(ALICE)
        file.chmod(0o640)
        await FileKeyStore(file).remove(ALICE.id)
        assert file.stat().st_mode & 0o777 == 0o640

    @pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644, 0o666])
    async def test_one_that_others_may_read_or_change_is_refused(self, tmp_path: Path, mode: int) -> None:
        file = tmp_path / "keys"
        await FileKeyStore(file).put(ALICE)
        file.chmod(mode)
        with pytest.raises(InvalidSetting, match="others may read or change it"):
            await FileKeyStore(file).read()

    @pytest.mark.parametrize(
        "content",
        [
            "",
            "[]",
            '{"keys": 3}',
            '{"keys": [{}]}',
            '{"keys": [{"kind": "api_key", "id": "a", "name": "", "digest": "x", "created": 1}]}',
            f'{{"keys": [{{"kind": "api_key", "id": "", "name": "", "digest": "{"0" * 64}", "created": 1}}]}}',
        ],
    )
    async def test_one_that_is_malformed_is_refused(self, tmp_path: Path, content: str) -> None:
        await self._refused(tmp_path, content, "is no file of keys")

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"limits": '{"requests_per_minute": 0}'}, "no file of keys"),
            ({"limits": '{"request_per_minute": 5}'}, "no file of keys"),
            ({"weight": "-1"}, "no file of keys"),
            ({"weight": "0.0009"}, "no file of keys"),
            ({"forbidden": "1"}, "no file of keys"),
        ],
    )
    async def test_one_with_restrictions_that_are_not_understood_is_refused(
        self, tmp_path: Path, fields: dict[str, str], reason: str
    ) -> None:
        more = "".join(f', "{name}": {value}' for name, value in fields.items())
        key = f'{{"kind": "api_key", "id": "a", "name": "", "digest": "{"0" * 64}", "created": 1{more}}}'
        await self._refused(tmp_path, f'{{"keys": [{key}]}}', reason)

    async def test_one_that_names_two_keys_alike_is_refused(self, tmp_path: Path) -> None:
        key = f'{{"kind": "api_key", "id": "a", "name": "", "digest": "{"0" * 64}", "created": 1}}'
        await self._refused(tmp_path, f'{{"keys": [{key}, {key}]}}', "two keys with the same id")

    async def test_one_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidSetting, match="No such file"):
            await FileKeyStore(tmp_path / "nowhere").read()

    async def _refused(self, folder: Path, content: str, reason: str) -> None:
        file = folder / "keys"
        file.write_text(content)
        file.chmod(0o600)
        with pytest.raises(InvalidSetting, match=reason):
            await FileKeyStore(file).read()
