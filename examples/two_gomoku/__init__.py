"""Two policies that play gomoku against each other and a script, and are trained at once."""
