"""`python -m dashboards`: writes the dashboards' files; with `--check`, names the files that differ from the code's output."""

from __future__ import annotations

import argparse
import sys

from dashboards.files import DIRECTORY, differing, write


def main() -> int:
    """Write or check the files; return the exit code, which is 1 if `--check` found a file that differs."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description="Write the files that Grafana is provisioned with.")
    parser.add_argument("--check", action="store_true", help="write nothing; name the files that differ from the code's output")
    if parser.parse_args().check:
        names = differing()
        for name in names:
            print(f"{DIRECTORY / name} is not what the code makes: run `python -m dashboards`", file=sys.stderr)
        return 1 if names else 0
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
