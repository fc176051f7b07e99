"""The commands of `spangrad`, one file each: a command resolves the settings and passes them to the package that does the work.

Only these files import those packages; `spangrad.cli` names the commands and imports none until the command line has been parsed.
"""
