"""The collector: receives OTLP, writes the span store's tables, and serves them over ClickHouse's HTTP interface."""
