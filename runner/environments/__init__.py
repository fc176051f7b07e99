"""Environments that attempts lease over HTTP.

`instance.py` is one of them, `pool.py` gives them to one user after the other, `server.py` answers HTTP, `client.py` asks it, `wire.py` is
what both say.
"""
