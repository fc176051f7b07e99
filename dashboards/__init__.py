"""Grafana dashboards over the span store, as code: `python -m dashboards` writes what Grafana is provisioned with.

In: the store's tables and views. Out: `json/*.json`, beside the data source and provider files in `provisioning/`. Invariant: every
panel asks through the ClickHouse data source and reads the narrowest table that knows the answer; what is committed is what the code makes.
"""
