"""The queue of rollouts: durable rows, leased to workers over HTTP.

`tables.py` defines the tables, `rows.py` and `endings.py` the operations within a transaction; `writer.py` batches concurrent operations
into one transaction, `service.py` tracks leases and timeouts, `server.py` serves HTTP, `client.py` is its client, and `wire.py` holds the
messages.
"""
