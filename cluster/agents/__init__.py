"""What real agents send: as shapes that replay it, and where each of their prompts was held when it came."""
