"""The gateway: takes prompts over gRPC, makes them safe, routes and tokenizes them, and streams the answers."""
