"""Core that every part shares: names, types, errors, settings and the command line.

In: nothing. Out: for users, `spangrad.rollout` (the decorator), `spangrad.prompt`, `spangrad.MaxTurnsError` and `spangrad.Client`.
Invariant: an agent's process imports this package, so importing it loads nothing but the standard library. Two wheels share the folder:
an agent's has the modules that its process imports, the server's has the rest (docs/decisions/0001-two-wheels-one-checkout.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spangrad.agent.decorator import rollout
from spangrad.agent.failures import MaxTurnsError
from spangrad.agent.prompt_client import Prompt, prompt

if TYPE_CHECKING:
    from spangrad.client.client import Client

__all__ = ["Client", "MaxTurnsError", "Prompt", "__version__", "prompt", "rollout"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load `Client` when it is first used: it needs the packages of the server's wheel."""
    if name == "Client":
        try:
            from spangrad.client.client import Client
        except ModuleNotFoundError as error:
            raise ImportError(
                f"spangrad.Client runs workers, which need the server's wheel ({error}): pip install 'spangrad-server[runner]'."
            ) from error
        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
