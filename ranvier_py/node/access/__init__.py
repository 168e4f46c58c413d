"""Who may use this node: its keys, and what becomes of them while it runs."""
