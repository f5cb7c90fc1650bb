"""Models that come with picogpt, a folder each, in the layout of OpenAI's GPT-2 release."""
