"""Child processes: stopped whole, their logs shown, never outliving their parent."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
import uuid
from itertools import repeat
from pathlib import Path

import pytest

from runner.sessions.shards import ShardCommand
from spangrad import processes
from spangrad.errors import SpangradError
from spangrad.processes import MARK, Child, dying_with_parent, free_ports, kill_marked, require_free_port, require_safe_bind, wait_until
from tests.support.worker_kills import runs


def require_ended(pid: int) -> None:
    end = time.monotonic() + 60
    while runs(pid):
        assert time.monotonic() < end, f"process {pid} still runs"
        time.sleep(0.02)


def test_child_stop_ends_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    child = Child("parent", [sys.executable, "-c", code], log)
    wait_until(lambda: log.read_text().strip() != "", 60, "the grandchild", [child])
    grandchild = int(log.read_text())
    child.stop()
    require_ended(child.process.pid)
    require_ended(grandchild)


def test_child_of_killed_parent_dies(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from spangrad.processes import Child\n"
        f"c = Child('c', [sys.executable, '-c', 'import time; time.sleep(600)'], Path({str(tmp_path / 'log')!r}))\n"
        "print(c.process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    require_ended(child)


def test_wait_until_with_dead_child_raises_with_end_of_log(tmp_path: Path) -> None:
    child = Child("spangrad thing", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], tmp_path / "log")
    with pytest.raises(SpangradError, match=r"spangrad thing ended with exit code 3[\s\S]*the reason"):
        wait_until(lambda: False, 30, "it", [child])


def test_child_tail_reads_no_more_than_the_end_of_a_large_log(tmp_path: Path) -> None:
    child = Child("spangrad thing", [sys.executable, "-c", ""], tmp_path / "log")
    child.process.wait()
    with child.log.open("wb") as log:
        log.writelines([b"x" * 2**20 + b"\n"] * 64)
        log.write("last but one é\nlast\n".encode())
    tracemalloc.start()
    try:
        assert child.tail(2) == "last but one é\nlast"
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


def test_require_free_port_in_use_raises_with_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SpangradError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*set store\.otlp_http_port"):
            require_free_port("127.0.0.1", port, "store.otlp_http_port")
    require_free_port("127.0.0.1", port, "store.otlp_http_port")


def test_require_free_port_without_the_address_family_raises_with_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(SpangradError, match=r"cannot listen on ::1:8190 \(Address family not supported by protocol\)\. .*set queue\.port"):
        require_free_port("::1", 8190, "queue.port")


def test_free_ports_are_distinct_and_below_outgoing_range() -> None:
    ports = [*free_ports(20), *(port for _ in range(500) for port in free_ports(1))]
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])

    assert len(set(ports)) == 520
    assert max(ports) < lowest_outgoing


def test_free_ports_skip_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    (used,) = free_ports(1)
    monkeypatch.setattr("spangrad.processes._SERVER_PORTS", range(used, used + 1))
    monkeypatch.setattr("spangrad.processes._server_ports", lambda: repeat(used))
    assert free_ports(1) == [used]
    with socket.socket() as server:
        server.bind(("127.0.0.1", used))
        with pytest.raises(SpangradError, match=f"no 1 free ports on 127.0.0.1 between {used}"):
            free_ports(1)


def test_require_safe_bind_beyond_loopback_without_token_raises() -> None:
    with pytest.raises(SpangradError, match=r"Set store\.token, or bind 127\.0\.0\.1"):
        require_safe_bind("0.0.0.0", None, "store")
    with pytest.raises(SpangradError):
        require_safe_bind("0.0.0.0", "", "store")
    require_safe_bind("0.0.0.0", "token", "store")
    require_safe_bind("127.0.0.1", None, "store")


FORKS_ON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
for _ in range(500):
    if not os.fork():
        if sys.argv[1] == "own groups":
            os.setsid()
        time.sleep(600)
        os._exit(0)
    time.sleep(0.0002)
"""


@pytest.mark.parametrize("groups", ["one group", "own groups"])
def test_kill_marked_kills_processes_forked_during_its_look(groups: str) -> None:
    for _ in range(3):
        mark = uuid.uuid4().hex
        subprocess.run([sys.executable, "-SE", "-c", FORKS_ON, groups], env={MARK: mark}, check=True)
        kill_marked(mark)
        for pid in [pid for pid in all_pids() if f"{MARK}={mark}".encode() in environment_of(pid)]:
            require_ended(pid)  # it is killed, and on a busy machine yet to end; what is not killed sleeps for ten minutes


def test_kill_marked_of_endless_forks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    variables: list[bytes] = []
    monkeypatch.setattr("spangrad.processes._kill_marked_once", lambda variable: variables.append(variable) is None)
    begin = time.monotonic()
    kill_marked("mark")
    assert (len(variables) >= 8, 0.4 <= time.monotonic() - begin < 10) == (True, True)


def test_kill_marked_looks_again_while_a_process_may_be_within_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was just started without an environment looks like it."""
    results: list[bool] = []
    look_once = processes._kill_marked_once

    def counted(variable: bytes) -> bool:
        results.append(look_once(variable))
        return results[-1]

    monkeypatch.setattr(processes, "_kill_marked_once", counted)
    monkeypatch.setattr(processes, "_STARTING_SECONDS", 600.0)  # looks of a busy machine take long: the process stays young meanwhile
    sleeper = subprocess.Popen(["sleep", "600"], env={})
    try:
        kill_marked(uuid.uuid4().hex)
        assert (len(results) >= 8, any(results), sleeper.poll()) == (True, True, None), "it is looked for, and lives"
        monkeypatch.setattr(processes, "_STARTING_SECONDS", 0.0)
        results.clear()
        kill_marked(uuid.uuid4().hex)
        assert results == [False, False], "an older one has no environment for good"
    finally:
        sleeper.kill()
        sleeper.wait()


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_program_whose_parent_died_before_its_begin_is_not_run(tmp_path: Path) -> None:
    (own, late) = (tmp_path / "own", tmp_path / "late")
    assert subprocess.run(dying_with_parent(["touch", str(own)]), check=True).returncode == 0
    code = f"import json; from spangrad.processes import dying_with_parent; print(json.dumps(dying_with_parent(['touch', {str(late)!r}])))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert subprocess.run(json.loads(ended.stdout), check=False).returncode == 143
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_program_is_looked_up_where_popen_does(tmp_path: Path) -> None:
    program = tmp_path / "a=b" / "folder" / "program"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho $0 $#")
    program.chmod(0o755)
    environment = {"PATH": str(program.parent)}
    for command in (
        dying_with_parent(["program", "an argument", "-n"], environment),
        dying_with_parent(["./program", "an argument", "-n"], environment, program.parent),
        dying_with_parent(["folder/program", "an argument", "-n"], environment, program.parent.parent),
        dying_with_parent(["program", "an argument", "-n"], {"PATH": "nowhere:folder"}, program.parent.parent),
        dying_with_parent([str(program), "an argument", "-n"], environment, Path("/nowhere")),
    ):
        assert subprocess.run(command, env=environment, capture_output=True, check=True).stdout == f"{program} 2\n".encode()


def test_program_without_path_variable_is_looked_up_in_system_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("program", "true"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 3")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert subprocess.run(dying_with_parent(["true"], {}), env={}, check=False).returncode == 0
    with pytest.raises(FileNotFoundError, match="program"):
        dying_with_parent(["program"], {})


def test_program_has_the_variables_that_it_is_given() -> None:
    environment = {"a.b": "1", "c-d": "two words", "BASH_FUNC_f%%": "() { :; }", "é": "", "plain": "=", "PATH": os.environ["PATH"]}
    for given in (environment, {**environment, "PWD": str(Path.cwd())}):
        shown = subprocess.run(dying_with_parent(["env", "-0"], given), env=given, capture_output=True, check=True).stdout.decode()
        variables = dict(variable.split("=", 1) for variable in shown.split("\0")[:-1])
        assert {name: value for name, value in variables.items() if name not in {"_", "SHLVL", "OLDPWD"}} == given


def test_program_that_cannot_be_started_raises_as_popen_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_text("")
    (tmp_path / "stale").write_text("#! /nowhere/python -u\n")
    (tmp_path / "stale").chmod(0o755)
    missing = ("unknown", "./unknown", "data", "./stale")
    for name, number in (*((name, errno.ENOENT) for name in missing), ("./data", errno.EACCES)):
        with pytest.raises(OSError, match=name) as raised:
            dying_with_parent([name], directory=tmp_path)
        assert (raised.value.errno, raised.value.filename) == (number, name)
    (script := tmp_path / "script").touch(0o755)
    for interpreter in ("/bin/sh\r", "./lacking"):
        script.write_bytes(f"#! {interpreter} -x\n".encode())
        with pytest.raises(FileNotFoundError, match=r"its interpreter .* cannot be run") as lacking:
            dying_with_parent(["./script"], directory=tmp_path)
        assert lacking.value.filename == "./script"
        with pytest.raises(FileNotFoundError):
            subprocess.run([script], cwd=tmp_path, check=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="Install util-linux"):
        dying_with_parent([sys.executable])


def test_raise_files_limit_is_not_inherited_by_agents() -> None:
    code = """
import resource, subprocess, sys
from spangrad.processes import dying_with_parent, raise_files_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
for _ in range(2):
    raise_files_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
show = [sys.executable, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"]
subprocess.run(dying_with_parent(show, inherits_limit=True), check=True)
subprocess.run(dying_with_parent(show), check=True)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"(200, 200)\n(100, 200)\n(200, 200)\n"


def test_serve_raises_the_limit_of_open_files() -> None:
    code = """
import os, resource, signal
from contextlib import asynccontextmanager
from spangrad.http.server import serve
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
@asynccontextmanager
async def service():
    yield
def ready(_):
    print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
serve(service, ready)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"(200, 200)\n"


def test_shard_may_open_as_many_files_as_its_server_could_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_inherited_files", 512)
    (requests, requests_of_shard), (responses, responses_of_shard) = socket.socketpair(), socket.socketpair()
    with requests, requests_of_shard, responses, responses_of_shard:
        agents = Path(__file__).resolve().parent.parent / "agents"
        responses.settimeout(60)
        process = ShardCommand("guess_game:Guess", agents, {}).start(requests_of_shard, responses_of_shard)
        responses.recv(1)  # it is ready
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == 512
        requests.close()
        process.wait(60)
