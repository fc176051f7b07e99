"""Write path from accepted requests to committed rows: the queue, the journal, and inserts of many requests at once."""
