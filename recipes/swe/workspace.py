"""Sandboxes of the recipe: a private copy of a repository at the commit of an issue, without its later history.

In: a task. Out: rules of a sandbox, and the command that makes the copy in it. Invariant: a sandbox reads the tree of its task, an
interpreter and what is named, and nothing else of the run: neither tests nor other tasks.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.sandboxes.policy import SandboxLimits, SandboxPolicy, interpreter_paths

LIMITS = SandboxLimits(processes=256, memory_bytes=4 * 2**30, disk_bytes=2 * 2**30)
COPY_SECONDS = 120.0


def policy_of(given: Mapping[str, Any], *readable: Path) -> SandboxPolicy:
    """Return the rules of a task's sandboxes, which can read these files as well."""
    return SandboxPolicy(Path(given["tree"]), (*interpreter_paths(Path(given["python"])), *readable), {}, False, LIMITS)


def copy_command(given: Mapping[str, Any], root: str) -> str:
    """Return the shell command that copies the tree to a directory inside, as a repository of one commit."""
    git = "git -c user.name=spangrad -c user.email=none -c core.hooksPath=/dev/null"
    tree, target = shlex.quote(given["tree"]), shlex.quote(root)
    return f"cp -r {tree} {target} && cd {target} && git init -q && git add -A && {git} commit -q --no-gpg-sign -m base"
