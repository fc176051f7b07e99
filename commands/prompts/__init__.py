"""`spangrad prompt`: the commands of the optional part `prompts`, which no other part imports."""
