"""OpenAI's HTTP API (docs/use/http.md), on the gateway's event loop: calls take the same way as those of gRPC."""
