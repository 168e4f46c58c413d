"""Chats: what is asked when, the clients that ask, and what came of it."""
