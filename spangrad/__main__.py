"""Run `spangrad` by `python -m spangrad`."""

from spangrad.cli import main

main()
