"""An API server of Kubernetes for the lab: lists, watches, and each way in which they fail."""
