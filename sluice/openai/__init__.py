"""Translate bodies of OpenAI's API into requests, and answers into its objects; shared by the HTTP API and jobs."""
