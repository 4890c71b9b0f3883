"""Knows every replica and the shared index; picks one replica per request."""
