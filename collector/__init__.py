"""The collector: OTLP in, the span store's tables out, and ClickHouse's HTTP interface for whoever reads them."""
