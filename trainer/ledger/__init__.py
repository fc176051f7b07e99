"""The ledger: versions, leases of rollouts, skipped groups, and their copy in the span store."""
