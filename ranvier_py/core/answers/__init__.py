"""Reads engines' answers beside the relay, and handles the token counts that only we asked for."""
