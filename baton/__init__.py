"""Code shared by every Baton service: messages, the bus, block identity, transfer, engines, workers."""
