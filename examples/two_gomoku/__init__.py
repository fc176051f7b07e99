"""Two policies that play gomoku against each other, and are trained at once."""
