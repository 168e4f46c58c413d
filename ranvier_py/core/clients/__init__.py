"""Recognises clients, finds where they break their own prefixes, and has the rules that mend that."""
