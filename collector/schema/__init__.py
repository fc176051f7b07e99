"""The span store's tables: numbered migrations, their form on a cluster, and what of them expires."""
