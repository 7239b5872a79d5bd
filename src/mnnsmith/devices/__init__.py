"""Preparing the devices that are not there by themselves."""
