"""What backends have to do and how fast they do it: work in flight, rates of prefills and of answers, all learned."""
