"""Messages that cross the bus, by conversation; `codec` has them all."""
