"""An HTTP server of OpenAI's API over the engine."""
