"""OTLP: its receivers over gRPC and HTTP, and spans and log records as rows."""
