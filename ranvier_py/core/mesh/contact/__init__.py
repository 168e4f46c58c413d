"""First contact: proving that sessions are live, and taking each packet once."""
