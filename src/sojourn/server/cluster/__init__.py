"""Many nodes behind stateless servers: who may speak to whom, which node a request is for, which
node a session is placed on, and what becomes of the sessions of a node that is lost."""
