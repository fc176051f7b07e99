"""Grafana dashboards over the span store, as code: `python -m dashboards` writes the files that Grafana is provisioned with.

In: the store's tables and views. Out: `json/*.json`, beside the data source and provider files in `provisioning/`. Invariant: every
panel queries the ClickHouse data source and reads the narrowest table that holds its data; the committed files are those that the code
generates.
"""
