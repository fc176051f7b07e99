"""Training on files: supervised (SFT) and on preferences (DPO)."""
