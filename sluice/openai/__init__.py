"""OpenAI's API: its bodies as our requests, our answers as its objects. The gateway's HTTP API and jobs share it."""
