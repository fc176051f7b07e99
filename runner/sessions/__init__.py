"""Sessions of environments by OpenEnv's protocol: each user has an environment, which lives in one of several processes.

`messages.py` holds the protocol, `instance.py` is one session's environment, `shard.py` the process of many, `frames.py` what it exchanges
with the server, `shards.py` the server's side of the processes, `sessions.py` the leases, and `server.py` the routes.
"""
