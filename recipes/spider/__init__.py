"""Spider: text to SQL by one model in three roles."""
