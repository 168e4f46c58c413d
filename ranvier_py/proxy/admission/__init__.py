"""What a request must be before an engine gets it: its target, and what it may name."""
