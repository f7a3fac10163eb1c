"""The gateway: the only way between a session's network and the outside.

Guarantee: nothing leaves a session but through here, decided by its policy and put on record.
"""
