"""Chats and answers: templates, conversations as token rows, preference pairs."""
