"""Everything that the store and the ledger hold of one rollout: its record, its spans as a tree, and sentences that explain it."""
