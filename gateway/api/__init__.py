"""gRPC services: messages in, events and typed errors out."""
