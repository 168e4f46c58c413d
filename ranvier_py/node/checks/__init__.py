"""What is checked before a node serves: the world that its configuration names, each thing as one function."""
