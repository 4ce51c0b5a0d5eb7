"""Messages that cross the bus, one module per conversation; `codec` lists all of them."""
