"""The HTTP endpoints, one module per noun; each only reads a request and words the answer."""
