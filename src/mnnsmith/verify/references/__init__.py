"""Other programs that compute the original, behind one protocol."""
