"""What runs on the user's side of the client: prompts in, text out."""
