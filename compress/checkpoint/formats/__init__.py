"""Stateless translations between the integer form and the files other engines read."""
