"""The models that a gateway serves: settings, tokenizers, chat templates, formats of tool calls, and speech."""
