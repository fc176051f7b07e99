"""`python -m dashboards`: writes the dashboards' files; with `--check`, says which of them are not what the code makes."""

from __future__ import annotations

import argparse
import sys

from dashboards.files import DIRECTORY, differing, write


def main() -> int:
    """Exit code 1: `--check` found a file that differs."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description="Write what Grafana is provisioned with.")
    parser.add_argument("--check", action="store_true", help="write nothing; say which files differ from the code")
    if parser.parse_args().check:
        names = differing()
        for name in names:
            print(f"{DIRECTORY / name} is not what the code makes: run `python -m dashboards`", file=sys.stderr)
        return 1 if names else 0
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
