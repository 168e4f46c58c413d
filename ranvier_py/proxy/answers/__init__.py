"""What clients get beside what engines answer: answers of the node itself, and changed fields of engines' heads."""
