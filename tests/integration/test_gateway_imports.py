"""Imports of a gateway's process."""

from __future__ import annotations

import subprocess
import sys


def test_gateway_without_retokenize_imports_no_transformers() -> None:
    code = "import sys, gateway.server; print('transformers' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False False\n"
