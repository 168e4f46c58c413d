"""Answers that need no engine: which requests may have one, under which key, and what is kept of an answer."""
