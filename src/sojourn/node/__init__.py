"""A node: sandboxes and their captures, the link to the supervisor, the tools they need."""
