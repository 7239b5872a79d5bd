"""What a verification feeds: texts, prompts, dialogues and pictures."""
