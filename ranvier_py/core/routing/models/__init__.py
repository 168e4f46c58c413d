"""Names of models: who serves them, who is asked about one that nobody lists, and what clients see of them."""
