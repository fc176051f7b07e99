"""Play: episodes of environments in which a person has a part, or watches the policy."""
