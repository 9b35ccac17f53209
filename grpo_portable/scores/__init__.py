"""Saved generations → scores → words."""
