"""Files of the repository that are made of others: pages, pictures, manifests."""
