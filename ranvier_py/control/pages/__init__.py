"""The page of the control port: its static files, the stream of events that it draws, and what it showed before."""
