"""States of the models of a rank: copies in main memory, and files."""
