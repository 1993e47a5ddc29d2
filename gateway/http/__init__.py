"""OpenAI's and Anthropic's HTTP APIs (docs/use/http.md), on the event loop and the request path of the gRPC API."""
