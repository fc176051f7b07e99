"""Tools of agents that act inside a sandbox: a shell and an interpreter that stay, and files; for OpenAI clients and for MCP."""
