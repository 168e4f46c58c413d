"""Chats as load: which requests are sent when, the clients that send them, and the report."""
