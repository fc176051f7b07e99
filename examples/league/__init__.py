"""A self-play league: one policy in both roles of gomoku, against itself, its older versions and a script."""
