"""The supervisor with real processes: order of readiness, restarts with back-off, a clean end, and nothing left after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from spangrad.errors import SpangradError
from spangrad.leases import holder_of, shown, this_process
from spangrad.processes import free_ports, own_command, wait_until
from spangrad.supervisor import launcher, run_directory
from spangrad.supervisor.run_directory import RunDirectory, fresh_directory, owner_of, status_of
from spangrad.supervisor.service import RestartPolicy, ServiceSpec
from spangrad.supervisor.supervisor import Supervisor
from tests.support.worker_kills import runs

SERVER = """
import http.server, os, sys, time
time.sleep(float(sys.argv[2]))
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
PREPARED = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
SLOW_END = f"import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit())); {PREPARED}"
WAITING_END = f"""
import signal, sys, time
def end(*_):
    while not pathlib.Path(sys.argv[1]).with_name("may-end").exists():
        time.sleep(0.01)
    sys.exit()
signal.signal(signal.SIGTERM, end)
{PREPARED}
"""
STUBBORN = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {PREPARED}"
DRAINS = f"""
import signal, sys, time
def drain(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
    drained = pathlib.Path(sys.argv[2])
    drained.with_suffix(".begun").touch()
    while len(list(drained.parent.glob("*.begun"))) < 4:  # one after the other, none would end within its grace
        time.sleep(0.01)
    time.sleep(2)
    drained.touch()
    sys.exit()
signal.signal(signal.SIGTERM, drain)
{PREPARED}
"""
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
QUICK = RestartPolicy(first_seconds=0.2, longest_seconds=0.4, tries=3)


def server(name: str, logs: Path, *needs: str, delay: float = 0) -> ServiceSpec:
    (port,) = free_ports(1)
    command = (sys.executable, "-c", SERVER, str(port), str(delay))
    return ServiceSpec(name, command, logs / f"{name}.log", f"http://127.0.0.1:{port}/", needs)


def poll_until(supervisor: Supervisor, reached: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, supervisor.status()
        supervisor.poll()
        time.sleep(0.02)


def pids(supervisor: Supervisor) -> dict[str, int | None]:
    return {each["name"]: each["pid"] for each in supervisor.status()}


def states(supervisor: Supervisor) -> dict[str, str]:
    return {each["name"]: each["state"] for each in supervisor.status()}


def test_supervisor_starts_in_order_of_needs_and_stops_in_reverse(tmp_path: Path) -> None:
    events: list[str] = []
    services = [server("gateway", tmp_path, "store"), server("store", tmp_path, delay=0.5), server("worker", tmp_path, "gateway")]
    with Supervisor(services, events.append) as supervisor:
        supervisor.poll()
        assert supervisor.status()[1]["waits_for"] == ["store"]
        supervisor.start(120)
        running = [pid for pid in pids(supervisor).values() if pid]
        assert len(running) == 3
    assert [event.partition(" (")[0] for event in events] == [
        *("starting store", "store is ready", "starting gateway", "gateway is ready", "starting worker", "worker is ready")
    ]
    assert not any(runs(pid) for pid in running)
    assert set(states(supervisor).values()) == {"stopped"}


@pytest.mark.parametrize(
    ("status", "body", "obstacle"),
    [(503, '{"error": {"message": "no engine answers"}}', "no engine answers"), (None, "", "loading weights")],
)
def test_supervisor_status_names_obstacle_of_starting_service(status: int | None, body: str, obstacle: str, tmp_path: Path) -> None:
    code = f"""
import http.server, sys, time
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response({status})
        self.end_headers()
        self.wfile.write({body!r}.encode())
    def log_message(*_): pass
print("starting", "loading weights", sep="\\n", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever() if {status} else time.sleep(600)
"""
    waiting = server("gateway", tmp_path)
    waiting = replace(waiting, command=(sys.executable, "-c", code, *waiting.command[3:]))
    with Supervisor([waiting], lambda text: None) as supervisor:
        poll_until(supervisor, lambda: supervisor.status()[0]["obstacle"] == obstacle)


def test_supervisor_stops_replicas_together_and_each_within_its_grace(tmp_path: Path) -> None:
    def replica(name: str, code: str, grace_seconds: float) -> ServiceSpec:
        command = (sys.executable, "-c", code, str(tmp_path / f"{name}-prepared"), str(tmp_path / f"{name}-drained"))
        return ServiceSpec(name, command, tmp_path / f"{name}.log", needs=("store",), grace_seconds=grace_seconds)

    workers = [replica(f"worker-{number}", DRAINS, 30) for number in range(4)]
    services = [server("store", tmp_path), *workers, replica("worker-9", STUBBORN, 0.1)]
    with Supervisor(services, lambda text: None) as supervisor:
        supervisor.start(120)
        wait_until(lambda: len(list(tmp_path.glob("*-prepared"))) == 5, 120, "the services' signal handlers")
        running = [pid for pid in pids(supervisor).values() if pid]
        supervisor.stop_all()
    assert len(list(tmp_path.glob("*-drained"))) == 4
    assert not any(runs(pid) for pid in running)


def test_supervisor_holds_back_services_that_need_a_command_which_ends(tmp_path: Path) -> None:
    events: list[str] = []

    def note(event: str) -> None:
        events.append(event)
        if event.startswith("store is ready"):
            (tmp_path / "go").touch()

    code = "import pathlib, time\nwhile not pathlib.Path('{}').exists(): time.sleep(0.01)"
    maker = ServiceSpec("model", (sys.executable, "-c", code.format(tmp_path / "go")), tmp_path / "model.log", ends=True)
    with Supervisor([maker, server("engine", tmp_path, "model"), server("store", tmp_path)], note) as supervisor:
        supervisor.start(120)
        assert states(supervisor) == {"model": "done", "engine": "ready", "store": "ready"}
    order = [event.partition(" (")[0] for event in events]
    assert order.index("store is ready") < order.index("model is done") < order.index("starting engine")
    failing = ServiceSpec("model", (sys.executable, "-c", "raise SystemExit(3)"), tmp_path / "model.log", ends=True)
    with (
        Supervisor([failing, server("engine", tmp_path, "model")], events.append) as supervisor,
        pytest.raises(SpangradError, match="model failed"),
    ):
        supervisor.start(120)


def test_supervisor_crashed_service_is_restarted_with_back_off(tmp_path: Path) -> None:
    events: list[str] = []
    with Supervisor([server("store", tmp_path)], events.append, policy=QUICK) as supervisor:
        supervisor.start(120)
        for crash in (1, 2, 3, 4):
            pid = pids(supervisor)["store"]
            assert pid
            os.kill(pid, signal.SIGKILL)
            poll_until(supervisor, lambda: states(supervisor)["store"] == "restarting")
            poll_until(supervisor, lambda: states(supervisor)["store"] == "ready")
            assert supervisor.status()[0]["restarts"] == crash
    delays = [event.partition("again in ")[2].partition(" s")[0] for event in events if "again in" in event]
    assert delays == ["0.2", "0.4", "0.4", "0.4"]


def test_supervisor_service_that_never_starts_raises_with_cause_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("spangrad: an old cause\n")
    script = "import sys; print('much'); print('spangrad: the cause. Set engine.dtype.', file=sys.stderr); sys.exit(1)"
    events: list[str] = []
    engine = ServiceSpec("engine", (sys.executable, "-c", script), log, "http://127.0.0.1:9/")
    with (
        Supervisor([engine], events.append, policy=QUICK) as supervisor,
        pytest.raises(SpangradError, match=r"(?s)engine failed: the cause. Set engine.dtype.\nIts log: .*engine.log"),
    ):
        supervisor.start(120)
    assert events.count("starting engine") == QUICK.tries


@pytest.mark.parametrize(("truncated", "cause"), [(True, "the cause"), (False, "its log cannot be read (No such file or directory)")])
def test_supervisor_service_whose_log_is_truncated_or_deleted_is_restarted(tmp_path: Path, *, truncated: bool, cause: str) -> None:
    log, go = tmp_path / "logs" / "build.log", tmp_path / "go"
    log.parent.mkdir()
    log.write_text("an earlier run\n" * 100)
    script = (
        f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\nprint('the cause'); raise SystemExit(1)"
    )
    build = ServiceSpec("build", (sys.executable, "-c", script), log)
    with Supervisor([build], lambda text: None, policy=replace(QUICK, first_seconds=60, longest_seconds=60)) as supervisor:
        supervisor.start(30)
        if truncated:
            os.truncate(log, 0)
        else:
            shutil.rmtree(log.parent)
        go.touch()
        poll_until(supervisor, lambda: states(supervisor)["build"] == "restarting")
        assert supervisor.status()[0]["cause"] == cause


def test_supervisor_service_whose_log_grows_keeps_two_files_of_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "_KEPT_BYTES", 30)
    log, before = tmp_path / "build.log", tmp_path / "build.log.1"
    lines = [f"line {number:04}\n" for number in range(9)]
    # It writes when the supervisor has looked at what is there: nothing is lost.
    script = f"import sys\nsys.stdin = open('go')\nfor line in {lines!r}: input(); print(line, end='', flush=True)\ninput()"
    os.mkfifo(tmp_path / "go")
    with Supervisor([ServiceSpec("build", (sys.executable, "-c", script), log)], lambda text: None, policy=QUICK) as supervisor:
        supervisor.start(30)
        with (tmp_path / "go").open("w", buffering=1) as go:
            for line in lines:
                go.write("\n")
                wait_until(lambda line=line: line in log.read_text(), 30, "the line")
                supervisor.poll()
            assert (before.read_text(), log.read_text()) == ("".join(lines[4:8]), lines[8])


def foreign_server(url: str) -> ThreadingHTTPServer:
    """Serve at a URL as another project's service does."""
    foreign = ThreadingHTTPServer(("127.0.0.1", int(url.rpartition(":")[2].strip("/"))), SimpleHTTPRequestHandler)
    Thread(target=foreign.serve_forever, daemon=True).start()
    return foreign


def test_supervisor_service_whose_url_answers_before_its_start_has_failed(tmp_path: Path) -> None:
    page = replace(server("page", tmp_path), port_setting="page.port")
    with foreign_server(page.ready_url or "") as foreign, Supervisor([page], lambda text: None, policy=QUICK) as supervisor:
        refused = f"page failed: {page.ready_url} answers before page is started: .* Stop it, or set page.port to another port"
        with pytest.raises(SpangradError, match=refused):
            supervisor.start(120)
        assert pids(supervisor) == {"page": None}
        foreign.shutdown()


def test_supervisor_service_whose_port_another_takes_while_it_starts_fails(tmp_path: Path) -> None:
    (port,), taken = free_ports(1), tmp_path / "taken"
    refused = (
        f"import pathlib, time\nwhile not pathlib.Path({str(taken)!r}).exists(): time.sleep(0.01)\n"
        "print('spangrad: cannot listen'); raise SystemExit(1)"
    )
    store = ServiceSpec(
        "store", (sys.executable, "-c", refused), tmp_path / "store.log", f"http://127.0.0.1:{port}/", port_setting="store.port"
    )
    engine = server("engine", tmp_path, "store", delay=600)
    with Supervisor([store, engine], lambda text: None, policy=QUICK) as supervisor:
        supervisor.poll()
        with foreign_server(store.ready_url or "") as foreign:
            poll_until(supervisor, lambda: states(supervisor)["store"] == "ready")  # as the other one answers
            taken.touch()
            poll_until(supervisor, lambda: supervisor.failed == ["store"], 60)
            assert "Stop it, or set store.port to another port" in supervisor.failure("store")
            foreign.shutdown()


def test_supervisor_restarts_service_once_its_url_is_free_again(tmp_path: Path) -> None:
    page = replace(server("page", tmp_path), port_setting="page.port")
    with Supervisor([page], lambda text: None, policy=QUICK) as supervisor:
        supervisor.start(120)
        pid = pids(supervisor)["page"]
        assert pid
        os.kill(pid, signal.SIGKILL)
        poll_until(supervisor, lambda: states(supervisor)["page"] == "restarting")
        with foreign_server(page.ready_url or "") as foreign:
            poll_until(supervisor, lambda: "answers before page is started" in supervisor.status()[0]["cause"])
            assert states(supervisor) == {"page": "restarting"}
            foreign.shutdown()
        poll_until(supervisor, lambda: states(supervisor)["page"] == "ready")


def test_supervisor_service_with_wrong_settings_is_not_restarted(tmp_path: Path) -> None:
    wrong = ServiceSpec("train", (sys.executable, "-c", "raise SystemExit(2)"), tmp_path / "train.log", "http://127.0.0.1:9/")
    with Supervisor([wrong], lambda text: None, policy=QUICK) as supervisor:
        poll_until(supervisor, lambda: supervisor.failed == ["train"])
        assert supervisor.status()[0]["restarts"] == 0


@pytest.mark.parametrize("ends", [False, True])
def test_supervisor_service_that_finishes_is_done(tmp_path: Path, *, ends: bool) -> None:
    done = ServiceSpec("train", (sys.executable, "-c", ""), tmp_path / "train.log", ends=ends, may_finish=not ends)
    with Supervisor([done], lambda text: None, policy=QUICK) as supervisor:
        poll_until(supervisor, lambda: states(supervisor)["train"] == "done")
        assert supervisor.are_ready
        assert supervisor.were_ready


def test_supervisor_service_that_ends_at_sigterm_is_restarted(tmp_path: Path) -> None:
    polite = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); {SERVER}"
    store = server("store", tmp_path)
    services = [
        replace(store, command=(sys.executable, "-c", polite, *store.command[3:])),
        ServiceSpec("build", (sys.executable, "-c", SLOW_END, str(tmp_path / "prepared")), tmp_path / "build.log"),
    ]
    with Supervisor(services, lambda text: None, policy=QUICK) as supervisor:
        supervisor.start(120)
        wait_until((tmp_path / "prepared").exists, 120, "the service's signal handler")
        for pid in pids(supervisor).values():
            assert pid
            os.kill(pid, signal.SIGTERM)
        poll_until(supervisor, lambda: [each["restarts"] for each in supervisor.status()] == [1, 1])
        poll_until(supervisor, lambda: supervisor.are_ready)
        assert set(states(supervisor).values()) == {"ready"}


def test_supervisor_killed_leaves_no_service(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from spangrad.supervisor import run_directory
from spangrad.supervisor.run_directory import RunDirectory
from spangrad.supervisor.service import ServiceSpec
from spangrad.supervisor.supervisor import Supervisor
with RunDirectory(Path({str(tmp_path)!r})) as run:
    services = [ServiceSpec(name, {SLEEP!r}, Path({str(tmp_path)!r}) / f"{{name}}.log") for name in ("a", "b")]
    with Supervisor(services, print) as supervisor:
        supervisor.start(120)
        run.publish({{"services": supervisor.status(), "ready": True}})
        time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: bool((status_of(tmp_path) or {}).get("ready")), 120, "the services")
        status = status_of(tmp_path)
        assert status
        running = [each["pid"] for each in status["services"]]
        assert owner_of(tmp_path) == holder_of(process.pid)
        assert all(runs(pid) for pid in running)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(runs(pid) for pid in running), 60, "the end of the services")
    assert owner_of(tmp_path) is None
    assert status_of(tmp_path) is None


def killed_run(directory: Path, service: str, grace_seconds: float = 120) -> int:
    """Have a supervisor run a service, and kill the supervisor alone once the service is `PREPARED`; return the service's process."""
    script = f"""
import sys, time
from pathlib import Path
from spangrad.processes import wait_until
from spangrad.supervisor import run_directory
from spangrad.supervisor.run_directory import RunDirectory
from spangrad.supervisor.service import ServiceSpec
from spangrad.supervisor.supervisor import Supervisor
directory = Path({str(directory)!r})
prepared = directory / "prepared"
command = (sys.executable, "-c", {service!r}, str(prepared))
gateway = ServiceSpec("gateway", command, directory / "log", grace_seconds={grace_seconds})
with RunDirectory(directory) as run, Supervisor([gateway], print) as supervisor:
    supervisor.start(120)
    wait_until(prepared.exists, 120, "the service's signal handler")
    run.publish({{"services": supervisor.status(), "ready": True}})
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: bool((status_of(directory) or {}).get("ready")), 120, "the service")
        status = status_of(directory)
        assert status
    finally:
        process.kill()
        process.wait()
    return int(status["services"][0]["pid"])


def test_up_waits_for_services_of_a_killed_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = killed_run(tmp_path, WAITING_END)
    assert runs(service)

    def let_end() -> None:
        wait_until(lambda: bool(caplog.records), 60, "the warning")
        (tmp_path / "may-end").touch()

    Thread(target=let_end).start()
    with RunDirectory(tmp_path):
        assert not runs(service)
        assert status_of(tmp_path) == {"services": []}, "the earlier run's status is not this one's"
    assert f"waiting for services of an earlier run in {tmp_path}, which was killed: gateway (process {service} on " in caplog.text
    caplog.clear()
    with RunDirectory(tmp_path):
        pass
    assert not caplog.records


def test_up_interrupted_while_it_waits_for_a_killed_run_leaves_it_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = killed_run(tmp_path, STUBBORN)

    def interrupt(seconds: float) -> None:
        status = status_of(tmp_path)
        assert status
        assert [each["state"] for each in status["services"]] == ["stopping"]
        raise KeyboardInterrupt

    try:
        monkeypatch.setattr("spangrad.supervisor.run_directory.time.sleep", interrupt)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                RunDirectory(tmp_path).__enter__()
            assert owner_of(tmp_path) is None
    finally:
        os.kill(service, signal.SIGKILL)


def test_up_kills_service_of_killed_run_that_does_not_end_in_its_grace(tmp_path: Path) -> None:
    service = killed_run(tmp_path, STUBBORN, grace_seconds=0)
    with RunDirectory(tmp_path):
        assert not runs(service)


def test_up_names_service_of_killed_run_that_cannot_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = killed_run(tmp_path, STUBBORN, grace_seconds=0)

    def refuse(leader: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(run_directory, "PREDECESSOR_SECONDS", 0.2)
    monkeypatch.setattr(run_directory, "kill_group", refuse)
    try:
        with pytest.raises(SpangradError, match=rf"do not end: gateway \(process {service} on .*Stop these processes with `kill -9`"):
            RunDirectory(tmp_path).__enter__()
        assert owner_of(tmp_path) is None
    finally:
        os.kill(service, signal.SIGKILL)


def test_run_directory_has_one_owner_and_keeps_foreign_files(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "up"
    with fresh_directory(run) as owned:
        (run / "old").touch()
        (run / "logs").mkdir()
        owned.clear()
        assert {path.name for path in run.iterdir()} == {".spangrad-run", ".spangrad-cleared"}
        with pytest.raises(SpangradError, match=f"process {os.getpid()} on .* runs in .*run already. Stop it"), RunDirectory(run):
            pass
    with fresh_directory(run):
        pass
    with RunDirectory(kept):
        (kept / "policies").mkdir()
    (tmp_path / "thesis.tex").touch()
    for foreign in (kept, tmp_path):
        with pytest.raises(SpangradError, match="is not empty, and not of an earlier run that may be deleted"):
            fresh_directory(foreign)


def test_up_twice_and_down_without_up_print_one_sentence(tmp_path: Path) -> None:
    def spangrad(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(own_command(*words), cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)

    (tmp_path / "spangrad.toml").write_text('[engine]\nmodel = "m"\n')
    for command in ("down", "ps"):
        absent = spangrad(command)
        assert absent.returncode == 1
        assert f"no `spangrad up` runs in {tmp_path}/data/up. Call this in the directory where it was started" in absent.stderr
    with RunDirectory(tmp_path / "data" / "up") as run:
        for words in (("up",), ("up", "--detach")):
            second = spangrad(*words)
            assert second.returncode == 1
            assert f"process {os.getpid()}" in second.stderr
            assert "Traceback" not in second.stderr
        demo = spangrad("demo", "--directory", "data/up")
        assert (demo.returncode, demo.stderr.count("\n")) == (1, 1), demo.stderr
        assert f"{shown(this_process())} runs in data/up already" in demo.stderr
        run.publish({"services": [], "ready": False})
        assert json.loads(spangrad("ps", "--json").stdout) == {"services": [], "ready": False}
