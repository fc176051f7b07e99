"""`python -m spangrad` is `spangrad`."""

from spangrad.cli import main

main()
