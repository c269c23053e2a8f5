"""The conformance kit for connectors, shipped for vendors of stores and transports."""
