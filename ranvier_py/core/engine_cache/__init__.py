"""What engines report about their KV caches: events as values, what each engine holds, and how well that is known."""
