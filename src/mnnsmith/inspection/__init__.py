"""Looking at models and bundles: what they are, what they will cost, whether they are whole."""
