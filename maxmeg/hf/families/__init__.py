"""Tables from our parameters and settings to those of each Hugging Face family."""
