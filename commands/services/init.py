"""`spangrad init`: a settings file that fits a model to this machine."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from shlex import quote

from commands.options import ConfigFile
from commands.output_files import make_directory_of
from spangrad.errors import SettingsError


def init(*, model: Path, config: ConfigFile = None) -> None:
    """Probe this machine and a model, and write a commented settings file with which `spangrad up` starts.

    An existing file is never overwritten.

    Args:
        model: directory of the model to train, in Hugging Face's layout.
    """
    from spangrad.probing.machine import choose_ports, read_machine
    from spangrad.probing.model import read_model
    from spangrad.probing.proposals import Ports, propose, settings_text
    from spangrad.settings.sources import load_settings

    file = config or Path("spangrad.toml")
    if file.exists():
        raise SettingsError(f"{file} exists already. Edit it, or name another file with --config.")
    make_directory_of(file, "--config")
    machine = read_machine(file.parent)
    ports = Ports(*choose_ports(astuple(Ports())))
    proposals = propose(read_model(model), machine, ports)
    load_settings({proposal.key: proposal.value for proposal in proposals}, env={})
    where = f"{len(machine.gpus)} GPU(s)" if machine.gpus else "no GPU"
    title = f"Written by `spangrad init` for a machine with {machine.cores} cores, {machine.memory_bytes / 2**30:.1f} GiB free, {where}."
    with file.open("x", encoding="utf-8") as out:
        out.write(settings_text(proposals, title))
    print(f"{file} is written. Start everything with `spangrad up{f' --config {quote(str(config))}' if config else ''}`.")
