"""One module a convention: each maps its spans to the builder's canonical calls, tools and agents."""
