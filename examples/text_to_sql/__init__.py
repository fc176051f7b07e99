"""Questions about a database that a LangGraph of writer, checker and rewriter answers in SQL."""
