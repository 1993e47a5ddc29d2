"""What a gateway knows of its models: settings, tokenizers, chat templates, and how they write calls of tools."""
