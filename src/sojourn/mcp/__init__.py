"""A server of the Model Context Protocol: durable sessions as tools of an agent.

Guarantee: whatever speaks MCP can run commands and code, keep files, and go back in a session's
history, through the same client library and with the same errors as everything else. It holds no
state that matters: sessions live in the Sojourn server, and outlive this process.
"""
