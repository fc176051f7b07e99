"""One module a convention of instrumentation."""
