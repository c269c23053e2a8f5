"""The conformance kit, shipped for vendors."""
