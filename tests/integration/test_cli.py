"""The command line as a user meets it: fast help, one-sentence errors, exit codes."""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
import sys
import time
from contextlib import closing
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from pydantic import SecretStr

from collector.database import user_of
from commands import stopped_store
from commands.demo.settings import demo_settings, write_settings
from commands.options import flag_values
from commands.stopped_store import answering_store, own_store
from spangrad.cli import app
from spangrad.errors import SettingsError, StoreError
from spangrad.http.json_http import status_of
from spangrad.processes import free_ports
from spangrad.settings import StoreSettings
from spangrad.settings.sources import explain_settings, load_settings
from spangrad.store.clickhouse import connect
from tests.support.processes import run_spangrad

COMMANDS = [name for name in app if not name.startswith("-")]
TWICE = '[{"name": "a", "token": "1"}, {"name": "a", "token": "2"}]'
HEAVY = ("torch", "verl", "ray", "chdb", "polars", "pydantic", "numpy", "aiohttp", "clickhouse_connect", "opentelemetry")


def spangrad(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SPANGRAD_")}
    return run_spangrad(*arguments, directory=cwd, env={**clean, **env}, timeout=60)


def test_help_names_every_command_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['spangrad', '--help']\nfrom spangrad.cli import app\ntry: app()\nexcept SystemExit: pass\n"
    code += f"print('LOADED', [m for m in {HEAVY!r} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert answer.stdout.rstrip().endswith("LOADED []")
    assert [name for name in COMMANDS if name not in answer.stdout] == []


def test_span_kinds_are_described_without_pandas(tmp_path: Path) -> None:
    """Its import would be a third of the CPU time of a question about one rollout."""
    code = "import sys; from commands.inspection.span_kinds import describe; list(describe([])); sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


def test_help_fits_on_a_screen(tmp_path: Path) -> None:
    assert len(spangrad("--help", cwd=tmp_path, COLUMNS="100").stdout.splitlines()) <= 50


def test_prompt_optimise_without_extra_names_package_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['prompts'] = None; sys.argv = ['spangrad', *sys.argv[1:]]\nfrom spangrad.cli import main; main()"
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a", "input": 1}\n{"task_id": "b", "input": 2}\n')
    search = [
        "prompt",
        "optimise",
        "greeting",
        "--agent",
        "my_agent:answer",
        "--tasks",
        "tasks.jsonl",
        "--set",
        "queue.url=http://127.0.0.1:9",
    ]
    answer = subprocess.run([sys.executable, "-c", code, *search], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.endswith("Install the part: pip install 'spangrad-server[prompts]'.\n")
    listed = subprocess.run([sys.executable, "-c", code, "config", "--explain", "queue.url"], capture_output=True, text=True, check=False)
    assert listed.returncode == 0, "no other command needs it"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_exits_0(command: str, tmp_path: Path) -> None:
    answer = spangrad(command, "--help", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert f"Usage: spangrad {command}" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "code", "sentence"),
    [
        (["config", "--set", "store.prot=1"], {}, 2, "spangrad: unknown setting 'store.prot' (flag). Did you mean 'store.path'?"),
        (["config"], {"SPANGRAD_X": "1"}, 2, "unknown setting SPANGRAD_X (environment)"),
        (["config", "--set", "nonsense"], {}, 2, "--set 'nonsense' is not SECTION.KEY=VALUE."),
        (["config", "--config", "."], {}, 2, "settings file . cannot be read (Is a directory)."),
        (["prompt", "put", "p", "latin.txt"], {}, 1, "latin.txt is not UTF-8 at byte 3 (invalid continuation byte)."),
        (["prompt", "put", "p", "utf16.txt"], {}, 1, "utf16.txt holds a null character at byte 1, as UTF-16 does."),
        (["build"], {"LOG_LEVEL": "loud"}, 2, "LOG_LEVEL = 'loud' is no level. Set it to DEBUG, INFO, WARNING or ERROR, or unset it."),
        (["train", "--follow", "--once"], {}, 2, "--follow, --once and --plan contradict each other"),
        (["train", "--json"], {}, 2, "--json is the form of a plan: give --plan with it."),
        (["sql", " "], {}, 2, "the statement is empty. Give one SELECT, SHOW or DESCRIBE."),
        (["sql", "SELECT 1"], {"SPANGRAD_STORE__URL": "http://127.0.0.1:9"}, 1, "no span store answers at http://127.0.0.1:9"),
        (
            ["sql", "SELECT 1"],
            {"SPANGRAD_STORE__URL": "http://elsewhere.invalid:8123"},
            1,
            "no span store answers at http://elsewhere.invalid",
        ),
        (["demo", "--example", "nowhere"], {}, 1, "nowhere holds no agent.py"),
        (["demo", "--target", "1.5"], {}, 2, "--target 1.5 is no success rate. Give one from 0 to 1."),
        (["demo", "--max-steps", "0"], {}, 2, "--max-steps 0 leaves nothing to do. Give at least 1."),
        (["watch"], {}, 2, "this view needs a terminal for its input and output."),
        (["inspect"], {}, 2, "no file of spans is named: `spangrad inspect FILE`,"),
        (["play"], {}, 2, "parameter ENVIRONMENT requires an argument."),
        (["tools", "--directory", "nowhere"], {}, 2, "--directory nowhere is no directory. Name the working directory of the tools."),
        (["store", "--set", "store.host=0.0.0.0"], {}, 1, "Set store.token, or bind 127.0.0.1."),
        (["store", "--path", "latin.txt"], {}, 1, "store.path = 'latin.txt' cannot be used (File exists). Set it to a directory"),
        (["store", "--path", "/proc/x"], {}, 1, "store.path = '/proc/x' cannot be used (No such file or directory)."),
        (
            ["store", "--otlp-http-port", "5001", "--otlp-grpc-port", "5001"],
            {},
            2,
            "store.otlp_grpc_port and store.otlp_http_port are both 5001.",
        ),
        (["gateway", "--set", "gateway.host=0.0.0.0"], {}, 1, "Set gateway.token, or bind 127.0.0.1."),
        (["gateway", "--port", "0"], {"SPANGRAD_GATEWAY__TLS_CERT": "x.pem"}, 2, "gateway.tls_key is not set, and TLS needs both"),
        (["gateway", "--port", "0"], {"SPANGRAD_GATEWAY__CLIENTS": TWICE}, 2, "gateway.clients names 'a' twice."),
        (["gateway", "--port", "0"], {"SPANGRAD_GATEWAY__RETOKENIZE": "nowhere"}, 1, "gateway.retokenize = 'nowhere' holds no tokenizer"),
        (["engine"], {}, 2, "engine.model"),
        (["up"], {}, 2, "Write a settings file with `spangrad init --model DIRECTORY`."),
        (["down"], {}, 1, "data/up. Call this in the directory where it was started"),
        (["init", "--model", "nowhere"], {}, 2, "nowhere is no directory."),
        (["init", "--model", ".", "--config", "latin.txt"], {}, 2, "latin.txt exists already."),
        (["init", "--model", "nowhere", "--config", "latin.txt/x.toml"], {}, 2, "x.toml cannot be written (latin.txt is no directory)."),
        (
            ["plan", "--model", "nowhere", "--gpus", "1x80", "--write", "latin.txt/x"],
            {},
            2,
            "--write latin.txt/x cannot be written (",
        ),
        (["rewards", "backfill", "--reward", "r", "--since", "1000000d"], {}, 2, "--since '1000000d' is before the year 1."),
        (["up", "--set", "engine.model=m", "--set", "up.directory=latin.txt"], {}, 1, "latin.txt cannot be the directory of a run"),
        (["ps", "--set", "up.directory=latin.txt"], {}, 1, "latin.txt. Call this in the directory where it was started"),
        (["down", "--set", "up.directory=latin.txt"], {}, 1, "latin.txt. Call this in the directory where it was started"),
        (["demo", "--directory", "latin.txt"], {}, 1, "latin.txt cannot be the directory of a run"),
        (["store", "--clickhouse-port", "-1"], {}, 2, "setting store.clickhouse_port = -1 (flag): Input should be"),
        (["gateway", "--port", "99999999"], {}, 2, "setting gateway.port = 99999999 (flag): Input should be less"),
        (["backends", "list", "--watch", "--interval", "-1"], {}, 2, "--interval -1 is no time between updates."),
        (["queue", "purge", "--older-than-days", "nan"], {}, 2, "--older-than-days nan is no age."),
        (["rollout", "show", "x", "--width", "-5"], {}, 2, "--width -5 is no width. Give a number of columns, 1 or more."),
        (["lineage", "x"], {}, 2, "'x' names no version. Write POLICY@VERSION: policy@3."),
        (["lineage", "p@1", "--depth", "-1"], {}, 2, "--depth -1 is no number of versions. Give 0 or more."),
        (["plan", "--model", ".", "--gpus", "99999999x80"], {}, 2, "--gpus '99999999x80' on --nodes 1 is no cluster."),
        (["plan", "--model", ".", "--gpus", "8x80", "--host-memory", "inf"], {}, 2, "--host-memory inf is no memory of a node."),
        (["worker", ""], {}, 1, "the agent's program is an empty word."),
        (["worker", "--directory", "latin.txt", "python"], {}, 2, "latin.txt is no directory."),
        *[
            ([*words.split(), "--directory", "nowhere"], {}, 2, "--directory nowhere is no directory. Name the directory of the")
            for words in (
                "run --tasks nowhere python",
                "rewards serve --evaluator m:f",
                "play m:C",
                "env serve m:C",
                "environments --factory m:C",
            )
        ],
        (["worker", "--agent", "nowhere:f"], {}, 1, "there is no module 'nowhere' in"),
        (["run", "--tasks", "latin.txt", "--", "nowhere", "-x"], {}, 1, "the agent's program 'nowhere' is neither in PATH nor in"),
        (["up", "--set", "engine.model=m", "--", "--agent", "nowhere:f"], {}, 1, "there is no module 'nowhere' in"),
        (
            ["up", "--set", "engine.model=m", "--set", "queue.url=http://127.0.0.1:9", "--", "--tasks", "nowhere", "true"],
            {},
            1,
            "nowhere is neither a file nor a directory.",
        ),
        (["queue", "dead", "--limit", "0"], {}, 2, "--limit 0 lists nothing. Give 1 or more."),
        (["queue", "list", "--limit", "-4"], {}, 2, "--limit -4 lists nothing. Give 1 or more."),
        (
            ["prompt", "optimise", "p", "--tasks", "nowhere", "--set", "queue.url=http://127.0.0.1:9", "python"],
            {},
            1,
            "nowhere is neither a file nor a directory.",
        ),
        (["engine", "--model", "nowhere"], {}, 2, "engine.model = 'nowhere' is no directory. Set it to"),
        (["train"], {}, 2, "trainer.model is not set."),
        (["train", "--model", "nowhere"], {}, 2, "trainer.model = 'nowhere' is no directory."),
        (["build"], {"SPANGRAD_STORE__URL": "http://127.0.0.1:9"}, 1, "the span store at http://127.0.0.1:9 does not answer"),
    ],
)
def test_user_errors_are_one_sentence_with_exit_code(
    arguments: list[str], env: dict[str, str], code: int, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"Caf\xe9 au lait")
    (tmp_path / "utf16.txt").write_text("au lait", "utf-16-le")
    names = ("OTLP_GRPC_PORT", "OTLP_HTTP_PORT", "CLICKHOUSE_PORT")  # another store may run on this machine
    ports = {f"SPANGRAD_STORE__{name}": str(port) for name, port in zip(names, free_ports(3), strict=True)}
    answer = spangrad(*arguments, cwd=tmp_path, **{**ports, **env})
    assert sentence in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.returncode == code


@pytest.mark.parametrize("words", ["schema show", "config"])  # text of print, and a table of rich
def test_command_into_closed_pipe_exits_141_silently(words: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        command = [sys.executable, "-m", "spangrad", *words.split()]
        answer = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    assert (answer.returncode, answer.stderr) == (141, b"")


def test_command_without_stdout_ends_as_with_it(tmp_path: Path) -> None:
    for words, code in (("schema show", 0), ("config", 0), ("lineage x", 2)):
        command = ["sh", "-c", 'exec "$0" -m spangrad "$@" >&-', sys.executable, *words.split()]
        answer = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
        assert (answer.returncode, "Traceback" in answer.stderr) == (code, False)


def test_command_with_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as out:
        command = [sys.executable, "-m", "spangrad", "schema", "show"]
        answer = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    assert (answer.returncode, answer.stderr.startswith(b"spangrad: [Errno 28] No space left on device. Free")) == (1, True)
    assert answer.stderr.count(b"\n") == 1


def test_config_command_into_latin_1_escapes_other_characters(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spangrad", "config", "--set", "store.path=a→b"]
    answer = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, cwd=tmp_path, check=False)
    assert (answer.returncode, rb"a\u2192b" in answer.stdout) == (0, True), answer.stderr


def test_config_command_prints_source_of_each_value(tmp_path: Path) -> None:
    (tmp_path / "spangrad.toml").write_text("[gateway]\nport = 9999\n")
    answer = spangrad("config", cwd=tmp_path, SPANGRAD_RUNNER__WORKERS="3")
    lines = {line.split()[0]: line.split() for line in answer.stdout.splitlines() if line.strip()}
    assert lines["gateway.port"] == ["gateway.port", "9999", "file", "spangrad.toml"]
    assert lines["runner.workers"] == ["runner.workers", "3", "environment", "SPANGRAD_RUNNER__WORKERS"]


def test_config_command_into_pipe_cuts_no_text(tmp_path: Path) -> None:
    long, longest = "x" * 300, "y" * 20_000
    values = ["--set", f"engine.model={long}", "--set", f"trainer.model={longest}"]
    answer = spangrad("config", *values, cwd=tmp_path, COLUMNS="80")
    lines = {line.split()[0]: line.split()[1:] for line in answer.stdout.splitlines()}
    assert "…" not in answer.stdout
    assert lines["engine.model"] == [long, "flag"]
    assert answer.stdout.count("y") >= len(longest)
    assert "runner.validation_sampling.temperature" in lines


def test_config_command_masks_secrets(tmp_path: Path) -> None:
    answer = spangrad("config", "--set", "store.token=sesame", cwd=tmp_path)
    assert "sesame" not in answer.stdout


def test_flag_values_parse_json_or_text() -> None:
    overrides = ["a.b=1", "a.c=text", 'a.d=["x"]', "a.e=x=y", "a.g=null"]
    assert flag_values(overrides, {"a.b": 2, "a.f": None}) == {"a.b": 2, "a.c": "text", "a.d": ["x"], "a.e": "x=y", "a.g": None}
    unreadable = ["[" * 100_000, "9" * 5000]
    assert [flag_values([f"a.b={text}"]) for text in unreadable] == [{"a.b": text} for text in unreadable]
    with pytest.raises(SettingsError):
        flag_values(["novalue"])


def test_demo_settings_written_to_file_load_unchanged(tmp_path: Path) -> None:
    tables = {"gateway.clients": [{"name": "evals", "token": "sesame", "policies": ["p"]}], "gateway.models": {"gpt-4o": "policy"}}
    values = {**demo_settings(tmp_path / "élan 🦙", seed=3, group_size=8), "store.token": "sesame", "queue.keep_days": None, **tables}
    other = tmp_path / "other.toml"
    other.write_text("[builder]\nquiet_seconds = 9\n")
    write_settings(tmp_path / "spangrad.toml", explain_settings(values, file=other, env={}))
    assert load_settings(file=tmp_path / "spangrad.toml", env={}) == load_settings(values, file=other, env={})


def test_sql_command_on_stopped_store_opens_its_data(tmp_path: Path) -> None:
    (tmp_path / "spangrad.toml").write_text('[store]\ntoken = "sesame"\nurl = "http://127.0.0.1:9"\n')
    (tmp_path / "data" / "store").mkdir(parents=True)
    answer = spangrad("sql", "SELECT count() AS spans FROM spangrad.rollout_spans", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["spans", "0"]
    assert "opening data/store until this command ends" in answer.stderr


def test_own_store_asks_other_users_for_its_token(tmp_path: Path) -> None:
    with own_store(tmp_path / "store", StoreSettings(read_token=SecretStr("sesame"))) as store:
        with closing(connect(store)) as client:
            assert client.command("SELECT 1") == 1
        assert status_of(f"{store.url}/?query=SELECT+1") == 401
        assert status_of(f"{store.url}/?query=SELECT+1&password=sesame") == 401


def test_sql_command_with_empty_result_prints_no_rows(tmp_path: Path) -> None:
    (tmp_path / "data" / "store").mkdir(parents=True)
    answer = spangrad("sql", "SELECT 1 AS one WHERE 0", "--set", "store.url=http://127.0.0.1:9", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (0, "no rows\n"), answer.stderr


def test_store_that_answers_elsewhere_is_refused_with_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moments, pauses = itertools.count(), list[float]()
    monkeypatch.setattr(stopped_store, "time", SimpleNamespace(monotonic=lambda: next(moments), sleep=pauses.append))
    with (tmp_path / "owner").open("w") as owner:
        print(os.getpid(), file=owner, flush=True)
        fcntl.flock(owner, fcntl.LOCK_EX)
        with (
            pytest.raises(StoreError, match=f"process {os.getpid()} has {tmp_path} open, and answers elsewhere. Set store.url to where"),
            answering_store(StoreSettings(url="http://127.0.0.1:9", path=tmp_path)),
        ):
            pass
    assert capsys.readouterr().err == f"waiting for process {os.getpid()}, which has {tmp_path} open, to answer at http://127.0.0.1:9\n"


def test_store_that_opens_its_data_at_the_same_time_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    settings, servers, owners = StoreSettings(url=f"http://127.0.0.1:{port}", path=tmp_path), list[ThreadingHTTPServer](), list[str]()

    def not_yet(path: Path) -> str:
        owners.append(user_of(path) if owners else "")
        return owners[-1]

    def start(seconds: float) -> None:
        servers.append(ThreadingHTTPServer(("127.0.0.1", port), SimpleHTTPRequestHandler))
        Thread(target=servers[0].serve_forever, daemon=True).start()

    monkeypatch.setattr("collector.database.user_of", not_yet)
    monkeypatch.setattr(stopped_store, "time", SimpleNamespace(monotonic=time.monotonic, sleep=start))
    with (tmp_path / "owner").open("w") as owner:
        print(os.getpid(), file=owner, flush=True)
        fcntl.flock(owner, fcntl.LOCK_EX)
        with answering_store(settings) as store:
            assert store is settings
    assert owners == ["", str(os.getpid()), str(os.getpid())]
    servers[0].shutdown()
    servers[0].server_close()


def test_sql_command_prints_text_without_markup(tmp_path: Path) -> None:
    (tmp_path / "data" / "store").mkdir(parents=True)
    text = "<s>[INST] :key: list[int] [/INST]"
    answer = spangrad("sql", f"SELECT '{text}' AS `a [/b]`", "--set", "store.url=http://127.0.0.1:9", cwd=tmp_path)
    assert (answer.returncode, [line.strip() for line in answer.stdout.splitlines()]) == (0, ["a [/b]", text]), answer.stderr


def test_command_ignores_shadowing_modules_in_working_directory(tmp_path: Path) -> None:
    for name in ("commands", "collector", "runner", "spangrad"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "data" / "store").mkdir(parents=True)
    script = Path(sys.executable).parent / "spangrad"
    question = [script, "sql", "SELECT 1 AS one", "--set", "store.url=http://127.0.0.1:9"]
    answer = subprocess.run(question, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60)
    assert (answer.returncode, answer.stdout.split()) == (0, ["one", "1"]), answer.stderr
