"""OCI images: their documents, where they are read from, and how a layer becomes one of the
store's. Nothing in here trusts what an image says."""
