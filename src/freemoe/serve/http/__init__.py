"""What is heard and said over HTTP, in OpenAI's words."""
