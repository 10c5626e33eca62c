"""Settings: precedence, readers, refusals that name what is wrong, and secrets that never show."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from common.errors import InvalidSetting, StartupError
from common.settings.engine import EngineSettings
from common.settings.gateway import GatewayProcessSettings
from common.settings.parse import parse
from common.settings.readers import auto, boolean, core_list, integer, number, power_of_two, size_bytes, text
from common.settings.serving import ServingSettings
from common.settings.setting import environment_of, setting
from common.settings.worker import WorkerSettings
from tandem.cluster.settings import UpSettings

SECRET = {"TANDEM_SECRET": "hush-hush"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample."""

    size: int | None = setting(None, "how big (100% of it)", auto(size_bytes))
    mode: str = setting("slow", "how", text, choices=("slow", "fast"))
    flag: bool = setting(False, "whether", boolean)
    wait_s: float = setting(1.5, "how long", number(0), unit="seconds")
    key: str = setting("", "the key", text, is_secret=True)


def _sample(*argv: str, **env: str) -> Sample:
    return parse(Sample, argv, env, "sample")


def test_defaults_hold_when_nobody_says_anything() -> None:
    assert _sample() == Sample()


def test_variable_beats_default_and_flag_beats_variable() -> None:
    assert _sample(TANDEM_MODE="fast").mode == "fast"
    assert _sample("--mode", "slow", TANDEM_MODE="fast").mode == "slow"


def test_empty_variable_is_unset() -> None:
    assert _sample(TANDEM_WAIT_S="", TANDEM_FLAG="").wait_s == 1.5


def test_booleans_by_flag_and_variable() -> None:
    assert _sample("--flag").flag
    assert _sample(TANDEM_FLAG="yes").flag
    assert not _sample("--no-flag", TANDEM_FLAG="1").flag


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("1.5g", 3 << 29),
        ("500MB", 500_000_000),
        ("4096", 4096),
        ("7 kib", 7168),
    ],
)
def test_sizes(raw: str, size: int) -> None:
    assert size_bytes(raw) == size


@pytest.mark.parametrize("raw", ["", "-1", "12XB", "GiB", "1e9", "0", "nan", "9" * 400, "1 2 GiB"])
def test_refused_sizes(raw: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        size_bytes(raw)


def test_auto_is_none() -> None:
    assert _sample("--size", "auto", TANDEM_SIZE="1GiB").size is None


@pytest.mark.parametrize(("raw", "cores"), [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("5,0-1", (0, 1, 5)), ("2-2", (2,))])
def test_core_lists(raw: str, cores: tuple[int, ...]) -> None:
    assert core_list(raw) == cores


@pytest.mark.parametrize("raw", ["a", "3-1", "0-", "-1", "0,,1", "1.5"])
def test_refused_core_lists(raw: str) -> None:
    with pytest.raises(ValueError, match="list of cores"):
        core_list(raw)


def test_number_readers_hold_their_range() -> None:
    assert power_of_two(1, 64)("32") == 32
    for read, raw in ((power_of_two(1, 64), "48"), (integer(1), "0"), (number(0), "nan"), (number(0, 1), "2")):
        with pytest.raises(ValueError, match="must be"):
            read(raw)


@pytest.mark.parametrize(
    ("argv", "env", "name"),
    [
        (("--wait-s", "soon"), {}, "--wait-s='soon'"),
        ((), {"TANDEM_MODE": "warp"}, "TANDEM_MODE='warp'"),
        (("--size", "much"), {}, "--size='much'"),
        ((), {"TANDEM_FLAG": "perhaps"}, "TANDEM_FLAG='perhaps'"),
    ],
)
def test_a_bad_value_is_refused_by_name(argv: tuple[str, ...], env: dict[str, str], name: str) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        _sample(*argv, **env)
    assert str(refusal.value).startswith(name)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("raw", ["-1", "1e306", "inf"])  # in milliseconds the second one is infinite, too
def test_a_deadline_that_no_request_could_have_is_refused_by_name(raw: str) -> None:
    with pytest.raises(InvalidSetting, match=r"--deadline-s='.*': must be"):
        parse(GatewayProcessSettings, ["--deadline-s", raw], SECRET, "gateway")


def test_unknown_flag_is_one_line_not_an_exit() -> None:
    with pytest.raises(StartupError, match=r"unrecognized arguments: --nope \(see sample --help\)"):
        _sample("--nope")


def test_abbreviated_flags_are_refused() -> None:
    with pytest.raises(StartupError, match="unrecognized"):
        _sample("--mod", "fast")


def test_help_tells_default_unit_choices_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        parse(Sample, ["--help"], {"TANDEM_KEY": "hush-hush"}, "sample")
    told = " ".join(capsys.readouterr().out.split())
    assert ending.value.code == 0
    for words in ("100% of it", "{slow,fast}", "in seconds (default: 1.5; TANDEM_WAIT_S)", "--key-file FILE"):
        assert words in told
    assert "hush" not in told


def test_secret_comes_from_variable_or_file_and_never_shows(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from-file\n")
    assert _sample(TANDEM_KEY="hush").key == "hush"
    assert _sample(TANDEM_KEY_FILE=str(file)).key == "from-file"
    assert _sample("--key-file", str(file), TANDEM_KEY="hush").key == "from-file"
    assert "hush" not in repr(_sample(TANDEM_KEY="hush"))


def test_unreadable_or_empty_secret_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"--key-file.*cannot be read"):
        _sample("--key-file", str(tmp_path / "nowhere"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidSetting, match="is empty"):
        _sample("--key-file", str(tmp_path / "empty"))


def test_worker_without_secret_refuses_to_start() -> None:
    with pytest.raises(InvalidSetting, match="TANDEM_SECRET"):
        parse(WorkerSettings, [], {}, "worker")


def test_password_of_redis_never_shows() -> None:
    settings = parse(WorkerSettings, [], {**SECRET, "TANDEM_REDIS_URL": "redis://:pass-word@host/0"}, "worker")
    assert settings.redis_url == "redis://:pass-word@host/0"
    assert "pass-word" not in repr(settings)
    with pytest.raises(InvalidSetting) as refusal:
        parse(WorkerSettings, [], {**SECRET, "TANDEM_REDIS_URL": "http://:pass-word@host"}, "worker")
    assert "pass-word" not in str(refusal.value)


def test_chunk_larger_than_the_budget_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"chunk_size=1024: must not exceed token_budget \(512 tokens\)"):
        parse(WorkerSettings, ["--chunk-size", "1024"], SECRET, "worker")


def test_gateway_settings_read_sizes_and_flags() -> None:
    settings = parse(GatewayProcessSettings, ["--reuse-port", "--max-body-bytes", "1MiB"], SECRET, "gateway")
    assert (settings.reuse_port, settings.max_body_bytes, settings.port) == (True, 1 << 20, 8000)


def test_up_hands_its_engine_settings_to_workers_unchanged() -> None:
    up = parse(UpSettings, ["--kv-memory", "1GiB", "--chunk-size", "7", "--dtype", "float32"], {}, "tandem up")
    worker = parse(WorkerSettings, [], {**SECRET, **environment_of(up, EngineSettings)}, "worker")
    assert (worker.kv_memory, worker.chunk_size, worker.dtype, worker.max_context) == (1 << 30, 7, "float32", None)


def test_environment_leaves_secrets_out() -> None:
    up = parse(UpSettings, [], SECRET, "tandem up")
    assert "hush-hush" not in environment_of(up, UpSettings).values()


def test_disaggregation_without_prefill_workers_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="needs a prefill worker"):
        parse(UpSettings, ["--prefill", "0", "--disaggregation", "always"], {}, "tandem up")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_b139_a_gateway_without_keys_is_for_its_own_host(host: str) -> None:
    with pytest.raises(InvalidSetting, match="nobody would need an API key"):
        ServingSettings().refuse_exposure(host)


@pytest.mark.parametrize(
    ("flags", "host"),
    [
        ((), "127.0.0.1"),
        ((), "localhost"),
        ((), "::1"),
        (("--allow-anonymous",), "0.0.0.0"),
        (("--api-keys-file", "keys.json"), "0.0.0.0"),
        (("--api-keys", "redis"), "0.0.0.0"),
    ],
)
def test_a_gateway_with_keys_or_on_loopback_may_listen(flags: tuple[str, ...], host: str) -> None:
    parse(ServingSettings, flags, {}, "gateway").refuse_exposure(host)


def test_keys_are_in_one_place() -> None:
    with pytest.raises(InvalidSetting, match="api_keys='redis': keys are in the file"):
        parse(ServingSettings, ["--api-keys", "redis", "--api-keys-file", "x"], {}, "gateway")


def test_up_hands_its_keys_to_gateways(tmp_path: Path) -> None:
    up = parse(UpSettings, ["--api-keys-file", str(tmp_path / "keys")], {}, "tandem up")
    gateway = parse(GatewayProcessSettings, [], {**SECRET, **environment_of(up, ServingSettings)}, "gateway")
    assert gateway.api_keys_file == tmp_path / "keys"
    assert gateway.has_api_keys
