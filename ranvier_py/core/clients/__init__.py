"""Which clients there are, and what they do to their own prefixes, and the rules that mend it."""
