"""`python -m dashboards`: writes the dashboards' files."""

from __future__ import annotations

from dashboards.files import write

if __name__ == "__main__":
    write()
