"""Answers that need no engine: which requests have one, under which key, and what of an answer is kept."""
