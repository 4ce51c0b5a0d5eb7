"""Child processes: started, probed, kept alive and ended."""
