"""The queue of rollouts: durable rows, handed out under leases over HTTP.

`tables.py` holds the rows, `rows.py` and `endings.py` what may become of them in a transaction, `writer.py` puts what many ask into one
transaction, `service.py` knows who holds what, `server.py` answers HTTP, `client.py` asks it, `wire.py` is what both say.
"""
