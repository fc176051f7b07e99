"""The span store's schema: numbered migrations, their form on a cluster, and the retention of rows."""
