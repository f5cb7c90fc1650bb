"""The commands of `picogpt`, each with its arguments; see `cli.py`."""
