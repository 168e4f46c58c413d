"""The composition root: builds the parts of one node and joins them."""
