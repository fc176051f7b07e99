"""The settings tree: precedence, origins, and errors that name the key and where it stands."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from spangrad.errors import SettingsError
from spangrad.settings import AirRule, BuilderSettings, Selection, Settings
from spangrad.settings.explain import explain_key
from spangrad.settings.sources import Origin, explain_settings, load_settings, settings_variables, variable_of


def test_load_settings_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[store]\notlp_http_port = 1\notlp_grpc_port = 2\nclickhouse_port = 3\n[runner]\nrun_id = "from file"\n')
    env = {"SPANGRAD_STORE__OTLP_HTTP_PORT": "11", "SPANGRAD_STORE__OTLP_GRPC_PORT": "12", "SPANGRAD_ENGINE__EXTRA_ARGS": '["--seed", "7"]'}
    flags = {"store.otlp_http_port": 21}
    origins = [origin for origin in explain_settings(flags, file=file, env=env) if origin.source != "default"]
    assert origins == [
        Origin("store.otlp_grpc_port", 12, "environment SPANGRAD_STORE__OTLP_GRPC_PORT"),
        Origin("store.otlp_http_port", 21, "flag"),
        Origin("store.clickhouse_port", 3, f"file {file}"),
        Origin("engine.extra_args", ("--seed", "7"), "environment SPANGRAD_ENGINE__EXTRA_ARGS"),
        Origin("runner.run_id", "from file", f"file {file}"),
    ]


def test_load_settings_with_own_environment_ignores_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANGRAD_STORE__URL", "http://elsewhere")
    assert load_settings(env={}).store.url == Settings().store.url == "http://127.0.0.1:8123"


def test_load_settings_with_own_environment_ignores_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spangrad.toml").write_text('[engine]\ndtype = "float32"\n')
    monkeypatch.chdir(tmp_path)
    assert load_settings().engine.dtype == "float32"
    assert load_settings(env={}) == Settings()


def test_load_settings_config_variable_names_file(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[trainer]\npolicy = "p"\n')
    assert load_settings(env={"SPANGRAD_CONFIG": str(file)}).trainer.policy == "p"


@pytest.mark.parametrize(
    ("flags", "env", "toml", "message"),
    [
        ({"store.pth": "x"}, {}, "", "unknown setting 'store.pth' (flag). Did you mean 'store.path'?"),
        ({}, {"SPANGRAD_STOER__PATH": "x"}, "", "unknown setting SPANGRAD_STOER__PATH (environment). Did you mean 'store.path'?"),
        ({}, {}, "[store]\nurll = 'x'\n", "Did you mean 'store.url'?"),
        ({}, {}, "[stor]\nurl = 'x'\n", "unknown setting 'stor' (file {file}). Did you mean the section 'store'?"),
        ({}, {}, "[builder.selction]\nagents = 'x'\n", "Did you mean the section 'builder.selection'?"),
        ({"trainer.lr": 1}, {}, "", "'trainer.lr' (flag). `spangrad config --explain trainer` lists the settings of this section."),
        ({"trainer.optim.lr": 1}, {}, "", "`spangrad config --explain trainer.optim` lists"),
        ({"engine.gpu_memory_utilization": 1}, {}, "", "`spangrad config --explain engine` lists"),
        ({}, {}, "[runner]\ngroup_size = eight\n", "not TOML: Invalid value (at line 2, column 14). Correct that place"),
        ({"engine.port": 65536}, {}, "", "setting engine.port = 65536 (flag)"),
        ({}, {}, "[sto", "is not TOML"),
        (
            {"store.url": "http://127.0.0.1:81234"},
            {},
            "",
            "setting store.url = 'http://127.0.0.1:81234' (flag): give",
        ),
        ({}, {"SPANGRAD_STORE__URL": "http://h:abc"}, "", "store.url = 'http://h:abc' (environment SPANGRAD_STORE__URL)"),
        ({}, {}, "[store]\nurl = 'http://[::1'\n", "setting store.url = 'http://[::1' (file {file})"),
        ({"store.otlp_endpoint": "127.0.0.1:4318"}, {}, "", "setting store.otlp_endpoint = '127.0.0.1:4318' (flag)"),
        ({"gateway.url": ""}, {}, "", "setting gateway.url = '' (flag)"),
        ({"queue.url": "http://h:65536"}, {}, "", "setting queue.url = 'http://h:65536' (flag)"),
        ({}, {"SPANGRAD_GATEWAY__PORT": "eighty"}, "", "setting gateway.port = 'eighty' (environment SPANGRAD_GATEWAY__PORT)"),
        ({"trainer.credit.gamma": 2}, {}, "", "setting trainer.credit.gamma = 2 (flag)"),
        ({"runner.workers": 0}, {}, "", "setting runner.workers = 0 (flag)"),
        *(
            ({f"{key}_seconds": seconds}, {}, "", f"setting {key}_seconds = {seconds!r} (flag)")
            for key in ("environments.lease", "environments.idle", "environments.turn", "environments.operation", "queue.lease")
            for seconds in ("inf", "1e300", "nan", "0")
        ),
        ({}, {"SPANGRAD_TRAINER__OPTIM__BETAS": "abc"}, "", "SPANGRAD_TRAINER__OPTIM__BETAS (environment) is no JSON. Lists are"),
        ({}, {"SPANGRAD_TRAINER__OPTIM": "3"}, "", "trainer.optim (environment) is a section, and has no value of its own. Set trainer."),
        ({}, {}, "store = 3\n", "store (file {file}) is a section, and has no value of its own. Set store.NAME."),
        ({}, {"SPANGRAD_GATEWAY__TOKEN": ""}, "", "(environment SPANGRAD_GATEWAY__TOKEN)"),
        ({"gateway.port": None}, {}, "", "setting gateway.port = None (flag): Input should be a valid integer"),
        (
            {"runner.sandbox.engine": "docker"},
            {},
            "",
            "setting runner.sandbox.engine = 'docker' (flag): "
            "Input should be 'none', 'remote', 'landlock' or 'bubblewrap', or Input should be 'auto'",
        ),
        ({}, {"SPANGRAD_GATEWAY__PORT": "null"}, "", "setting gateway.port = None (environment SPANGRAD_GATEWAY__PORT)"),
    ],
)
def test_load_settings_errors_name_value_place_and_remedy(
    tmp_path: Path, flags: dict[str, object], env: dict[str, str], toml: str, message: str
) -> None:
    file = tmp_path / "s.toml"
    file.write_text(toml)
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, file=file, env=env)
    assert message.replace("{file}", str(file)) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_steps", -1),
        ("max_tokens_per_device", 0),
        ("poll_seconds", 0),
        ("sampling.max_staleness", -1),
        ("credit.step_weight", -1.0),
        ("loss.clip_ratio", 0.0),
        ("loss.clip_ratio_low", -0.1),
        ("loss.clip_ratio_high", -0.1),
        ("loss.critic_clip", 0.0),
        ("optim.learning_rate", -1e-6),
        ("optim.learning_rate", float("nan")),
        ("optim.critic_learning_rate", 0.0),
        ("optim.betas", [0.9, 1.0]),
        ("optim.betas", [-0.1, 0.9]),
        ("optim.weight_decay", -0.1),
        ("optim.clip_grad", 0.0),
        ("lora.alpha", 0),
        ("checkpoint.keep", 0),
    ],
)
def test_load_settings_of_trainer_number_out_of_bounds_raises(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"setting trainer\.{key}.*(greater|less) than"):
        load_settings({f"trainer.{key}": value}, env={})


TOKENS = [origin.key for origin in explain_settings(env={}) if origin.key.endswith(("token", "critic_key"))]


@pytest.mark.parametrize("key", TOKENS)
def test_load_settings_tokens_are_one_line_without_whitespace_around(key: str) -> None:
    settings = load_settings(env={variable_of(key): "s3cret\n"})
    section, *below = key.split(".")
    token: Any = getattr(settings, section)
    for name in below:
        token = getattr(token, name)
    assert token.get_secret_value() == "s3cret"
    for refused in ("s3cret\nx", "s3crét", " \n"):
        with pytest.raises(SettingsError) as caught:
            load_settings(env={variable_of(key): refused})
        assert str(caught.value).startswith(f"setting {key} (environment {variable_of(key)}): a token is one line of")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"queue.db": 7411}, "setting queue.db (flag): Input should be a valid string"),
        ({"gateway.clients": [{"name": "n", "token": 7411}]}, "setting gateway.clients.0.token (flag): Input should be a valid string"),
        ({"gateway.clients": [{"name": "n", "token": "t", "tokn": "7411"}]}, "setting gateway.clients.0.tokn (flag): Extra inputs"),
        ({"gateway.clients": "[name=n, token=7411]"}, "setting gateway.clients (flag): Input should be a valid tuple"),
        ({"store.url": "u:7411@host:8123"}, "setting store.url = 'host:8123' (flag): give the URL"),
        ({"gateway.controller": "http://u:7411@host"}, "setting gateway.controller = 'http://host' (flag): String should match"),
    ],
)
def test_load_settings_errors_show_no_secret(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, env={})
    assert str(caught.value).startswith(message)
    assert "7411" not in str(caught.value)


def test_explain_hides_the_password_of_a_url(tmp_path: Path) -> None:
    (tmp_path / "s.toml").touch()
    url = "http://u:p@clickhouse:8123"
    assert explain_key("store.url", {"store.url": url}, file=tmp_path / "s.toml")[-1] == "  value:   http://clickhouse:8123 (flag)"
    (origin,) = [origin for origin in explain_settings({"store.url": url}, env={}) if origin.source == "flag"]
    assert (origin.value, origin.text) == (url, "http://clickhouse:8123")


def test_settings_variables_carry_times_of_files(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("[trainer]\nas_of = 2026-01-02T03:04:05Z\n")
    variables = settings_variables(file=file, env={})
    assert load_settings(env=variables) == load_settings(file=file, env={})
    file.write_text("[trainer]\nas_of = 2026-01-02\n")
    assert load_settings(env=settings_variables(file=file, env={})).trainer.as_of == datetime(2026, 1, 2)


def test_load_settings_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml does not exist"):
        load_settings(file=tmp_path / "none.toml", env={})


def test_load_settings_unreadable_file_raises(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'[runner]\nrun_id = "\xe9"\n')
    with pytest.raises(SettingsError) as caught:
        load_settings(file=tmp_path, env={})
    assert str(caught.value) == f"settings file {tmp_path} cannot be read (Is a directory). Name a file of TOML that you may read."
    with pytest.raises(SettingsError, match=r"settings file .*latin\.toml is not TOML: 'utf-8' codec can't decode byte 0xe9"):
        load_settings(env={"SPANGRAD_CONFIG": str(tmp_path / "latin.toml")})


def test_load_settings_none_can_be_given_by_every_source(tmp_path: Path) -> None:
    days, variable = "queue.keep_days", "SPANGRAD_QUEUE__KEEP_DAYS"
    null, week = tmp_path / "null.toml", tmp_path / "week.toml"
    null.write_text('[queue]\nkeep_days = "null"\n')
    week.write_text("[queue]\nkeep_days = 7\n")

    def origin_of(flags: dict[str, object], env: dict[str, str], file: Path) -> Origin:
        return next(origin for origin in explain_settings(flags, file=file, env=env) if origin.key == days)

    assert [
        origin_of({}, {}, null),
        origin_of({}, {variable: "null"}, week),
        origin_of({days: None}, {variable: "8"}, week),
        origin_of({days: 9}, {variable: "null"}, null),
    ] == [
        Origin(days, None, f"file {null}"),
        Origin(days, None, f"environment {variable}"),
        Origin(days, None, "flag"),
        Origin(days, 9.0, "flag"),
    ]


def test_load_settings_ignores_binary_variables() -> None:
    assert load_settings(env={"SPANGRAD_CHGO": "/x", "SPANGRAD_OTELCOL": "/y"}) == load_settings(env={})


def test_load_settings_ignores_addresses_of_kubernetes_services() -> None:
    links = {
        "SPANGRAD_STORE_SERVICE_HOST": "10.0.0.1",
        "SPANGRAD_STORE_SERVICE_PORT": "4317",
        "SPANGRAD_STORE_SERVICE_PORT_OTLP_GRPC": "4317",
        "SPANGRAD_STORE_PORT": "tcp://10.0.0.1:4317",
        "SPANGRAD_STORE_PORT_4317_TCP": "tcp://10.0.0.1:4317",
        "SPANGRAD_STORE_PORT_4317_TCP_PROTO": "tcp",
        "SPANGRAD_STORE_PORT_4317_TCP_PORT": "4317",
        "SPANGRAD_STORE_PORT_4317_TCP_ADDR": "10.0.0.1",
        "SPANGRAD_PORT_53_UDP_ADDR": "10.0.0.2",
    }
    assert load_settings(env={**links, "SPANGRAD_STORE__OTLP_GRPC_PORT": "7"}).store.otlp_grpc_port == 7
    assert load_settings(env=settings_variables(env=links)) == load_settings(env={})


@pytest.mark.parametrize(
    "variable", [{"SPANGRAD_GATEWAY_PORT": "9000"}, {"SPANGRAD_STORE__SERVICE_HOST": "a"}, {"SPANGRAD_STORE_SERVICE": "a"}]
)
def test_load_settings_refuses_variables_like_those_of_services(variable: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="unknown setting SPANGRAD_"):
        load_settings(env=variable)


def test_build_spec_changes_with_build_settings_only() -> None:
    base = BuilderSettings()
    assert base.spec == BuilderSettings(poll_seconds=9, incomplete_after_seconds=1, quiet_seconds=2).spec
    others = [
        BuilderSettings(selection=Selection(policies="p")),
        BuilderSettings(rules=(AirRule(name="tool_error", kind="tool_error", reward=-0.2, tools=("*",)),)),
        BuilderSettings(selection=Selection(agents="a")),
    ]
    assert len({base.spec, *(other.spec for other in others)}) == 4


def test_load_settings_nested_section_is_set_by_every_source(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('[builder.selection]\nagents = "a"\nmodels = "m"\ntools = "t"\n')
    env = {"SPANGRAD_BUILDER__SELECTION__MODELS": "n", "SPANGRAD_TRAINER__SELECTION": '{"agents": "b"}'}
    flags = {"builder.selection.tools": "u", "trainer.selection": {"models": "o"}}
    origins = [origin for origin in explain_settings(flags, file=file, env=env) if origin.source != "default"]
    assert origins == [
        Origin("builder.selection.agents", "a", f"file {file}"),
        Origin("builder.selection.models", "n", "environment SPANGRAD_BUILDER__SELECTION__MODELS"),
        Origin("builder.selection.tools", "u", "flag"),
        Origin("trainer.selection.agents", "b", "environment SPANGRAD_TRAINER__SELECTION__AGENTS"),
        Origin("trainer.selection.models", "o", "flag"),
    ]


def test_load_settings_error_in_nested_table_names_place_and_source() -> None:
    rules = [{"name": "slow", "kind": "latency", "reward": "much"}]
    with pytest.raises(SettingsError, match=r"setting builder.rules.0.reward = 'much' \(flag\)"):
        load_settings({"builder.rules": rules}, env={})
    with pytest.raises(SettingsError, match=r"unknown setting 'builder.selection.agent' .*Did you mean 'builder.selection.agents'"):
        load_settings({"builder.selection": {"agent": "x"}}, env={})


def test_explain_a_setting_by_its_sentence_unit_type_default_value_and_source(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("[trainer.weight_sync]\ndrain_seconds = 5\n")
    assert explain_key("trainer.weight_sync.drain_seconds", file=file) == [
        "trainer.weight_sync.drain_seconds",
        "  Time limit of in_flight `drain`, in seconds; calls that are left continue as with `keep`.",
        "  unit:    seconds",
        "  type:    number",
        "  default: 60.0",
        f"  value:   5.0 (file {file})",
    ]
    assert explain_key("trainer.lora.rank", {"trainer.lora.rank": 4}, file=file)[-1] == "  value:   4 (flag)"


def test_explain_a_section_lists_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.touch()
    lines = explain_key("trainer", file=file)
    assert lines[0] == "[trainer]  Settings of the trainer."
    assert "  trainer.policy = policy (default)" in lines
    assert "  trainer.lora: a section" in lines


def test_explain_refuses_an_unknown_key_and_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'trainer\.lora_rank'\. Did you mean 'trainer\.lora\.rank'\?"):
        explain_key("trainer.lora_rank")
