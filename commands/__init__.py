"""The top floor: one file a command, which resolves the settings and hands them to the stage that does the work.

Only these files import stages; `spangrad.cli` names them and imports none until the command line has been parsed.
"""
