"""Changes that commands and the page make alike: of policy versions, of skipped groups, of sets of examples."""
