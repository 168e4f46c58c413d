"""What is behind one backend's URL: how many processes, at which addresses, and whether they reuse prefixes."""
