"""The gRPC services: wire messages in, events and typed errors out."""
