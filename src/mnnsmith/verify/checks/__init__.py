"""The checks of a verification: each compares one thing, and says what it found."""
