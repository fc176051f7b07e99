"""`python -m dashboards`: writes the dashboards' files."""

from __future__ import annotations

import argparse

from dashboards.files import write

if __name__ == "__main__":
    argparse.ArgumentParser("python -m dashboards", description="Write the dashboards' files to dashboards/json.").parse_args()
    write()
