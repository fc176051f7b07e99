"""Environments that attempts lease over HTTP.

`instance.py` is one environment, `pool.py` leases several of them, `server.py` serves the pool over HTTP, `client.py` is its client, and
`wire.py` holds the messages.
"""
