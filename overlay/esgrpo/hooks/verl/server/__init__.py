"""verl's vLLM servers: what they are asked for, and which one a request goes to."""
