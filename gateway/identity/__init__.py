"""Who calls: API keys, JSON Web Tokens and client certificates become a `Caller`, or one typed error."""
