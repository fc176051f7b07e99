"""A maze of OpenEnv's examples, unmodified, behind OpenEnv's own server, in which a policy learns the way."""
