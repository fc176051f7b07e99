"""Word problems of one turn, learnt by an adapter of low rank."""
