"""Examination of any checkpoint, of this toolkit or another: findings as data, each with its remedy."""
