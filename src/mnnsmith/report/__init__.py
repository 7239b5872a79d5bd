"""Verifications as one page of HTML that stands alone."""
