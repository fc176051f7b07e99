"""OTLP: receivers over gRPC and HTTP, and encoders of spans and log records as rows."""
