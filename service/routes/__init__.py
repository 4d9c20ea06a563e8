"""The service's HTTP routes."""
