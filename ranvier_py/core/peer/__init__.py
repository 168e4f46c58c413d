"""What peers send each other: membership, routes, backend state, readers, stored answers, rules' verdicts."""
