"""ClickHouse's HTTP interface over the embedded database."""
