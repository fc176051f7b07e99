"""Choice of the engine that confines programs on this machine: what was asked for, or the strongest that works.

Invariant: an engine is chosen after a program has run in it, and `none` only where it is written.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runner.sandboxes import bubblewrap, landlock, supervisor
from runner.sandboxes.images import UnpackedImage
from runner.sandboxes.policy import RemoteServer, SandboxPolicy, inner_interpreter, interpreter_paths, require_narrow
from runner.sandboxes.remote import require_expressible
from runner.sandboxes.seccomp import write_filter
from spangrad.errors import SandboxError
from spangrad.http.service import without_userinfo
from spangrad.types import SandboxRung

_PROBE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SandboxEngine:
    """An engine, ready to confine programs by a policy."""

    rung: SandboxRung
    prefix: tuple[str, ...]
    """Beginning of a command line that runs the rest of it in a new sandbox."""
    reason: str
    """Explanation for people: why it was chosen."""
    image: UnpackedImage | None = None
    """File system that programs see. None: this machine's programs and libraries."""
    directory: Path = Path()
    """Working directory of the policy, which a remote sandbox uploads."""
    remote: RemoteServer | None = None
    """Server that is the sandbox. None: it is on this machine."""


def scratch_directory() -> Path:
    """Return the directory of this user's filters and private directories, which users of sandboxes can pass through.

    Raises:
        SandboxError: another user has created it.
    """
    path = Path(tempfile.gettempdir()) / f"spangrad-sandboxes-{os.geteuid()}"
    path.mkdir(exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.geteuid():
        raise SandboxError(f"{path} belongs to another user, who could change what sandboxes do. Remove it, or set TMPDIR.")
    path.chmod(0o711)  # whatever the umask is
    return path


def prepare(policy: SandboxPolicy) -> SandboxEngine:
    """Return the engine that fits, after a program has run in it: many sandboxes of a policy are then started without another look.

    Raises:
        SandboxError: none works here, or a remote one cannot keep the policy.
    """
    if policy.engine is SandboxRung.REMOTE:
        require_narrow(policy)  # the directory is uploaded
        server = require_expressible(policy)
        return SandboxEngine(policy.engine, (), f"{without_userinfo(server.url)} is its server", directory=policy.directory, remote=server)
    return choose(with_supervisor(policy))


def with_supervisor(policy: SandboxPolicy) -> SandboxPolicy:
    """Return a policy by which the supervisor can run as well.

    Raises:
        SandboxError: the image has no interpreter.
    """
    interpreter = inner_interpreter(policy.image)
    paths = interpreter_paths(interpreter) if policy.image is None else ()
    return replace(policy, readable=(*policy.readable, *paths, Path(supervisor.__file__)))


def choose(policy: SandboxPolicy, control: int | None = None) -> SandboxEngine:
    """Return the engine that was asked for, or, for `auto`, the strongest that works here; a program is run in it to find out.

    The policy's rung is not `remote`; `control` is the descriptor of the relay's socket, None: no service is reached.

    Raises:
        SandboxError: the machine can do none of them, or the policy shows too much.
    """
    require_narrow(policy)
    strongest_first = [rung for rung in reversed(SandboxRung) if rung.reaches(SandboxRung.LANDLOCK)]
    rungs = [rung for rung in strongest_first if rung.reaches(policy.least)] if policy.engine == "auto" else [policy.engine]
    scratch = scratch_directory()
    landlock.remove_left_behind(scratch)
    reasons: list[str] = []
    for rung in rungs:
        prefix, why_not = _prepared(rung, policy, scratch, control)
        why_not = why_not or _refusal(prefix, control)
        if why_not is None:
            return SandboxEngine(rung, tuple(prefix), "; ".join(["it works on this machine", *reasons]), policy.image)
        reasons.append(f"{rung} does not: {why_not}")
    raise SandboxError(
        f"no sandbox can be started here. {'; '.join(reasons)}. Name another one in runner.sandbox.engine (and runner.sandbox.least), or "
        "write none: the programs then have all rights of this user."
    )


def _prepared(rung: SandboxRung, policy: SandboxPolicy, scratch: Path, control: int | None) -> tuple[list[str], str | None]:
    """Return an engine's prefix, or the reason for which it cannot work."""
    if rung is SandboxRung.BUBBLEWRAP:
        if (why_not := bubblewrap.shortcoming()) is not None:
            return [], why_not
        write_filter(filter_file := scratch / "bubblewrap.bpf", shared_network=False, shared_ipc=False)
        return bubblewrap.command(policy, filter_file, control), None
    if (why_not := landlock.shortcoming(policy)) is not None:
        return [], why_not
    kept_to_tcp = not policy.host_network
    write_filter(filter_file := scratch / f"landlock-{'tcp' if kept_to_tcp else 'host'}.bpf", shared_network=kept_to_tcp, shared_ipc=True)
    return landlock.command(policy, filter_file, scratch), None


def _refusal(prefix: Sequence[str], control: int | None) -> str | None:
    """Return the reason for which a program did not run in an engine. None: it did."""
    descriptors = () if control is None else (control,)
    try:
        probe = subprocess.run(
            [*prefix, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False,
            pass_fds=descriptors,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    last_line = probe.stderr.strip().rpartition("\n")[2].strip()
    return None if probe.returncode == 0 else last_line or f"exit code {probe.returncode}"
