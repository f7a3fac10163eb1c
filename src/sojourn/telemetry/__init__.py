"""What the server tells of itself: metrics, traces and logs.

Guarantee: what is not asked for costs next to nothing: counting is a few hundred nanoseconds, a
span that nobody wants less, and neither Prometheus' nor OpenTelemetry's packages are loaded before
the first scrape, or a setting that names a collector. Names, ids, verbs, codes and sizes are told;
commands, environments, contents, paths, hosts, tokens and values of secrets never.
"""
