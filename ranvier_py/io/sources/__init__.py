"""What sources of backends are asked: servers of names, and the API server of Kubernetes."""
