"""Where a repository's objects lie: a local directory, an S3 bucket, or memory."""
