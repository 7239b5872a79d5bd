"""How far one thing is from another: pure functions on arrays."""
