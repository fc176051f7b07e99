"""One file a command: each resolves the settings and hands them to the stage that does the work.

These files, and the demo, are the only ones of this package that import stages.
"""
