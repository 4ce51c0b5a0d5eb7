"""What every Baton service shares: messages, the bus, block identity, transfer, engines, workers."""
