"""Execution of step plans on one device."""
