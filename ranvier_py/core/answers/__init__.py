"""Answers: event streams read beside the relay; the token counts that only we asked for."""
