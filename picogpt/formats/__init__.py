"""Files of tensors, a module for each format; none of them knows of GPT-2."""
