"""The kernel: names, types, errors, settings and the command line that every part shares.

An agent's process imports this package, so importing it loads nothing but the standard library.
"""

from spangrad.prompt_client import Prompt, prompt

__all__ = ["Prompt", "__version__", "prompt"]

__version__ = "0.1.0"
