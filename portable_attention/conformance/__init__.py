"""A conformance kit."""
