"""The data plane: HTTP/1.1 on trio sockets, and the pipeline of a request."""
